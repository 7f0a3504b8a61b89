"""The health of one disk: errors, a full disk, calls that do not return, and segments that cannot be read."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kvstore.clock import Clock
from kvstore.events import Events
from kvstore.tiers.base import TierHealth

log = logging.getLogger(__name__)

ERRORS_MAX = 3
WINDOW_SECONDS = 60.0
HANG_SECONDS = 10.0
"""A call that has not returned for so long hangs: what could wait for the disk is refused instead."""
SEEN_MIN = 2
"""As often it must have been found under way: this process may have been stopped, or its clock have leapt."""
LOG_SECONDS = 10.0
"""Errors of one operation are counted each, and logged once in this time."""
ERRORS_METRIC = "kvstore_ssd_errors_total"
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True)
class _Trouble:
    """Errors within the window; ERRORS_MAX of them are too many."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=ERRORS_MAX))

    def add(self, now: float) -> bool:
        """Note an error; says whether it was one too many."""
        self.times.append(now)
        return len(self.times) == ERRORS_MAX and now - self.times[0] <= WINDOW_SECONDS


@dataclass(frozen=True, slots=True)
class _Full:
    """The disk has no room: since when, in words, and how much must be free again."""

    since: float
    text: str
    need_bytes: int


@dataclass(slots=True)
class _Call:
    """A call to the disk that is under way; `seen` is how often the watch has found it so."""

    operation: str
    started: float
    wall: float
    seen: int = 0


class Health:
    """What is known of a disk. After ERRORS_MAX errors within the window it is read-only for as long.

    Then writes are let through, and the next error ends that at once. A disk without room, and one whose
    calls hang, are well again as soon as they say so. A bug in a thread ends it for good.
    Threads: thread-safe; nothing here waits for the disk.
    """

    def __init__(self, clock: Clock, events: Events) -> None:
        self._clock = clock
        self._events = events
        self._lock = threading.Lock()
        self._trouble = _Trouble()
        self._segment_trouble: dict[int, _Trouble] = {}
        self._read_only_until = 0.0
        self._read_only_since = 0.0
        self._last_error = ""
        self._full: _Full | None = None
        self._under_way: dict[int, _Call] = {}
        self._tickets = itertools.count()
        self._failed: set[str] = set()
        self._notes: dict[str, str] = {}
        self._silent_until: dict[str, float] = {}

    def write_failed(self, operation: str, error: OSError) -> None:
        """Count a failed write or sync; too many of them end the writing for a while. A full disk is no
        failing one: it is tried again as soon as there is room.
        """
        self.count(operation, error)
        if error.errno in NO_SPACE:
            self.no_room(f"{operation}: {error}")
        else:
            self._count_trouble(f"{operation}: {error}")

    def read_failed(self, segment: int, error: OSError) -> bool:
        """Count a failed read; says whether the segment had too many of them within the window."""
        self.count("read", error)
        self._count_trouble(f"read: {error}")
        with self._lock:
            return self._segment_trouble.setdefault(segment, _Trouble()).add(self._clock.monotonic())

    def _count_trouble(self, text: str) -> None:
        now = self._clock.monotonic()
        with self._lock:
            self._last_error = text
            if self._trouble.add(now):
                if now >= self._read_only_until:
                    self._read_only_since = self._clock.wall()
                self._read_only_until = now + WINDOW_SECONDS
                log.error("ssd turned read-only errors=%d last=%s", ERRORS_MAX, text)

    def no_room(self, text: str, *, need_bytes: int = 0) -> None:
        """Note that a write found no room; the first of a stretch says since when."""
        with self._lock:
            since = self._full.since if self._full is not None else self._clock.wall()
            if self._full is None:
                log.warning("ssd has no room, blocks stay in host memory reason=%s", text)
            self._full = _Full(since, text, need_bytes)

    @property
    def missing_bytes(self) -> int | None:
        """How much must be free for the disk to have room again; None when it has."""
        with self._lock:
            return self._full.need_bytes if self._full is not None else None

    def has_room(self) -> None:
        """A write went through, or what was missing is free again."""
        with self._lock:
            if self._full is not None:
                log.info("ssd has room again")
            self._full = None

    @property
    def reads_hang(self) -> str:
        """Why nothing can be read now, or an empty string."""
        return self.hanging("read", "open")[0]

    @contextmanager
    def watching(self, operation: str) -> Iterator[None]:
        """Know of a call that may hang while it is under way."""
        ticket = next(self._tickets)
        self._under_way[ticket] = _Call(operation, self._clock.monotonic(), self._clock.wall())
        try:
            yield
        finally:
            del self._under_way[ticket]

    def hanging(self, *operations: str) -> tuple[str, float]:
        """Return (why, since which wall time) when a call, or one of these, hangs, else ("", 0)."""
        calls = [
            call
            for call in list(self._under_way.values())
            if call.seen >= SEEN_MIN and (not operations or call.operation in operations)
        ]
        if not calls:
            return "", 0.0
        call = min(calls, key=lambda call: call.started)
        seconds = self._clock.monotonic() - call.started
        if seconds < HANG_SECONDS:
            return "", 0.0
        return f"the disk hangs: {call.operation} has not returned for {seconds:.0f} s", call.wall

    def look(self) -> None:
        """Take a look at what is under way; once a second."""
        for call in list(self._under_way.values()):
            call.seen += 1

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
        """Why nothing may be written now, or an empty string. A full disk may be tried."""
        return self._refusal()[0]

    def _refusal(self) -> tuple[str, float]:
        hangs = self.hanging()
        with self._lock:
            if self._failed:
                return f"a bug ended the work of {', '.join(sorted(self._failed))}; see the log", 0.0
            if self._clock.monotonic() < self._read_only_until:
                last = f"last {self._last_error}"
                return (
                    f"read-only after {ERRORS_MAX} errors in {WINDOW_SECONDS:.0f} s, {last}",
                    self._read_only_since,
                )
        return hangs

    def state(self) -> TierHealth:
        """Return the present health."""
        reads_hang = self.reads_hang
        reason, since = self._refusal()
        with self._lock:
            full = self._full
            if not reason and full is not None:
                reason, since = f"no room: {full.text}", full.since
            told = f"{reason} (since {_time_text(since)})" if since else reason
            detail = "; ".join(filter(None, [told, *(text for _, text in sorted(self._notes.items()))]))
            readable = not self._failed and not reads_hang
            return TierHealth(readable=readable, writable=not reason, detail=detail, since=since)

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


def _time_text(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
