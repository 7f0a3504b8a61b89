"""Small arena files, made without a daemon."""

from __future__ import annotations

from pathlib import Path

from kvstore.arena import Arena, ArenaHeader
from kvstore.types import PAGE_BYTES

ARENA_ID = 0x0123456789ABCDEF
BOOT_ID = 77


def write_arena(path: Path, *, pages: int, arena_id: int = ARENA_ID) -> ArenaHeader:
    """Write an arena file with room for slots of `pages` pages in all."""
    header = ArenaHeader.plan((pages + 2) * PAGE_BYTES, arena_id=arena_id, boot_id=BOOT_ID, owner=b"test")
    assert header.first_page == 2, "more than 1,024 pages: the generation table takes more than one"
    with path.open("wb") as file:
        file.write(header.pack())
        file.truncate(header.total_pages * PAGE_BYTES)
    return header


def open_arena(path: Path, *, pages: int) -> Arena:
    """Write an arena file and map it writable."""
    write_arena(path, pages=pages)
    return Arena.map(path, expected_id=ARENA_ID, writable=True)
