"""Engines for tests: in this process over a daemon or alone, and workers as processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.api import TierRun
from kvstore.client import Client
from kvstore.engine.assembly import EngineOptions, build_engine
from kvstore.engine.costs import StepCosts
from kvstore.engine.engine import Engine
from kvstore.engine.model import Model
from kvstore.engine.request import Answer, Request
from kvstore.engine.worker import RemoteWorker, Worker
from kvstore.types import Tier
from tests.e2e.served import Home

Working = tuple[subprocess.Popen[str], RemoteWorker]
SECONDS = 120
COSTS = StepCosts(step=1e-3, row=0.02, seen=1e-8)
"""Slow on purpose: a load is given up when computing would be as fast."""


@contextmanager
def engine(
    model: Model, home: Home | None, options: EngineOptions, *, slow: Sequence[Tier] = ()
) -> Iterator[Engine]:
    """Lend a fresh engine: nothing in its pool. Its client knows of some tiers that they are `slow`."""
    client = Client(home.address) if home is not None else None
    if client is not None:
        for tier in slow:
            client.speeds.note([TierRun(tier, 1)], block_bytes=1, seconds=1.0)
    built = build_engine(model, client, options, costs=COSTS)
    try:
        yield built
    finally:
        built.close()
        if client is not None:
            client.close()


@contextmanager
def worker(home: Home, model: str | Path, role: str, *, pool: str = "4MiB") -> Iterator[Working]:
    """Lend a worker as a process of its own."""
    socket = home.root / f"{role}.sock"
    command = [sys.executable, "-m", "kvstore.cli.main", "engine", "serve-worker", str(socket)]
    command += ["--role", role, "--model", str(model), "--pool", pool, "--address", home.address]
    command += ["--match-seconds", "5"]
    with subprocess.Popen(command, env=home.environ(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        try:
            yield process, RemoteWorker(socket)
        finally:
            process.terminate()


def ask(worker: Worker, prompt: Sequence[int], new: int) -> Answer:
    """Return the greedy answer to a prompt."""
    return worker.submit(Request(prompt=tuple(prompt), max_new_tokens=new)).result(timeout=SECONDS)
