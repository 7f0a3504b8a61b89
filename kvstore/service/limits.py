"""What may be used at a time: requests a second, places, bytes. Who is over is told what, limit and got."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from kvstore.clock import Clock
from kvstore.errors import Overloaded

BURST_SECONDS = 2.0
"""A bucket holds what so many seconds bring in: an engine's requests come in bursts."""


class Bucket:
    """A token bucket: `per_second` requests on average, 0 for no limit.

    Threads: any.
    """

    def __init__(self, what: str, *, per_second: float, clock: Clock) -> None:
        self._what = what
        self._rate = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._level = per_second * BURST_SECONDS
        self._at = clock.monotonic()
        self._window: tuple[float, int] = (self._at, 0)

    def take(self, *, may_refuse: bool = True) -> None:
        """Count one request. What ends earlier work is counted and never refused.

        Errors: Overloaded.
        """
        if not self._rate:
            return
        with self._lock:
            now = self._clock.monotonic()
            self._level = min(self._rate * BURST_SECONDS, self._level + (now - self._at) * self._rate)
            self._at = now
            got = self._count(now)
            if self._level >= 1:
                self._level -= 1
                return
            if not may_refuse:
                self._level = max(self._level - 1, -self._rate * BURST_SECONDS)
                return
            wait = (1 - self._level) / self._rate
        raise Overloaded(
            f"{self._what}: the limit is {self._rate:g} requests a second, got {got} within the last one",
            retry_after_ms=math.ceil(wait * 1000),
        )

    def _count(self, now: float) -> int:
        begin, count = self._window
        self._window = (now, 1) if now - begin >= 1.0 else (begin, count + 1)
        return self._window[1]


class Places:
    """So many at a time for each key.

    Threads: any.
    """

    def __init__(self, what: str, *, each_max: int) -> None:
        self._what = what
        self._max = each_max
        self._lock = threading.Lock()
        self._taken: dict[Hashable, int] = {}

    @contextmanager
    def place(self, key: Hashable) -> Iterator[None]:
        """Hold one of the places of `key`.

        Errors: Overloaded when all of them are taken.
        """
        with self._lock:
            taken = self._taken.get(key, 0)
            if taken >= self._max:
                raise Overloaded(f"{self._what}: the limit is {self._max} at a time, got one more")
            self._taken[key] = taken + 1
        try:
            yield
        finally:
            with self._lock:
                if self._taken[key] == 1:
                    del self._taken[key]
                else:
                    self._taken[key] -= 1

    def __len__(self) -> int:
        return sum(self._taken.values())


class Budget:
    """Bytes held at a time, by all together.

    Threads: any.
    """

    def __init__(self, what: str, *, bytes_max: int) -> None:
        self._what = what
        self._max = bytes_max
        self._lock = threading.Lock()
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._held

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Hold `size` bytes.

        Errors: Overloaded when they do not fit beside what is held.
        """
        self.take(size)
        try:
            yield
        finally:
            self.give(size)

    def take(self, size: int) -> None:
        """Begin to hold `size` bytes; `give` ends it.

        Errors: Overloaded.
        """
        with self._lock:
            if self._held + size > self._max:
                raise Overloaded(
                    f"{self._what}: the limit is {self._max} bytes at a time, {self._held} are held, "
                    f"got {size} more"
                )
            self._held += size

    def give(self, size: int) -> None:
        """Hold `size` bytes less."""
        with self._lock:
            self._held -= size
