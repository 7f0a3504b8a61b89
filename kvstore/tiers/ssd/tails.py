"""Tails: what was written to a segment and then refused. A start must not find it once it was deleted."""

from __future__ import annotations

import os
import threading

from kvstore.tiers.fs import FileSystem
from kvstore.tiers.ssd.directory import DataDirectory
from kvstore.tiers.ssd.health import Health
from kvstore.tiers.ssd.segments import SegmentTable


class Tails:
    """Segments with refused bytes behind their last good frame, which the disk may still hold.

    Threads: thread-safe.
    """

    def __init__(
        self, *, fs: FileSystem, directory: DataDirectory, table: SegmentTable, health: Health
    ) -> None:
        self._fs, self._directory, self._table, self._health = fs, directory, table, health
        self._lock = threading.Lock()
        self._ends: dict[int, int] = {}

    def add(self, segment: int, *, uncut_at: int = 0) -> None:
        """A tail was cut off, which is not synced yet; or it could not be cut at `uncut_at`, and the segment
        is not appended to any more.
        """
        with self._lock:
            self._ends[segment] = uncut_at

    def cut(self) -> str:
        """Make sure that no start finds a tail; returns why that failed."""
        with self._lock:
            ends = dict(self._ends)
        failure = ""
        for number, end in ends.items():
            try:
                self._cut(number, end)
            except OSError as error:
                self._health.count("delete", error)
                failure = str(error)
            else:
                with self._lock:
                    if self._ends.get(number) == end:
                        del self._ends[number]
        return failure

    def _cut(self, number: int, end: int) -> None:
        if self._table.get(number) is None:
            return
        handle = self._fs.open(self._directory.segment_path(number), flags=os.O_RDWR)
        try:
            if end:
                self._fs.truncate(handle, end)
            self._fs.fdatasync(handle)
        finally:
            self._fs.close(handle)
