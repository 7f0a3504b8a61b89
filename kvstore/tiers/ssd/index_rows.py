"""The rows of the index as bytes, and back. FORMAT.md has the tables; nothing here does I/O."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import xxhash

from kvstore.tiers.base import FrameHeader, FrameKind, FrameLocation, SliceTouch
from kvstore.tiers.ssd.format import ID_BYTES
from kvstore.types import HASH_BYTES, BlockHash, Fingerprint

INDEX_VERSION = 3
VERSIONS_READ = (2, INDEX_VERSION)
"""Version 2 knew one touch a frame; its rows are read as they are, and written anew as they change."""
_KINDS = {int(kind): kind for kind in FrameKind}
_ROW = struct.Struct("<BBHIIQdI32s32s32sII")
_SEGMENT_ROW = struct.Struct("<16sQQI")
_TOUCH = struct.Struct("<IId32s")
_TOUCH_2 = struct.Struct("<d32s")

Touches = tuple[SliceTouch, ...]


class FrameRow(NamedTuple):
    """What the index keeps of a frame: all of its header that the namespace does not say."""

    offset: int
    kind: FrameKind
    header_bytes: int
    length_bytes: int
    namespace: Fingerprint
    parent: BlockHash
    keys: bytes
    parts: tuple[int, ...]
    retention_class: str
    written_at: float
    provenance: int
    key_id: int = 0
    key_check: int = 0
    touched_at: float = 0.0
    """Kept as a touch, not in the row."""


def row_of_header(
    header: FrameHeader, location: FrameLocation, *, key_id: int = 0, key_check: int = 0
) -> FrameRow:
    """Return the row of a frame that lies at `location`."""
    return FrameRow(
        location.offset, header.kind, location.header_bytes, location.length_bytes, header.namespace,
        header.parent, header.keys, tuple(part.index for part in header.parts), header.retention_class,
        header.written_at, header.provenance, key_id, key_check, header.touched_at,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """Up to `watermark` every living frame of the segment has a row; `frames` of them there must be."""

    identity: bytes
    watermark: int
    sealed: bool
    frames: int


class IndexUnusable(Exception):
    """The index is missing, damaged, of another version or of another store: rebuild it."""


def pack_row(row: FrameRow) -> bytes:
    """Return a frame row as bytes."""
    blocks = len(row.keys) // HASH_BYTES
    fixed = _ROW.pack(
        INDEX_VERSION, row.kind, len(row.parts), blocks, row.header_bytes, row.length_bytes, row.written_at,
        row.provenance, row.namespace, row.parent, row.retention_class.encode(), row.key_id, row.key_check,
    )  # fmt: skip
    body = fixed + struct.pack(f"<{len(row.parts)}H", *row.parts) + row.keys
    return body + xxhash.xxh3_64_digest(body, seed=row.offset)


def unpack_row(offset: int, value: bytes) -> FrameRow:
    """Return the frame row at an offset.

    Errors: IndexUnusable when it is damaged.
    """
    if len(value) < _ROW.size + 8 or xxhash.xxh3_64_digest(value[:-8], seed=offset) != value[-8:]:
        raise IndexUnusable(f"frame row at {offset} is damaged")
    (
        version,
        kind,
        part_count,
        blocks,
        header_bytes,
        length_bytes,
        written_at,
        provenance,
        namespace,
        parent,
        name,
        key_id,
        key_check,
    ) = _ROW.unpack_from(value)
    parts = struct.unpack_from(f"<{part_count}H", value, _ROW.size)
    keys = value[_ROW.size + 2 * part_count : -8]
    if version not in VERSIONS_READ or len(keys) != blocks * HASH_BYTES or kind not in _KINDS:
        raise IndexUnusable(
            f"frame row at {offset} of version {version} holds {len(keys)} bytes for {blocks} blocks"
        )
    return FrameRow(
        offset,
        _KINDS[kind],
        header_bytes,
        length_bytes,
        Fingerprint(namespace),
        BlockHash(parent),
        keys,
        parts,
        text_of(name),
        written_at,
        provenance,
        key_id,
        key_check,
    )


def pack_touches(offset: int, touches: Touches) -> bytes:
    """Return the touches of a frame as bytes."""
    body = b"".join(_TOUCH.pack(t.first, t.count, t.touched_at, t.retention_class.encode()) for t in touches)
    return body + xxhash.xxh3_64_digest(body, seed=offset)


def unpack_touches(offset: int, value: bytes) -> Touches:
    """Return the touches of a row; none of a damaged one: a touch may be lost."""
    body = value[:-8]
    if value[-8:] != xxhash.xxh3_64_digest(body, seed=offset):
        return ()
    if len(body) == _TOUCH.size:  # by far the most
        first, count, touched_at, name = _TOUCH.unpack(body)
        return (SliceTouch(first, count, text_of(name), touched_at),)
    if len(body) == _TOUCH_2.size:
        touched_at, name = _TOUCH_2.unpack(body)
        return (SliceTouch.whole(text_of(name), touched_at),)
    if len(body) % _TOUCH.size:
        return ()
    return tuple(
        SliceTouch(first, count, text_of(name), touched_at)
        for first, count, touched_at, name in _TOUCH.iter_unpack(body)
    )


@lru_cache(maxsize=1024)  # names of classes: few
def text_of(name: bytes) -> str:
    """Return a padded name."""
    return name.rstrip(b"\0").decode(errors="replace")


def pack_segment(row: SegmentRow) -> bytes:
    """Return a segment row as bytes."""
    body = _SEGMENT_ROW.pack(row.identity, row.watermark, int(row.sealed), row.frames)
    return body + xxhash.xxh3_64_digest(body)


def unpack_segment(value: bytes | None) -> SegmentRow | None:
    """Return a segment row; None of one that is absent or damaged."""
    if (
        value is None
        or len(value) != _SEGMENT_ROW.size + 8
        or xxhash.xxh3_64_digest(value[:-8]) != value[-8:]
    ):
        return None
    identity, watermark, sealed, frames = _SEGMENT_ROW.unpack_from(value)
    assert len(identity) == ID_BYTES
    return SegmentRow(identity, watermark, bool(sealed), frames)
