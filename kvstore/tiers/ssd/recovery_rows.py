"""From what a start reads of a frame to what it keeps: its row, its parts, its touches."""

from __future__ import annotations

from kvstore.layout import Part
from kvstore.namespace import Namespace
from kvstore.tiers.base import SliceTouch
from kvstore.tiers.ssd.format import StoredFrame, StoredPart, stored_part
from kvstore.tiers.ssd.index_rows import FrameRow, Touches


def resolve_parts(
    namespace: Namespace | None, indexes: tuple[int, ...], stored: tuple[StoredPart, ...]
) -> tuple[Part, ...] | None:
    """Return the namespace's parts with these indexes; None when the frame was written with others."""
    if namespace is None or any(index >= len(namespace.layout.parts) for index in indexes):
        return None
    parts = tuple(namespace.layout.parts[index] for index in indexes)
    if stored and tuple(map(stored_part, parts)) != stored:
        return None
    return parts


def row_of(frame: StoredFrame, offset: int) -> FrameRow:
    """Return the index row of a frame found at an offset of its segment."""
    return FrameRow(
        offset, frame.kind, frame.header_bytes, frame.length_bytes, frame.namespace, frame.parent, frame.keys,
        tuple(part.index for part in frame.parts), frame.retention_class, frame.written_at, frame.provenance,
        frame.key_id, frame.key_check, frame.touched_at,
    )  # fmt: skip


def cut_touches(touches: Touches, *, blocks: int) -> Touches:
    """Return touches without what lies behind the last block."""
    for touch in touches:
        if touch.first + touch.count > blocks:
            return tuple(
                SliceTouch(t.first, min(t.count, blocks - t.first), t.retention_class, t.touched_at)
                for t in touches
                if t.first < blocks
            )
    return touches
