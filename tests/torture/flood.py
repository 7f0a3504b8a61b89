"""A client process that floods: many sessions at once, long matches, puts as large as it may, leases kept."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvstore.client import Client, ClientLimits, OpenNamespace, Transport
from kvstore.types import MatchMode, ReleaseOutcome
from tests.torture.workload import KEPT, LOOSE, blocks_of, prompt_keys, store

LONG_BLOCKS = 512
LIMITS = ClientLimits(connect_seconds=20.0)
QUIET_PROMPT = 700


def flooding(namespace: OpenNamespace, over: threading.Event, *, seed: int) -> None:
    """Ask for much, until told to end."""
    dice = random.Random(seed)
    tokens = np.random.default_rng(1_000_000 + seed).integers(0, 1 << 20, 16 * LONG_BLOCKS)
    keys = namespace.hashes(tokens)
    source = blocks_of(keys)
    absent = os.urandom(32 * 65536)
    while not over.is_set():
        verb = dice.randrange(4)
        if verb == 0:
            namespace.put(namespace.root, keys, source, retention_class="handoff", deadline_seconds=2.0)
        elif verb == 1:
            namespace.match(keys, deadline_seconds=2.0, lease_seconds=2.0)
        elif verb == 2:
            namespace.match(keys[:32] + absent[: 32 * 65535], mode=MatchMode.BITMAP, deadline_seconds=2.0)
        else:
            match = namespace.match(keys, deadline_seconds=2.0)
            namespace.release(match, used=0, outcome=ReleaseOutcome.UNUSED)


def main(address: str, sessions: str) -> None:
    """Flood until standard input ends."""
    logging.disable(logging.WARNING)
    os.nice(5)
    over = threading.Event()
    clients = [Client(address, transport=Transport.MAPPED, limits=LIMITS) for _ in range(int(sessions))]
    threads = []
    for seed, client in enumerate(clients):
        namespace = client.open(LOOSE)
        threads.append(threading.Thread(target=flooding, args=(namespace, over), kwargs={"seed": seed % 8}))
    for thread in threads:
        thread.start()
    sys.stdout.write("flooding\n")
    sys.stdout.flush()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()


@contextmanager
def flood(address: str, *, sessions: int) -> Iterator[None]:
    """Flood a daemon from another process for as long as the context lasts."""
    command = [sys.executable, __file__, address, str(sessions)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "flooding\n"
        try:
            yield
        finally:
            process.stdin.close()


@dataclass(frozen=True, slots=True)
class Quiet:
    """How a client that asks for little was served. Units: milliseconds."""

    matches: int
    p50_ms: float
    p99_ms: float
    misses: Counter[str]

    def __str__(self) -> str:
        missed = f", missed {dict(self.misses)}" if self.misses else ""
        return f"{self.matches} matches, p50 {self.p50_ms:.2f} ms, p99 {self.p99_ms:.2f} ms{missed}"


def quiet(address: str, *, seconds: float) -> Quiet:
    """Match one short prompt again and again, with pauses, and say how long it took."""
    taken: list[float] = []
    misses: Counter[str] = Counter()
    with Client(address, transport=Transport.MAPPED, limits=LIMITS) as client:
        namespace = client.open(KEPT)
        keys = prompt_keys(namespace, QUIET_PROMPT)
        store(namespace, keys)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.perf_counter()
            match = namespace.match(keys, deadline_seconds=5.0)
            taken.append(1000 * (time.perf_counter() - begin))
            if match.reason is not None:
                misses[match.reason] += 1
            namespace.release(match, used=match.blocks)
            time.sleep(0.002)
    p50, p99 = np.percentile(taken, [50, 99])
    return Quiet(len(taken), float(p50), float(p99), misses)


if __name__ == "__main__":
    main(*sys.argv[1:])
