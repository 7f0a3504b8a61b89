"""A point in monotonic time that a verb must not outlive."""

from __future__ import annotations

from kvstore.clock import Clock
from kvstore.errors import DeadlineExceeded


class Deadline:
    """`seconds` from its making; what is handed on is always what is left."""

    __slots__ = ("_clock", "_end", "_start")

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._start = clock.monotonic()
        self._end = self._start + seconds

    def left(self) -> float:
        """Return the seconds left, 0 when it has passed."""
        return max(0.0, self._end - self._clock.monotonic())

    def passed(self) -> bool:
        """Say whether nothing is left."""
        return self._clock.monotonic() >= self._end

    def exceeded(self, what: str) -> DeadlineExceeded:
        """Return the error that says so."""
        return DeadlineExceeded(f"{what} within {self._end - self._start:.3f} s")

    def spent(self) -> float:
        """Return the seconds since it was made."""
        return self._clock.monotonic() - self._start
