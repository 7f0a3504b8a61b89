"""Whoever writes the index can make way between any two rows."""

from __future__ import annotations

from pathlib import Path

from kvstore.tiers.base import FrameKind, SliceTouch
from kvstore.tiers.ssd.index import FORGOTTEN_PER_ROW, Change, Growth, Index
from kvstore.tiers.ssd.index_rows import FrameRow
from kvstore.types import HASH_BYTES, BlockHash, Fingerprint

ROWS = 50


def row(offset: int) -> FrameRow:
    """A frame of one block."""
    name = bytes(HASH_BYTES)
    return FrameRow(
        offset, FrameKind.MAIN, 4096, 8192, Fingerprint(name), BlockHash(name), name, (0,), "agent", 1.0, 0
    )


def test_every_row_is_told(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", store=bytes(16), bytes_max=1 << 26, create=True)
    offsets = [4096 + 8192 * place for place in range(ROWS)]
    growth = Growth(1, bytes(16), 4096, 4096 + 8192 * ROWS, tuple(row(offset) for offset in offsets))
    touches = {(1, offset): (SliceTouch.whole("agent", 2.0),) for offset in offsets}
    gone = [(1, offset) for offset in offsets[:10]]
    rows_told = []
    for change in (
        Change(growths=[growth]),
        Change(touches=dict(touches)),
        Change(frames_gone=gone),
        Change(segments_gone=[1]),
    ):
        count = [0]

        def told(count: list[int] = count) -> None:
            count[0] += 1

        index.commit(change, next_number=2, on_row=told)
        rows_told.append(count[0])
    index.close()
    # Of the segment there were 40 rows and as many touches left.
    assert rows_told == [ROWS, ROWS, 10, 80 // FORGOTTEN_PER_ROW]
