"""Sending a trace to a daemon: clients side by side, each request at its time and after what it needs."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

from kvstore.cli.drive_run import Driver, Reply
from kvstore.told_clock import ToldClock
from kvstore.trace.blocks import TraceRequest
from kvstore.trace.simulator import seconds_of
from kvstore.types import key_at, key_count

LOOK_SECONDS = 0.05
END_SECONDS = 10.0
"""After an interrupt clients finish the request they are at; who takes longer than this is not waited for."""
NOTHING = -1


@dataclass(slots=True)
class Driven:
    """What was sent and what came back. `sent` are the requests at the times at which they were sent.

    Units: wall seconds; blocks as named. `lag_seconds` is how late a request was sent at worst.
    """

    sent: list[TraceRequest] = field(default_factory=list)
    delivered_blocks: list[int] = field(default_factory=list)
    stored_blocks: int = 0
    refused_blocks: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    lag_seconds: float = 0.0
    seconds: float = 0.0


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Lend an event that the first Ctrl-C sets. Raised in the middle of anything, as it is otherwise, an
    interrupt can get lost (in a finalizer) or leave a lock behind. The second one is raised as usual.

    Threads: the main thread.
    """
    told = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        told.set()

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # a shell runs it in the background: the Ctrl-C is meant for another
        yield told
        return
    signal.signal(signal.SIGINT, tell)
    try:
        yield told
    finally:
        signal.signal(signal.SIGINT, before)


def needed(requests: Sequence[TraceRequest]) -> list[int]:
    """Return for each request which earlier one wrote first what it continues, NOTHING for none.

    A session's next turn comes when the one before has been answered, however fast a trace is sent.
    """
    writers: dict[bytes, int] = {}
    found = []
    for index, request in enumerate(requests):
        keys = request.keys()
        known, unknown = 0, key_count(keys)
        while known < unknown:
            middle = (known + unknown) // 2
            if key_at(keys, middle) in writers:
                known = middle + 1
            else:
                unknown = middle
        found.append(writers[key_at(keys, known - 1)] if known else NOTHING)
        for place in range(known, key_count(keys)):
            writers[key_at(keys, place)] = index
    return found


class Replay:
    """A trace on its way. With a clock time is told rather than waited for, and there is one client."""

    def __init__(
        self,
        drivers: Sequence[Driver],
        requests: Sequence[TraceRequest],
        *,
        speed: float,
        clock: ToldClock | None,
        stop: threading.Event,
    ) -> None:
        assert clock is None or len(drivers) == 1
        self._drivers = drivers
        self._requests = requests
        self._speed = speed
        self._clock = clock
        self._stop = stop
        self._needs = needed(requests) if len(drivers) > 1 else [NOTHING] * len(requests)
        self._is_done = bytearray(len(requests))
        self._wake = threading.Condition()
        self._next = 0
        self._told_ms = 0
        self._sent: list[tuple[float, TraceRequest, Reply]] = []
        self._lag_seconds = 0.0
        self._error: BaseException | None = None
        self._began = 0.0

    def run(self, on_progress: Callable[[int], None]) -> Driven:
        """Send every request at its time, divided by the speed (inf: as fast as they are answered); ends
        early when it is told to stop.

        Errors: TierUnavailable when the daemon stops to answer; DataCorrupt on wrong bytes.
        """
        self._began = time.monotonic()
        threads = [
            threading.Thread(target=self._work, args=(driver,), name=f"kvstore-drive-{number}", daemon=True)
            for number, driver in enumerate(self._drivers)
        ]
        for thread in threads:
            thread.start()
        while not self._stop.is_set() and any(thread.is_alive() for thread in threads):
            self._stop.wait(LOOK_SECONDS)
            on_progress(len(self._sent))
        end = time.monotonic() + END_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if self._error is not None:
            raise self._error
        return self._driven()

    def _driven(self) -> Driven:
        driven = Driven(lag_seconds=self._lag_seconds, seconds=time.monotonic() - self._began)
        for _, request, reply in sorted(self._sent, key=lambda item: item[0]):
            driven.sent.append(request)
            driven.delivered_blocks.append(reply.delivered)
            driven.stored_blocks += reply.stored
            driven.refused_blocks += reply.refused
            if reply.reason is not None:
                driven.misses[str(reply.reason)] += 1
        return driven

    def _work(self, driver: Driver) -> None:
        try:
            while (index := self._take()) is not None:
                request = self._requests[index]
                if not self._is_due(driver, request) or not self._has_what_it_needs(index):
                    return
                at = time.monotonic()
                sent_ms = self._told_ms if self._clock is not None else round(1000 * (at - self._began))
                reply = driver.serve(request) if request.runs else Reply()
                with self._wake:
                    self._sent.append((at, replace(request, timestamp_ms=sent_ms), reply))
                    self._is_done[index] = True
                    self._wake.notify_all()
        except BaseException as error:
            self._error = self._error or error
            self._stop.set()

    def _take(self) -> int | None:
        with self._wake:
            if self._stop.is_set() or self._next == len(self._requests):
                return None
            self._next += 1
            return self._next - 1

    def _is_due(self, driver: Driver, request: TraceRequest) -> bool:
        """Wait until a request's time has come; says whether it may be sent then."""
        due_ms = request.timestamp_ms - self._requests[0].timestamp_ms
        if self._clock is not None:
            if due_ms > self._told_ms:
                driver.settle()  # behind it nothing is under way
                self._clock.tell(seconds_of(due_ms))
                self._told_ms = due_ms
            return not self._stop.is_set()
        ahead = due_ms / 1000 / self._speed - (time.monotonic() - self._began)
        if ahead > 0:
            return not self._stop.wait(ahead)
        if math.isfinite(self._speed):
            self._lag_seconds = max(self._lag_seconds, -ahead)
        return not self._stop.is_set()

    def _has_what_it_needs(self, index: int) -> bool:
        needs = self._needs[index]
        if needs == NOTHING:
            return True
        with self._wake:
            while not self._is_done[needs]:
                if self._stop.is_set():
                    return False
                self._wake.wait(LOOK_SECONDS)
        return True
