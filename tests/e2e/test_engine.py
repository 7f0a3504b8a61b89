"""The bundled engine over a real daemon: one answer whatever came from where; faults cost time only."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.engine.assembly import EngineOptions, build_engine
from kvstore.engine.costs import StepCosts
from kvstore.engine.engine import Engine
from kvstore.engine.model import Model
from kvstore.engine.pair import PrefillDecode
from kvstore.engine.request import Answer, Request
from kvstore.engine.worker import RemoteWorker
from tests.e2e.served import Home, Served
from tests.support.engine_models import tiny_llama_pair, write_gguf
from tests.support.tiny_model import tokens

OPTIONS = EngineOptions(pool_bytes=4 << 20, block_tokens=16, sequences_max=4, match_seconds=5.0)
COSTS = StepCosts(step=1e-3, row=0.02, seen=1e-8)
"""Slow on purpose: a load is given up when computing would be as fast."""
PROMPT = tuple(tokens(200))
OTHER = tuple(tokens(200, seed=8))
NEW = 24


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_llama_pair()[1]


@pytest.fixture
def home() -> Iterator[Home]:
    home = Home()
    yield home
    home.remove()


@contextmanager
def worker(home: Home, gguf: Path, role: str) -> Iterator[tuple[subprocess.Popen[str], RemoteWorker]]:
    """A worker as a process of its own."""
    socket = home.root / f"{role}.sock"
    command = [sys.executable, "-m", "kvstore.cli.main", "engine", "serve-worker", str(socket)]
    command += ["--role", role, "--model", str(gguf), "--pool", "4MiB", "--address", home.address]
    with subprocess.Popen(command, env=home.environ(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        try:
            yield process, RemoteWorker(socket)
        finally:
            process.terminate()


@pytest.mark.slow
def test_prefill_and_decode_are_processes_that_meet_in_the_daemon(home: Home, tmp_path: Path) -> None:
    """Killing either loses no request: who is left does both."""
    theirs, own = tiny_llama_pair()
    write_gguf(theirs, tmp_path / "tiny.gguf")
    with engine(own, None) as alone:
        expected = ask(alone)
    request = Request(prompt=PROMPT, max_new_tokens=NEW)
    told: list[int] = []
    with (
        Served(home),
        worker(home, tmp_path / "tiny.gguf", "prefill") as (first, prefill),
        worker(home, tmp_path / "tiny.gguf", "decode") as (_, decode),
    ):
        pair = PrefillDecode([prefill], [decode])
        answer = pair.submit(request, on_token=told.append).result(timeout=60)
        handed = prefill.submit(Request(prompt=OTHER, max_new_tokens=1)).result(timeout=60)
        follow = decode.submit(Request(prompt=(*OTHER, *handed.ids))).result(timeout=60)
        first.kill()
        first.wait()
        alone_again = pair.submit(replace(request, max_new_tokens=NEW)).result(timeout=60)
    assert answer.ids == tuple(told) == alone_again.ids == expected.ids
    assert follow.usage.hits == {"host": 128}, follow.usage


@contextmanager
def engine(model: Model, home: Home | None) -> Iterator[Engine]:
    """A fresh engine: nothing in its pool."""
    client = Client(home.address) if home is not None else None
    built = build_engine(model, client, OPTIONS, costs=COSTS)
    try:
        yield built
    finally:
        built.close()
        if client is not None:
            client.close()


def ask(engine: Engine, prompt: tuple[int, ...] = PROMPT, new: int = NEW) -> Answer:
    return engine.submit(Request(prompt=prompt, max_new_tokens=new)).result(timeout=60)


def test_one_answer_from_nothing_from_host_and_from_ssd(model: Model, home: Home) -> None:
    with engine(model, None) as alone:
        expected = ask(alone)
    with Served(home):
        with engine(model, home) as cold:
            first = ask(cold)
            cold.flush()
        with engine(model, home) as warm:
            second = ask(warm)
            turn = ask(warm, (*PROMPT, *second.ids, 5, 6, 7))
    with Served(home), engine(model, home) as restarted:
        third = ask(restarted)
    assert first.ids == second.ids == third.ids == expected.ids
    assert first.usage.hits == {}, first.usage
    assert second.usage.hits == {"host": 176}, second.usage
    assert second.usage.computed == len(PROMPT) - 176 + NEW - 1
    assert third.usage.hits == {"ssd": 176}, third.usage
    assert turn.usage.hits == {"hbm": 208}, turn.usage  # the answer became prefix
    assert not second.usage.fallbacks


def test_a_daemon_that_dies_or_hangs_costs_time_and_no_answer(model: Model, home: Home) -> None:
    with engine(model, None) as alone:
        expected = [ask(alone, PROMPT[:count]).ids for count in (90, 120, 200)]
    with Served(home) as daemon:
        with engine(model, home) as filling:
            ask(filling)
            filling.flush()
        with engine(model, home) as served:
            assert ask(served, PROMPT[:90]).ids == expected[0]
            daemon.send(signal.SIGSTOP)
            hung = ask(served, PROMPT[:120])
            daemon.stop(signal.SIGKILL)
            gone = ask(served)
    assert [hung.ids, gone.ids] == expected[1:]
