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


@dataclass(slots=True)
class _Handle:
    fd: int
    users: int = 0
    doomed: bool = False


class SegmentTable:
    """Known segments by number, and the bytes they take as the file system counts them.

    Threads: thread-safe; a state may be changed only through `update`.
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
            if handle is not None:
                self._retire(handle)
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
                if handle.doomed and not handle.users:
                    self._fs.close(handle.fd)

    def _borrow(self, number: int) -> _Handle:
        with self._lock:
            if number not in self._states:
                raise KeyError(number)
            handle = self._handles.get(number)
            if handle is None:
                path = self._directory.segment_path(number)
                handle = _Handle(self._fs.open(path, flags=os.O_RDONLY | self.direct_flag))
                self._handles[number] = handle
                if len(self._handles) > HANDLES_MAX:
                    self._retire(self._handles.popitem(last=False)[1])
            self._handles.move_to_end(number)
            handle.users += 1
            return handle

    def _retire(self, handle: _Handle) -> None:
        handle.doomed = True
        if not handle.users:
            self._fs.close(handle.fd)

    def close(self) -> None:
        """Let all handles go."""
        with self._lock:
            while self._handles:
                self._retire(self._handles.popitem()[1])
