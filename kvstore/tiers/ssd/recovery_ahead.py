"""Segment files opened ahead of their turn: a start of thousands of segments waits for the disk once each."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.tiers.fs import FileStat, FileSystem, aligned_buffer, read_up_to
from kvstore.tiers.ssd.directory import DataDirectory
from kvstore.tiers.ssd.format import FormatError, SegmentHeader, decode_segment
from kvstore.types import PAGE_BYTES

THREADS = 8
AHEAD = 64
"""So many files are open ahead of their turn; of fewer segments each is opened when its turn has come."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A segment file: its handle, which the taker closes, and its header; or the fault that came instead."""

    number: int
    found: FileStat | None = None
    handle: int = -1
    header: SegmentHeader | None = None
    fault: OSError | FormatError | None = None


class SegmentOpener:
    """Opens segment files for reading.

    Threads: a pool of its own while there are many to open.
    """

    def __init__(self, fs: FileSystem, directory: DataDirectory, *, direct_flag: int) -> None:
        self._fs, self._directory, self._flags = fs, directory, os.O_RDONLY | direct_flag

    def each(self, numbers: Sequence[int]) -> Iterator[Opened]:
        """Yield the segments in order, opened; those that nobody takes any more are closed."""
        if len(numbers) < AHEAD:
            yield from map(self._open, numbers)
            return
        waiting: deque[Future[Opened]] = deque()
        rest = iter(numbers)
        with ThreadPoolExecutor(THREADS, "kvstore-recover") as pool:
            try:
                for number in rest:
                    waiting.append(pool.submit(self._open, number))
                    if len(waiting) == AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for left in waiting:
                    self.close(left.result())

    def _open(self, number: int) -> Opened:
        path = self._directory.segment_path(number)
        try:
            found = self._fs.stat(path)
            handle = self._fs.open(path, flags=self._flags)
        except OSError as error:
            return Opened(number, fault=error)
        try:
            page = aligned_buffer(PAGE_BYTES)
            came = read_up_to(self._fs, handle, [page], offset=0)
            return Opened(number, found, handle, decode_segment(page[:came]))
        except (OSError, FormatError) as error:
            return Opened(number, found, handle, fault=error)

    def close(self, opened: Opened) -> None:
        """Let a file go."""
        if opened.handle >= 0:
            self._fs.close(opened.handle)
