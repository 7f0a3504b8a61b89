"""The table of segments: what is known of each file, what it weighs, and open handles to read from it."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.tiers.base import SegmentInfo
from kvstore.tiers.fs import FileSystem
from kvstore.tiers.ssd.directory import DataDirectory
from kvstore.tiers.ssd.format import SegmentHeader

HANDLES_MAX = 256
"""Open read handles; fewer than the usual limit of 1,024 files a process."""


@dataclass(slots=True)
class SegmentState:
    """One segment file. `end` is where its last durable frame ends; `frames` counts the living ones."""

    header: SegmentHeader
    end: int
    frames: int = 0
    sealed: bool = False
    allocated_bytes: int = 0
    quarantined: bool = False


@dataclass(slots=True)
class _Handle:
    fd: int
    users: int = 0
    doomed: bool = False


class SegmentTable:
    """Known segments by number, and the bytes they take as the file system counts them.

    Threads: thread-safe, and no call to the file system is made under the lock: who asks for the usage must
    not wait for a disk that hangs.
    """

    def __init__(self, fs: FileSystem, directory: DataDirectory) -> None:
        self.direct_flag = 0
        self._fs = fs
        self._directory = directory
        self._lock = threading.Lock()
        self._states: dict[int, SegmentState] = {}
        self._foreign: dict[str, int] = {}
        self._used = 0
        self._next = 1
        self._handles: OrderedDict[int, _Handle] = OrderedDict()

    def add(self, state: SegmentState) -> None:
        """Make a segment known."""
        with self._lock:
            self._states[state.header.number] = state
            self._used += state.allocated_bytes
            self._next = max(self._next, state.header.number + 1)

    def add_foreign(self, name: str, *, allocated_bytes: int) -> None:
        """Count the bytes of a file that is left alone."""
        with self._lock:
            self._foreign[name] = allocated_bytes
            self._used += allocated_bytes

    def take_number(self) -> int:
        """Return a number for a new segment; none is given twice."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def skip_numbers(self, *, below: int) -> None:
        """Never give numbers below this one."""
        with self._lock:
            self._next = max(self._next, below)

    @property
    def next_number(self) -> int:
        """The number that the next new segment gets."""
        with self._lock:
            return self._next

    def get(self, number: int) -> SegmentState | None:
        """Return the state of a segment, or None when it is not or no longer known."""
        with self._lock:
            return self._states.get(number)

    def weigh(self, number: int, *, allocated_bytes: int) -> None:
        """Set what the file system has given a segment."""
        with self._lock:
            state = self._states.get(number)
            if state is not None:
                self._used += allocated_bytes - state.allocated_bytes
                state.allocated_bytes = allocated_bytes

    def grow(self, number: int, *, end: int, frames: int, allocated_bytes: int) -> None:
        """Note frames that became durable."""
        with self._lock:
            state = self._states.get(number)
            if state is not None:
                state.end = end
                state.frames += frames
                self._used += allocated_bytes - state.allocated_bytes
                state.allocated_bytes = allocated_bytes

    def seal(self, number: int) -> None:
        """Note that nothing is appended any more."""
        with self._lock:
            state = self._states.get(number)
            if state is not None:
                state.sealed = True

    def quarantine(self, number: int) -> None:
        """Read no more from a segment."""
        with self._lock:
            state = self._states.get(number)
            if state is not None:
                state.quarantined = True

    def bury(self, number: int, *, frames: int) -> bool:
        """Note deleted frames; says whether the segment is sealed and holds no living frame any more."""
        with self._lock:
            state = self._states.get(number)
            if state is None:
                return False
            state.frames = max(0, state.frames - frames)
            return state.sealed and state.frames == 0

    def drop(self, number: int) -> int:
        """Forget a segment and let its handle go; returns the bytes it took."""
        with self._lock:
            state = self._states.pop(number, None)
            if state is not None:
                self._used -= state.allocated_bytes
            handle = self._handles.pop(number, None)
            idle = self._retire(handle) if handle is not None else []
        self._close(idle)
        return state.allocated_bytes if state is not None else 0

    @property
    def used_bytes(self) -> int:
        """The bytes of all segment files as the file system counts them."""
        with self._lock:
            return self._used

    def infos(self) -> list[SegmentInfo]:
        """Return the present segments in order of their numbers."""
        with self._lock:
            return [
                SegmentInfo(
                    segment=number,
                    path=str(self._directory.segment_path(number)),
                    bucket=state.header.bucket,
                    bytes=state.allocated_bytes,
                    frames=state.frames,
                    sealed=state.sealed,
                    created_at=state.header.created_at,
                )
                for number, state in sorted(self._states.items())
            ]

    def sealed_bytes(self) -> dict[int, int]:
        """Return how many bytes each sealed segment takes: nothing more, as the core asks under its lock."""
        with self._lock:
            return {number: s.allocated_bytes for number, s in self._states.items() if s.sealed}

    def __len__(self) -> int:
        with self._lock:
            return len(self._states)

    @contextmanager
    def reading(self, number: int) -> Iterator[int]:
        """Lend a read handle, kept open for the next reader.

        Errors: KeyError when the segment is not known, OSError.
        """
        handle = self._borrow(number)
        try:
            yield handle.fd
        finally:
            with self._lock:
                handle.users -= 1
                idle = [handle] if handle.doomed and not handle.users else []
            self._close(idle)

    def _borrow(self, number: int) -> _Handle:
        with self._lock:
            if number not in self._states:
                raise KeyError(number)
            handle = self._handles.get(number)
            if handle is not None:
                self._handles.move_to_end(number)
                handle.users += 1
                return handle
        path = self._directory.segment_path(number)
        opened = _Handle(self._fs.open(path, flags=os.O_RDONLY | self.direct_flag), users=1)
        with self._lock:
            if number not in self._states or number in self._handles:
                # Somebody was faster, or the segment is gone: this handle serves one reader.
                opened.doomed = True
                return opened
            self._handles[number] = opened
            last = self._handles.popitem(last=False)[1] if len(self._handles) > HANDLES_MAX else None
            idle = self._retire(last) if last is not None else []
        self._close(idle)
        return opened

    @staticmethod
    def _retire(handle: _Handle) -> list[_Handle]:
        handle.doomed = True
        return [] if handle.users else [handle]

    def _close(self, idle: list[_Handle]) -> None:
        for handle in idle:
            self._fs.close(handle.fd)

    def close(self) -> None:
        """Let all handles go."""
        idle: list[_Handle] = []
        with self._lock:
            while self._handles:
                idle += self._retire(self._handles.popitem()[1])
        self._close(idle)
