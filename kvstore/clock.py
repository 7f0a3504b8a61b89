"""Time comes in by constructor: the daemon hands in SystemClock, tests and the simulator ManualClock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks in one: leases run on monotonic time, TTLs on wall time."""

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Return seconds since the Unix epoch; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Return time.monotonic()."""
        return time.monotonic()

    def wall(self) -> float:
        """Return time.time()."""
        return time.time()


class ManualClock:
    """A clock that moves only when told to; both hands together, or the wall hand alone for jumps."""

    def __init__(self, *, wall: float = 1_700_000_000.0, monotonic: float = 1000.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def monotonic(self) -> float:
        """Return the virtual monotonic time."""
        return self._monotonic

    def wall(self) -> float:
        """Return the virtual wall time."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Move both hands forward."""
        assert seconds >= 0
        self._wall += seconds
        self._monotonic += seconds

    def jump_wall(self, seconds: float) -> None:
        """Move the wall hand alone, as an administrator or NTP would."""
        self._wall += seconds
