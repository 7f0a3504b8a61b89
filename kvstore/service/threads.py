"""Named, supervised threads: an error that escapes one is logged, counted and ends the daemon's readiness."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.events import Events

_log = logging.getLogger(__name__)


class Supervisor:
    """Starts the daemon's threads and hears when one fails.

    Threads: any. `on_failure` is called once per failure, on the failing thread.
    """

    def __init__(self, events: Events, *, on_failure: Callable[[str], None]) -> None:
        self._events = events
        self._on_failure = on_failure
        self._threads: list[threading.Thread] = []
        self.stopping = threading.Event()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` on its own thread until it returns; it should return soon after `stopping` is set."""
        thread = threading.Thread(target=self.guard, args=(name, work), name=f"kvstore-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def every(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        """Run `work` again and again, `seconds` apart, until `stopping` is set."""

        def loop() -> None:
            while not self.stopping.wait(seconds):
                work()

        self.start(name, loop)

    def guard(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` here; an error that escapes is logged, counted and reported, not raised."""
        try:
            work()
        except Exception:
            self.failed(name)

    def failed(self, name: str) -> None:
        """Log, count and report the exception being handled as the end of thread or task `name`."""
        _log.exception("thread failed", extra={"work": name})
        self._events.add("kvstore_thread_failures_total", thread=name)
        self._on_failure(name)

    def stop(self, *, deadline_seconds: float) -> list[str]:
        """Ask all threads to end and wait for them; returns the names of those that did not."""
        self.stopping.set()
        for thread in self._threads:
            thread.join(deadline_seconds / max(1, len(self._threads)))
        return [thread.name for thread in self._threads if thread.is_alive()]
