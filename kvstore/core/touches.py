"""What is remembered on disk of the touches of a frame: who holds which of its blocks, and since when."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from itertools import pairwise

from kvstore.core.frames import Frame
from kvstore.core.retention import Retention
from kvstore.tiers.base import SLICES_MAX, FrameHeader, SliceTouch, TouchNote
from kvstore.types import key_count


def touch_notes(
    retention: Retention, frames: Iterable[Frame], *, partial: Container[Frame]
) -> list[TouchNote]:
    """Return notes of the frames that are on SSD now; of `partial` ones some blocks have left the index."""
    return [
        TouchNote(frame.location, held_slices(retention, frame, is_whole=frame not in partial))
        for frame in frames
        if frame.location is not None and frame.nodes
    ]


def held_slices(retention: Retention, frame: Frame, *, is_whole: bool) -> tuple[SliceTouch, ...]:
    """Return who holds the blocks of a frame, from the first to the last, in few slices.

    Blocks that have left the index count as not touched since they were written.
    """
    node = frame.nodes[0]
    if len(frame.nodes) == 1 and (is_whole or node.loose):
        return (SliceTouch.whole(node.retention_class, node.since),)
    pieces = [
        SliceTouch(piece.start, piece.count, node.retention_class, node.since)
        for node in frame.nodes
        for piece in node.slices
        if piece.frame is frame
    ]
    pieces.sort(key=lambda piece: piece.first)
    return few(retention, filled(pieces, frame.count, frame.retention_class, frame.written_at))


def recovered_slices(header: FrameHeader, touches: Iterable[SliceTouch]) -> list[SliceTouch]:
    """Return who holds the blocks of a frame found on disk, from the first to the last."""
    since = header.touched_at or header.written_at
    return filled(touches, key_count(header.keys), header.retention_class, since)


def filled(pieces: Iterable[SliceTouch], count: int, retention_class: str, since: float) -> list[SliceTouch]:
    """Return slices without gaps and without equal neighbours, from ordered ones."""
    found: list[SliceTouch] = []
    end = 0
    for piece in (*pieces, SliceTouch(count, 0, "", 0.0)):
        if piece.first > end:
            _append(found, SliceTouch(end, piece.first - end, retention_class, since))
        if piece.count:
            _append(found, piece)
        end = piece.first + piece.count
    return found


def _append(found: list[SliceTouch], piece: SliceTouch) -> None:
    last = found[-1] if found else None
    if last is not None and (last.retention_class, last.touched_at) == (
        piece.retention_class,
        piece.touched_at,
    ):
        found[-1] = replace(last, count=last.count + piece.count)
    else:
        found.append(piece)


def few(retention: Retention, slices: list[SliceTouch]) -> tuple[SliceTouch, ...]:
    """Merge neighbours until they are few; the one that ends first speaks for both: a block may be forgotten
    early after a restart, never kept too long. What costs the least life is merged first.
    """

    def end(piece: SliceTouch) -> float:
        return piece.touched_at + retention.held_by(piece.retention_class).ttl_seconds

    while len(slices) > SLICES_MAX:
        pairs = enumerate(pairwise(slices))
        _, at = min((_loss(left, right, end(left), end(right)), at) for at, (left, right) in pairs)
        left, right = slices[at], slices[at + 1]
        soonest = min(left, right, key=end)
        slices[at : at + 2] = [replace(soonest, first=left.first, count=left.count + right.count)]
    return tuple(slices)


def _loss(left: SliceTouch, right: SliceTouch, left_end: float, right_end: float) -> float:
    """Return the block-seconds that are lost by letting the one that ends first speak for both."""
    if left_end == right_end:
        return 0.0
    return (
        (left_end - right_end) * left.count if left_end > right_end else (right_end - left_end) * right.count
    )
