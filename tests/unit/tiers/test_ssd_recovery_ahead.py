"""Many segments are opened ahead of their turn, in order, and none stays open."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.ssd.directory import DataDirectory
from kvstore.tiers.ssd.format import FormatError, SegmentHeader, encode_segment
from kvstore.tiers.ssd.recovery_ahead import AHEAD, SegmentOpener

MISSING, TORN = 5, 7


class CountingFileSystem(OsFileSystem):
    """Knows what is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open_now: set[int] = set()
        self.opened = 0

    def open(self, path: Path, *, flags: int) -> int:
        handle = super().open(path, flags=flags)
        self.opened += 1
        self.open_now.add(handle)
        return handle

    def close(self, handle: int) -> None:
        self.open_now.remove(handle)
        super().close(handle)


def segments(root: Path, count: int) -> tuple[CountingFileSystem, SegmentOpener]:
    fs, directory = CountingFileSystem(), DataDirectory(root)
    directory.segments.mkdir()
    for number in range(1, count + 1):
        if number != MISSING:
            page = encode_segment(SegmentHeader(number, bytes(16), bytes(16), "b", 1.0))
            directory.segment_path(number).write_bytes(page[:100] if number == TORN else page)
    return fs, SegmentOpener(fs, directory, direct_flag=0)


@pytest.mark.parametrize("count", [AHEAD - 1, AHEAD, 3 * AHEAD])
def test_all_come_in_order_with_header_or_fault(tmp_path: Path, count: int) -> None:
    fs, opener = segments(tmp_path, count)
    most = 0
    for number, opened in enumerate(opener.each(range(1, count + 1)), 1):
        assert opened.number == number
        if number == MISSING:
            assert isinstance(opened.fault, FileNotFoundError) and opened.found is None
        elif number == TORN:
            assert isinstance(opened.fault, FormatError) and opened.found is not None
        else:
            assert opened.header is not None and opened.header.number == number
        most = max(most, len(fs.open_now))
        opener.close(opened)
    assert not fs.open_now
    assert most <= AHEAD
    assert most == 1 or count >= AHEAD, "few segments are opened when their turn has come"


def test_who_stops_early_leaves_nothing_open(tmp_path: Path) -> None:
    fs, opener = segments(tmp_path, 3 * AHEAD)
    found = opener.each(range(1, 3 * AHEAD + 1))
    opener.close(next(found))
    assert fs.opened > 1
    found.close()  # type: ignore[attr-defined]
    assert not fs.open_now
