"""Calls that come due: one thread that ends submitted verbs at their deadlines."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable

from kvstore.clock import Clock

_log = logging.getLogger(__name__)


class Alarms:
    """Runs callbacks at points in monotonic time; the thread starts with the first.

    Threads: any may set; callbacks run on the alarm thread and must be short.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def set(self, seconds: float, callback: Callable[[], None]) -> None:
        """Run `callback` in `seconds`."""
        with self._changed:
            heapq.heappush(self._due, (self._clock.monotonic() + seconds, next(self._order), callback))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-alarms", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Run what is still due at once, and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                callback = self._next()
            if callback is None:
                return
            try:
                callback()
            except Exception:
                _log.exception("alarm failed")

    def _next(self) -> Callable[[], None] | None:
        while True:
            if not self._due:
                if self._closed:
                    return None
                self._changed.wait()
                continue
            left = self._due[0][0] - self._clock.monotonic()
            if left <= 0 or self._closed:
                return heapq.heappop(self._due)[2]
            self._changed.wait(left)
