"""The health of one disk: errors are counted, three within a minute stop the writing for a minute."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvstore.clock import Clock
from kvstore.events import Events
from kvstore.tiers.base import TierHealth

log = logging.getLogger(__name__)

ERRORS_MAX = 3
WINDOW_SECONDS = 60.0
LOG_SECONDS = 10.0
"""Errors of one operation are counted each, and logged once in this time."""
ERRORS_METRIC = "kvstore_ssd_errors_total"


class Health:
    """What is known of a disk. After ERRORS_MAX write errors within the window it is read-only for as long.

    Then writes are let through, and the next error ends that at once. A bug in a thread ends it for good.
    Threads: thread-safe.
    """

    def __init__(self, clock: Clock, events: Events) -> None:
        self._clock = clock
        self._events = events
        self._lock = threading.Lock()
        self._errors: deque[float] = deque(maxlen=ERRORS_MAX)
        self._read_only_until = 0.0
        self._last_error = ""
        self._failed: set[str] = set()
        self._notes: dict[str, str] = {}
        self._silent_until: dict[str, float] = {}

    def write_failed(self, operation: str, error: OSError) -> None:
        """Count a failed write or sync; too many of them end the writing for a while."""
        self.count(operation, error)
        now = self._clock.monotonic()
        with self._lock:
            self._last_error = f"{operation}: {error}"
            self._errors.append(now)
            if len(self._errors) == ERRORS_MAX and now - self._errors[0] <= WINDOW_SECONDS:
                self._read_only_until = now + WINDOW_SECONDS
                log.error("ssd turned read-only errors=%d last=%s", ERRORS_MAX, self._last_error)

    def count(self, operation: str, error: Exception) -> None:
        """Count an error, and log it unless one like it was logged a moment ago."""
        self._events.add(ERRORS_METRIC, operation=operation)
        now = self._clock.monotonic()
        with self._lock:
            if now < self._silent_until.get(operation, 0.0):
                return
            self._silent_until[operation] = now + LOG_SECONDS
        log.warning("ssd error operation=%s error=%s", operation, error)

    def note(self, topic: str, text: str) -> None:
        """Keep a sentence for `detail`; an empty one clears the topic."""
        with self._lock:
            if text:
                self._notes[topic] = text
            else:
                self._notes.pop(topic, None)

    @property
    def read_only_reason(self) -> str:
        """Why nothing may be written now, or an empty string."""
        with self._lock:
            if self._failed:
                return f"a bug ended the work of {', '.join(sorted(self._failed))}; see the log"
            if self._clock.monotonic() < self._read_only_until:
                return (
                    f"read-only after {ERRORS_MAX} errors in {WINDOW_SECONDS:.0f} s, last {self._last_error}"
                )
            return ""

    def state(self) -> TierHealth:
        """Return the present health."""
        reason = self.read_only_reason
        with self._lock:
            detail = "; ".join(filter(None, [reason, *(text for _, text in sorted(self._notes.items()))]))
            return TierHealth(readable=not self._failed, writable=not reason, detail=detail)

    def thread_failed(self, name: str) -> None:
        """Log and count the exception at hand, and turn the health bad for good."""
        log.exception("thread failed name=%s", name)
        self._events.add(ERRORS_METRIC, operation="thread")
        with self._lock:
            self._failed.add(name)

    def supervised(self, name: str, body: Callable[[], None]) -> threading.Thread:
        """Return a named thread whose escaped exception is logged, counted and turns the health bad."""

        def run() -> None:
            try:
                body()
            except Exception:
                self.thread_failed(name)

        return threading.Thread(target=run, name=name, daemon=True)
