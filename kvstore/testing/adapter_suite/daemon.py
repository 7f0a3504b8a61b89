"""The real daemon of a suite, behind a tap: how it fails, and what it says of itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from kvstore.cli.child import ChildDaemon
from kvstore.cli.connection import Daemon
from kvstore.cli.status import labelled
from kvstore.client import Client
from kvstore.errors import KVStoreError
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.testing.adapter_suite.tap import Tap

T = TypeVar("T")
SHARED_MEMORY = Path("/dev/shm")
SETTLE_SECONDS = 20.0
"""Half of a lease's usual life and less: what is given back by then was not left to its deadline."""
POLL_SECONDS = 0.05
HELD = ("kvstore_leases", "kvstore_reservations", "kvstore_loads_in_flight")
FILLER_BLOCKS, FILLER_BYTES = 16, 60 << 10
FILLER = Namespace(
    model="filler",
    weights="none",
    layout=Layout.single(dtype="u8", bytes_max=FILLER_BYTES, layers=1),
    block_tokens=1,
)


class TriedDaemon:
    """`kvstore serve` with an arena and a data directory of its own; a context manager that ends it.

    Threads: misfortunes may come from the tap's threads.
    """

    def __init__(self, *, arena_bytes: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvs-", dir=SHARED_MEMORY))
        settings = {"host.directory": str(self.directory)}
        self._arena_bytes = arena_bytes
        self._child = ChildDaemon(self.directory, arena_bytes=arena_bytes, settings=settings)
        self._changes = threading.RLock()
        self._is_down = self._is_stopped = False

    def __enter__(self) -> Self:
        self._child.start()
        self.tap = Tap(self.directory, self._child.address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            stack.callback(self._child.stop)
            stack.callback(self.tap.close)
            self.resume()

    def kill(self) -> None:
        """End it as a crash would."""
        with self._changes:
            self._is_down = True
            os.kill(self._child.pid, signal.SIGKILL)
            self._child.stop()

    def restart(self) -> None:
        """End it as a crash would, and start it again on what it left."""
        with self._changes:
            self.kill()
            self.recover()

    def hang(self) -> None:
        """Let it hang: it keeps its sockets and answers nothing."""
        with self._changes:
            self._is_stopped = True
            os.kill(self._child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after it hung."""
        with self._changes:
            if self._is_stopped:
                self._is_stopped = False
                os.kill(self._child.pid, signal.SIGCONT)

    def recover(self) -> None:
        """End every misfortune: the tap has no rules, and the daemon runs."""
        self.tap.clear()
        with self._changes:
            self.resume()
            if self._is_down:
                self._child.start()
                self._is_down = False

    def push_out_of_host(self) -> None:
        """Fill host memory with something else, so that everything stored before lies on SSD alone."""
        eventually(lambda: not self.gauge("kvstore_write_queue_bytes"), "everything is written")
        rows = np.zeros((FILLER_BLOCKS, FILLER_BYTES), np.uint8)
        with Client(self._child.address) as client:
            space = client.open(FILLER)
            for number in range(self._arena_bytes // rows.nbytes + 1):
                keys = space.hashes(np.arange(FILLER_BLOCKS) + FILLER_BLOCKS * number)
                space.put(space.root, keys, rows, retention_class="handoff")
            space.delete(None)

    def gauge(self, name: str) -> float:
        """Return a gauge."""
        with Daemon(self._child.address) as daemon:
            return float(daemon.status()["gauges"][name])

    def hit_tokens(self) -> float:
        """Return how many tokens are counted as delivered."""
        with Daemon(self._child.address) as daemon:
            counters = daemon.status()["counters"]
        return sum(labelled(counters, "kvstore_hit_tokens_total", "tier").values())

    def holds_nothing(self, *, seconds: float = SETTLE_SECONDS) -> None:
        """Wait until nobody holds leases, reservations or loads."""
        held = f"none of {', '.join(HELD)}"
        eventually(lambda: not any(self.gauge(name) for name in HELD), held, seconds=seconds)


def eventually(check: Callable[[], T | None], what: str, *, seconds: float = SETTLE_SECONDS) -> T:
    """Wait until `check` returns something true, and return that.

    Errors: AssertionError after `seconds`.
    """
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(KVStoreError):
            if found := check():
                return found
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_SECONDS)
