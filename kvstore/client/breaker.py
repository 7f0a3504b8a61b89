"""The breaker: after failures in a row nobody asks any more, except one probe now and then."""

from __future__ import annotations

import threading

from kvstore.clock import Clock


class Breaker:
    """Closed, open or half-open, in the usual sense.

    `failures` in a row open it; after `seconds` one caller is let through, and each failed probe doubles the
    pause up to `seconds_max`. Any success closes it.
    Threads: any.
    """

    def __init__(self, clock: Clock, *, failures: int, seconds: float, seconds_max: float) -> None:
        self._clock = clock
        self._failures_max = failures
        self._seconds = seconds
        self._seconds_max = seconds_max
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = 0.0
        self._probe_at = 0.0
        self._probing = False

    def admit(self) -> bool:
        """Say whether a request may go out; while open, True once per pause, for the probe."""
        with self._lock:
            if self._failures < self._failures_max:
                return True
            now = self._clock.monotonic()
            if now < self._probe_at:
                return False
            # Should the probe never report back, the next one may go after the same pause.
            self._probe_at = now + self._pause
            self._probing = True
            return True

    def succeed(self) -> None:
        """Note an answer: the breaker closes."""
        with self._lock:
            self._failures = 0
            self._pause = 0.0
            self._probing = False

    def fail(self) -> None:
        """Note a request without an answer."""
        with self._lock:
            self._failures += 1
            # Of the many that were under way when it opened, none but the probe may lengthen the pause.
            if self._failures == self._failures_max or self._probing:
                self._probing = False
                self._pause = min(self._pause * 2 or self._seconds, self._seconds_max)
                self._probe_at = self._clock.monotonic() + self._pause

    @property
    def is_open(self) -> bool:
        """Whether requests are being refused (or only probed)."""
        return self._failures >= self._failures_max
