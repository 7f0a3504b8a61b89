"""The arena file: what is refused, what the views show, and that a closed arena hurts nobody."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.arena import HUGE_PAGE_BYTES, Advice, Arena, ArenaHeader
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.types import PAGE_BYTES
from tests.support.arenas import ARENA_ID, BOOT_ID, open_arena, write_arena


def u32(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


def test_a_header_survives_its_page() -> None:
    header = ArenaHeader.plan(9 << 20, arena_id=2**64 - 1, boot_id=2**63, owner=b"o" * 32)
    assert header.total_pages == 2304
    assert header.first_page == 1 + 3, "2,304 generations of 4 bytes take three pages"
    page = header.pack()
    assert len(page) == PAGE_BYTES
    assert ArenaHeader.unpack(page, "x") == header


@pytest.mark.parametrize("total_bytes", [0, PAGE_BYTES, 2 * PAGE_BYTES, 17 << 40])
def test_a_size_without_slots_or_beyond_the_addresses_is_refused(total_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="bytes"):
        ArenaHeader.plan(total_bytes, arena_id=1, boot_id=1, owner=b"")


def test_mapping_shows_the_file(tmp_path: Path) -> None:
    with open_arena_pair(tmp_path) as (writer, reader):
        assert (reader.arena_id, reader.header.boot_id) == (ARENA_ID, BOOT_ID)
        assert (reader.first_page, reader.total_pages) == (2, 18)
        assert reader.size_bytes == len(reader.bytes) == 18 * PAGE_BYTES
        writer.generations[5] = 41
        writer.rows(5, 1, PAGE_BYTES)[0, :3] = (1, 2, 3)
        assert reader.generations[5] == 41
        assert reader.bytes[5 * PAGE_BYTES :][:4].tolist() == [1, 2, 3, 0]


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    with open_arena_pair(tmp_path) as (_, reader):
        assert reader.images(u32(3), stride_pages=1)[0].readonly
        for view in (reader.bytes, reader.generations, reader.rows(3, 1, PAGE_BYTES)):
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True


def test_the_mapping_suits_huge_pages(tmp_path: Path) -> None:
    arena = open_arena(tmp_path / "a", pages=1000)
    assert arena.bytes.ctypes.data % HUGE_PAGE_BYTES == 0


def test_a_stale_file_is_named_with_both_ids(tmp_path: Path) -> None:
    write_arena(tmp_path / "a", pages=4, arena_id=0xBEEF)
    with pytest.raises(TierUnavailable, match=r"000000000000beef.*0123456789abcdef"):
        Arena.map(tmp_path / "a", expected_id=ARENA_ID)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.truncate(100), "not an arena"),
        (lambda file: file.write(b"notarena"), "not an arena"),
        (lambda file: (file.seek(8), file.write(b"\x09")), "version 9"),
        (lambda file: (file.seek(20), file.write(b"\xff")), "checksum"),
        (lambda file: file.truncate(5 * PAGE_BYTES), "cut short"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: object, message: str) -> None:
    write_arena(tmp_path / "a", pages=4)
    with (tmp_path / "a").open("r+b") as file:
        assert callable(damage)
        damage(file)
    with pytest.raises(TierUnavailable, match=message):
        Arena.map(tmp_path / "a", expected_id=ARENA_ID)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="cannot be opened"):
        Arena.map(tmp_path / "gone", expected_id=ARENA_ID)


def test_images_join_neighbours_and_keep_the_order(tmp_path: Path) -> None:
    arena = open_arena(tmp_path / "a", pages=40)
    for page in range(2, 42):
        arena.rows(page, 1, PAGE_BYTES)[0] = page
    images = arena.images(u32(8, 11, 2, 20, 23, 26), stride_pages=3)
    assert [len(image) // PAGE_BYTES for image in images] == [6, 3, 9]
    pages = [image[at] for image in images for at in range(0, len(image), PAGE_BYTES)]
    assert pages == [8, 9, 10, 11, 12, 13, 2, 3, 4, 20, 21, 22, 23, 24, 25, 26, 27, 28]
    images[1][0] = 99
    assert arena.bytes[2 * PAGE_BYTES] == 99
    assert arena.images(u32(), stride_pages=3) == ()


@pytest.mark.parametrize(
    ("slots", "stride"), [((0,), 1), ((1,), 1), ((41,), 2), ((42,), 1), ((2, 2**32 - 1), 1)]
)
def test_slots_outside_are_refused(tmp_path: Path, slots: tuple[int, ...], stride: int) -> None:
    arena = open_arena(tmp_path / "a", pages=40)
    with pytest.raises(InvalidArgument, match="allowed: 2 to 42"):
        arena.images(u32(*slots), stride_pages=stride)
    with pytest.raises(InvalidArgument, match="outside"):
        arena.rows(slots[-1], 1, stride * PAGE_BYTES)


def test_views_outlive_the_arena(tmp_path: Path) -> None:
    arena = open_arena(tmp_path / "a", pages=4)
    (image,) = arena.images(u32(3), stride_pages=1)
    rows, generations = arena.rows(3, 1, PAGE_BYTES), arena.generations
    arena.close()
    arena.close()
    gc.collect()
    image[0] = 7
    assert rows[0, 0] == 7
    assert len(generations) == 6
    with pytest.raises(TierUnavailable, match="closed"):
        arena.images(u32(3), stride_pages=1)
    with pytest.raises(TierUnavailable, match="closed"):
        arena.advise(0, 1, Advice.POPULATE_READ)


def test_the_last_view_unmaps(tmp_path: Path) -> None:
    arena = open_arena(tmp_path / "named.arena", pages=4)
    rows = arena.rows(3, 1, PAGE_BYTES)
    arena.close()
    assert is_mapped("named.arena")
    del rows
    gc.collect()
    assert not is_mapped("named.arena")


def test_advice_outside_is_refused(tmp_path: Path) -> None:
    arena = open_arena(tmp_path / "a", pages=4)
    for first, pages in ((-1, 1), (0, 0), (0, 7), (6, 1)):
        with pytest.raises(InvalidArgument, match="outside"):
            arena.advise(first, pages, Advice.POPULATE_READ)
    assert arena.advise(0, 6, Advice.DONTDUMP) == 0


def is_mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


@contextmanager
def open_arena_pair(directory: Path) -> Iterator[tuple[Arena, Arena]]:
    """A writer's and a reader's mapping of one file."""
    writer = open_arena(directory / "a", pages=16)
    reader = Arena.map(directory / "a", expected_id=ARENA_ID)
    yield writer, reader
    reader.close()
    writer.close()
