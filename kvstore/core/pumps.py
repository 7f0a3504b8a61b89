"""The pumps carry decided reads and writes to the SSD tier and report back what came of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from kvstore.core.frames import Frame
from kvstore.core.loads import Load, Loads
from kvstore.core.moves import Moves
from kvstore.core.retention import Retention
from kvstore.core.writeback import WriteBack, frame_bytes
from kvstore.tiers.base import ReadResult, Tier, WriteResult
from kvstore.types import MissReason

Decision = Callable[[], AbstractContextManager[None]]


class Turns:
    """One thread at a time works, and works again for all who asked meanwhile, itself included.

    A tier may answer at once, on the caller's thread, and each answer asks for more: without turns a long
    queue would recurse until the stack ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_working = False
        self._is_asked = False

    def run(self, work: Callable[[], None]) -> None:
        """Do the work, or leave it to who is at it."""
        with self._lock:
            self._is_asked = True
            if self._is_working:
                return
            self._is_working = True
        try:
            while self._goes_on():
                work()
        except BaseException:
            with self._lock:
                self._is_working = False
            raise

    def _goes_on(self) -> bool:
        with self._lock:
            self._is_working, self._is_asked = self._is_asked, False
            return self._is_working


class ReadPump:
    """Submits loads as long as there is room for more."""

    def __init__(self, tier: Tier | None, loads: Loads, decision: Decision) -> None:
        self._turns = Turns()
        self._tier = tier
        self._loads = loads
        self._decision = decision

    def run(self) -> None:
        """Submit what may be submitted now."""
        if self._tier is not None and self._loads.queued:
            self._turns.run(self._submit)

    def _submit(self) -> None:
        assert self._tier is not None
        with self._decision():
            ready = self._loads.next()
        if not ready:
            return
        futures = self._tier.read_into([read for _, _, read in ready])
        for (load, position, _), future in zip(ready, futures, strict=True):
            future.add_done_callback(partial(self._done, load, position))

    def _done(self, load: Load, position: int, future: Future[ReadResult]) -> None:
        with self._decision():
            self._loads.came(load, position, _read_result(future))
        self.run()


class WritePump:
    """Submits write-behind in order: taking turns keeps two threads from overtaking one another."""

    def __init__(self, tier: Tier | None, writeback: WriteBack, loads: Loads, decision: Decision) -> None:
        self._tier = tier
        self._writeback = writeback
        self._loads = loads
        self._decision = decision
        self._turns = Turns()

    def run(self) -> None:
        """Submit what fits into the tier's queue now."""
        if self._tier is not None and self._writeback.waiting:
            self._turns.run(self._submit)

    def _submit(self) -> None:
        assert self._tier is not None
        with self._decision():
            ready = self._writeback.next(is_reading=bool(self._loads.queued))
        futures = self._tier.write([write for _, write in ready]) if ready else []
        for (frame, _), future in zip(ready, futures, strict=True):
            future.add_done_callback(partial(self._done, frame, frame_bytes(frame)))

    def _done(self, frame: Frame, size: int, future: Future[WriteResult]) -> None:
        result = _write_result(future)
        with self._decision():
            self._writeback.finished(frame, size, result)
        self.run()


class CopyPump:
    """Carries moves: reads a round, writes it elsewhere, and lets the index know."""

    def __init__(self, tier: Tier | None, moves: Moves, retention: Retention, decision: Decision) -> None:
        self._tier = tier
        self._moves = moves
        self._retention = retention
        self._decision = decision

    def run(self) -> None:
        """Begin the next round, unless one is under way."""
        if self._tier is None or (self._moves.segment is None and self._moves.is_idle):
            return
        with self._decision():
            self._moves.install()
            ready = self._moves.next(self._retention.now())
        if ready:
            futures = iter(self._tier.read_into([read for _, reads in ready for read in reads]))
            groups = [[next(futures) for _ in reads] for _, reads in ready]
            _when_all([future for group in groups for future in group], partial(self._read, groups))

    def _read(self, groups: list[list[Future[ReadResult]]]) -> None:
        assert self._tier is not None
        with self._decision():
            ready = self._moves.read([[_read_result(future) for future in group] for group in groups])
        if ready:
            futures = self._tier.write([write for _, write in ready])
            _when_all(futures, partial(self._written, futures))

    def _written(self, futures: list[Future[WriteResult]]) -> None:
        with self._decision():
            self._moves.written([_write_result(future) for future in futures])


def _when_all(futures: Sequence[Future[Any]], then: Callable[[], None]) -> None:
    """Call once all futures are done, on the thread of the last one."""
    lock, left = threading.Lock(), [len(futures)]

    def one_done(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if is_last:
            then()

    for future in futures:
        future.add_done_callback(one_done)


def _write_result(future: Future[WriteResult]) -> WriteResult:
    error = future.exception()
    return WriteResult(None, f"{type(error).__name__}: {error}") if error is not None else future.result()


def _read_result(future: Future[ReadResult]) -> ReadResult:
    error = future.exception()
    if error is not None:
        return ReadResult(0, b"", b"", MissReason.TIER_DOWN, f"{type(error).__name__}: {error}")
    return future.result()
