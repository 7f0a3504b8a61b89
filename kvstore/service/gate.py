"""The gate: whether the daemon admits requests, and how many clients and streams it takes at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from kvstore.errors import Overloaded, ShuttingDown, TierUnavailable
from kvstore.service.turns import Turns

_log = logging.getLogger(__name__)


class State(StrEnum):
    """STARTING and DRAINING admit nothing new; FAILED is a dead thread: nothing is promised any more."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


class Gate:
    """Admission. What ends work that was admitted (commit, release, abort) passes also while draining.

    Threads: any; `on_change` is called with the new state on the thread that caused it.
    """

    def __init__(self, *, sessions_max: int, streams_max: int) -> None:
        self._limits = {"sessions": sessions_max, "streams": streams_max}
        self._lock = threading.Lock()
        self._counts = {"sessions": 0, "streams": 0}
        self.turns = Turns()
        self._state = State.STARTING
        self._cause = ""
        self.on_change: Callable[[State], None] = lambda state: None

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    @property
    def sessions(self) -> int:
        """Clients connected now."""
        return self._counts["sessions"]

    def move(self, state: State, *, cause: str = "") -> None:
        """Change the state. Draining and failure are final, except that a failed daemon may still drain."""
        with self._lock:
            final = (State.DRAINING, State.FAILED)
            if self._state is state or (self._state in final and state is not State.DRAINING):
                return
            self._state, self._cause = state, cause
        _log.info("state", extra={"state": state.value, "cause": cause or "none"})
        self.on_change(state)

    def admit(self) -> None:
        """Let a new request in.

        Errors: ShuttingDown, TierUnavailable.
        """
        if self._state is State.SERVING:
            return
        if self._state is State.FAILED:
            raise TierUnavailable(f"daemon: {self._cause} failed; it must be restarted")
        raise ShuttingDown(f"daemon: {self._state}, nothing new is admitted")

    def admit_ending(self) -> None:
        """Let in a request that ends work admitted earlier.

        Errors: as `admit`, but not while draining.
        """
        if self._state is not State.DRAINING:
            self.admit()

    @contextmanager
    def place(self, kind: str) -> Iterator[None]:
        """Hold one of the places for `sessions` or `streams`.

        Errors: Overloaded when all are taken; as `admit`.
        """
        self.admit()
        with self._lock:
            if self._counts[kind] >= self._limits[kind]:
                raise Overloaded(
                    f"daemon: {self._limits[kind]} {kind} at a time, all taken", retry_after_ms=1000
                )
            self._counts[kind] += 1
        try:
            yield
        finally:
            with self._lock:
                self._counts[kind] -= 1
