"""A result that arrives later, for engines that must not block: poll, wait for or watch it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.errors import DeadlineExceeded

T = TypeVar("T")


class Ticket(Generic[T]):
    """One submitted verb. It always resolves: at the latest when the verb's own deadline passes.

    Threads: any may ask; the first `resolve` or `fail` wins, later ones are told so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._fd = -1

    def poll(self) -> bool:
        """Say whether the result is there; never blocks."""
        return self._done.is_set()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable with the result; not yours to close."""
        with self._lock:
            if self._fd < 0:
                self._fd = os.eventfd(int(self._done.is_set()), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._fd

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Errors: what the verb raises; DeadlineExceeded when `timeout` seconds pass first.
        """
        if not self._done.wait(timeout):
            raise DeadlineExceeded(
                f"ticket: no result within {timeout} s; the verb's own deadline still runs"
            )
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set before the event, unless an error is

    def resolve(self, value: T) -> bool:
        """Give the result; False when there is one already."""
        return self._finish(value, None)

    def fail(self, error: BaseException) -> bool:
        """Give an exception instead; False when there is a result already."""
        return self._finish(None, error)

    def run(self, work: Callable[[], T]) -> None:
        """Resolve with what `work` returns or raises."""
        try:
            self.resolve(work())
        except BaseException as error:
            self.fail(error)

    def _finish(self, value: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._done.is_set():
                return False
            self._value, self._error = value, error
            self._done.set()
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)
            return True

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
