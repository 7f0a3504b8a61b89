"""Copies of rows: the bytes arrive whichever way is taken, and memmove is left only where it is slow."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.layout import Part, Segment
from kvstore.rows import THIN_BYTES, Bytes, copier, copy_bytes, new_stage
from kvstore.types import PAGE_BYTES

ROWS = 5


def rows_at(offset: int, *, width: int, pitch: int, fill: bool = False) -> Bytes:
    """Rows that begin so many bytes into a page, and so many bytes after each other."""
    base = np.zeros(ROWS * pitch + 2 * PAGE_BYTES, np.uint8)
    if fill:
        base[:] = np.arange(len(base)) % 251 + 5
    begin = (offset - base.ctypes.data) % PAGE_BYTES
    return base[begin : begin + ROWS * pitch].reshape(ROWS, pitch)[:, :width]


@pytest.mark.parametrize(
    ("source_offset", "target_offset", "width", "source_pitch", "target_pitch", "is_trapped"),
    [
        (0, 16, 3 * PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES, True),
        (0, 1, 3 * PAGE_BYTES, 4 * PAGE_BYTES, 3 * PAGE_BYTES, True),
        (0, 63, THIN_BYTES, 10_000, 10_000, True),
        (4090, 7, THIN_BYTES, PAGE_BYTES, PAGE_BYTES, True),
        (0, 0, 3 * PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES, False),
        (0, 64, 3 * PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES, False),
        (16, 0, 3 * PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES, False),
        (0, 16, 10_000, 3 * PAGE_BYTES, 10_000, False),  # of such rows only a few trail
        (0, 16, THIN_BYTES - 1, PAGE_BYTES, PAGE_BYTES, False),
    ],
)
def test_rows_that_all_trail_by_a_few_bytes_are_copied_another_way(
    source_offset: int,
    target_offset: int,
    width: int,
    source_pitch: int,
    target_pitch: int,
    is_trapped: bool,
) -> None:
    source = rows_at(source_offset, width=width, pitch=source_pitch, fill=True)
    target = rows_at(target_offset, width=width, pitch=target_pitch)
    copy = copier(source, target)
    assert (copy is not copy_bytes) == is_trapped
    copy(source, target)
    assert (target == source).all()


def test_the_other_way_changes_no_byte() -> None:
    every = np.tile(np.arange(256, dtype=np.uint8), (1, THIN_BYTES // 256))
    source, target = rows_at(0, width=THIN_BYTES, pitch=8192), rows_at(16, width=THIN_BYTES, pitch=8192)
    source[:] = every
    copy = copier(source, target)
    assert copy is not copy_bytes
    copy(source, target)
    assert (target == every).all()


def test_a_stage_begins_with_a_page_as_slots_do() -> None:
    part = Part(0, "kv", "all", 2 * PAGE_BYTES, (Segment(0, 1, 0, 2 * PAGE_BYTES),))
    stage = new_stage(part, ROWS)
    assert stage.shape == (ROWS, part.bytes_max)
    assert stage.ctypes.data % PAGE_BYTES == 0
