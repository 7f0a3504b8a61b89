"""All frames of a sealed segment without their keys, as one value of the index. FORMAT.md has its bytes.

A start reads one value a segment instead of a row a frame. The rows stay what counts: a table that is not
there, damaged, or of other rows than the segment has now, is as if there were none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.tiers.base import FRAME_ROW, FrameKind, marks_of
from kvstore.tiers.ssd.index_rows import FrameRow, SegmentRow, text_of
from kvstore.types import HASH_BYTES, Fingerprint

TABLE_VERSION = 1
_HEAD = struct.Struct("<HHI16sII")
_SHAPE = struct.Struct("<BBH32s32sIII4x")
_CHECK_BYTES = 8
_KINDS = {int(kind): kind for kind in FrameKind}
_ROW = struct.Struct("<QQQQdIIII")
"""FRAME_ROW, one at a time."""


class TableShape(NamedTuple):
    """What very many rows have in common."""

    namespace: Fingerprint
    kind: FrameKind
    parts: tuple[int, ...]
    retention_class: str
    provenance: int
    key_id: int
    key_check: int


class StoredTable(NamedTuple):
    """The frames of a segment as the index keeps them. Shapes: rows FRAME_ROW[n], marks u32[blocks]."""

    shapes: tuple[TableShape, ...]
    rows: npt.NDArray[np.void]
    marks: npt.NDArray[np.uint32]


def pack_table(number: int, identity: bytes, rows: Iterable[FrameRow]) -> bytes:
    """Return the table of a segment that has exactly these rows, in write order."""
    rows = list(rows)
    shapes: dict[TableShape, int] = {}
    packed = [
        _ROW.pack(
            row.offset,
            int.from_bytes(row.keys[:8], "little"),
            int.from_bytes(row.keys[-HASH_BYTES:][:8], "little"),
            int.from_bytes(row.parent[:8], "little"),
            row.written_at,
            row.length_bytes,
            row.header_bytes,
            len(row.keys) // HASH_BYTES,
            shapes.setdefault(_shape_of(row), len(shapes)),
        )
        for row in rows
    ]
    marks = marks_of(b"".join(row.keys for row in rows))
    head = _HEAD.pack(TABLE_VERSION, 0, len(shapes), identity, len(packed), len(marks))
    body = b"".join((head, *packed, marks.tobytes(), *map(_pack_shape, shapes)))
    return body + xxhash.xxh3_64_digest(body, seed=number)


def _shape_of(row: FrameRow) -> TableShape:
    return TableShape(
        row.namespace, row.kind, row.parts, row.retention_class, row.provenance, row.key_id, row.key_check
    )


def _pack_shape(shape: TableShape) -> bytes:
    fixed = _SHAPE.pack(
        shape.kind, 0, len(shape.parts), shape.namespace, shape.retention_class.encode(), shape.provenance,
        shape.key_id, shape.key_check,
    )  # fmt: skip
    return fixed + struct.pack(f"<{len(shape.parts)}H", *shape.parts)


def unpack_table(number: int, value: bytes | None, *, row: SegmentRow | None) -> StoredTable | None:
    """Return the table of a segment; None when there is none that says what the segment's rows say.

    A sealed segment gets no rows any more, so as many rows as there were are the very same.
    """
    if row is None or not row.sealed or value is None or len(value) < _HEAD.size + _CHECK_BYTES:
        return None
    if xxhash.xxh3_64_digest(memoryview(value)[:-_CHECK_BYTES], seed=number) != value[-_CHECK_BYTES:]:
        return None
    version, _, shape_count, identity, count, blocks = _HEAD.unpack_from(value)
    if version != TABLE_VERSION or identity != row.identity or count != row.frames:
        return None
    rows = np.frombuffer(value, FRAME_ROW, count, _HEAD.size)
    at = _HEAD.size + count * FRAME_ROW.itemsize
    marks = np.frombuffer(value, "<u4", blocks, at)
    at += marks.nbytes
    shapes = []
    for _ in range(shape_count):
        kind, _, part_count, namespace, name, provenance, key_id, check = _SHAPE.unpack_from(value, at)
        parts = struct.unpack_from(f"<{part_count}H", value, at + _SHAPE.size)
        at += _SHAPE.size + 2 * part_count
        shapes.append(
            TableShape(Fingerprint(namespace), _KINDS[kind], parts, text_of(name), provenance, key_id, check)
        )
    return StoredTable(tuple(shapes), rows, marks)
