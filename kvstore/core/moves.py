"""Moving house: what still lives in a segment is copied into another, so that the old one can go.

A move is read from SSD into slots of its own and written as a new frame with the state of its run; the old
copy stays until its segment is unlinked. Whatever a crash leaves, a start finds one copy or both.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.api import U32Array
from kvstore.core.catalog import Catalog
from kvstore.core.census import living
from kvstore.core.frames import Frame, Node, Slice
from kvstore.core.index import NO_HASH
from kvstore.core.limits import Limits
from kvstore.core.segments import Segment
from kvstore.core.writeback import bucket_of
from kvstore.tiers.base import FrameHeader, FrameRead, FrameWrite, PartImage, ReadResult, WriteResult
from kvstore.types import HASH_BYTES, PAGE_BYTES, BlockHash, Fingerprint, MissReason, key_at

ROUND_BYTES = 8 << 20
ROUND_MOVES = 128
ARENA_SHARE = 0.125
"""A round takes no more slots than this share of the arena."""


class Move:
    """Blocks [start, start + count) of a frame on their way into a frame of their own."""

    __slots__ = ("count", "frame", "held_by", "location", "since", "slots", "start", "write")

    def __init__(self, frame: Frame, node: Node, start: int, count: int, slots: tuple[U32Array, ...]) -> None:
        self.frame = frame
        self.location = frame.location
        self.start = start
        self.count = count
        self.held_by = node.retention_class
        self.since = node.since
        self.slots = slots
        self.write: FrameWrite | None = None

    @property
    def is_in_place(self) -> bool:
        """Say whether the frame still lies where it was when the move began."""
        return self.frame.location == self.location

    @property
    def keys(self) -> bytes:
        """Packed hashes of the blocks."""
        return self.frame.keys[self.start * HASH_BYTES : (self.start + self.count) * HASH_BYTES]


class Moves:
    """One segment at a time, one round of moves at a time. Guarded by the ladder's lock."""

    def __init__(self, catalog: Catalog, limits: Limits) -> None:
        self._catalog = catalog
        self._limits = limits
        self._segment: Segment | None = None
        self._reason = ""
        self._round: list[Move] = []
        self._durable: list[tuple[Move, WriteResult]] = []
        self.has_failed = False
        self.is_done = False

    @property
    def segment(self) -> Segment | None:
        """The segment that is being emptied."""
        return self._segment

    @property
    def slots(self) -> list[tuple[Move, tuple[U32Array, ...]]]:
        """The slots that moves under way have taken."""
        return [(move, move.slots) for move in self._round if move.slots]

    def begin(self, segment: Segment, *, reason: str) -> None:
        """Empty a segment from now on; `reason` says for whose sake: time or capacity."""
        self._segment, self._reason, self.has_failed, self.is_done = segment, reason, False, False

    def end(self) -> None:
        """Leave a segment as it is."""
        self._segment = None

    @property
    def is_idle(self) -> bool:
        """Say whether nothing is under way, on disk or on the way into the index."""
        return not self._round and not self._durable

    def next(self, now: float) -> list[tuple[Move, list[FrameRead]]]:
        """Return the reads of the next round; none when nothing is left to move, or no slots are free."""
        segment, room = self._segment, self._room()
        if segment is None or not self.is_idle:
            return []
        self.is_done = True
        for frame in list(segment.frames):
            is_whole = frame not in self._catalog.partial
            for node, start, count in list(living(self._catalog.retention, frame, now, is_whole=is_whole)):
                self.is_done, end = False, start + count
                while start < end and room > 0 and len(self._round) < ROUND_MOVES:
                    # A loose run is one frame: a touch of one of its blocks renews them all.
                    step = count if node.loose else min(end - start, max(1, room // frame.block_stride_bytes))
                    slots = self._take_slots(frame, step)
                    if slots is None:
                        return self._reads()
                    self._round.append(Move(frame, node, start, step, slots))
                    start += step
                    room -= step * frame.block_stride_bytes
        return self._reads()

    def _room(self) -> int:
        arena = self._catalog.slabs.usable_pages * PAGE_BYTES
        return int(min(ROUND_BYTES, ARENA_SHARE * arena))

    def _take_slots(self, frame: Frame, count: int) -> tuple[U32Array, ...] | None:
        taken: list[U32Array] = []
        for part in frame.parts:
            taken.append(self._catalog.allocate(count, part))
            if len(taken[-1]) < count or frame.location is None:
                for slots in taken:
                    self._catalog.free_slots(slots)
                return None
        return tuple(taken)

    def _reads(self) -> list[tuple[Move, list[FrameRead]]]:
        reads = []
        for move in self._round:
            frame, location = move.frame, move.frame.location
            assert location is not None
            reads.append((move, [
                FrameRead(location, frame.count, frame.parts, position, move.start, move.keys,
                          self._catalog.memory.images(move.slots[position], stride_pages=part.stride_pages))
                for position, part in enumerate(frame.parts)
            ]))  # fmt: skip
        return reads

    def read(self, results: Sequence[Sequence[ReadResult]]) -> list[tuple[Move, FrameWrite]]:
        """Take what was read; returns what to write. What is bad leaves the index."""
        ready: list[tuple[Move, FrameWrite]] = []
        for move, parts in zip(self._round, results, strict=True):
            worst = min(parts, key=lambda result: result.good)
            # What was deleted meanwhile has left its place, and must not be written to another.
            if worst.good == move.count and move.is_in_place:
                ready.append((move, self._write(move, parts)))
                continue
            self._free(move)
            if move.is_in_place:
                self.has_failed |= worst.reason is not MissReason.CORRUPT
                if worst.reason is MissReason.CORRUPT:
                    self._catalog.lost_on_ssd(move.frame, move.start + worst.good)
        self._round = [move for move, _ in ready]
        return ready

    def _write(self, move: Move, parts: Sequence[ReadResult]) -> FrameWrite:
        frame = move.frame
        held_by = self._catalog.retention.held_by(move.held_by)
        is_inside = move.start and frame.parent != NO_HASH
        parent = key_at(frame.keys, move.start - 1) if is_inside else frame.parent
        header = FrameHeader(
            frame.fingerprint, frame.kind, BlockHash(parent), move.keys, frame.parts, held_by.name,
            frame.written_at, frame.provenance, move.since if move.since != frame.written_at else 0.0,
        )  # fmt: skip
        images = tuple(
            PartImage(part, self._catalog.memory.images(slots, stride_pages=part.stride_pages),
                      result.lengths, result.digests)
            for part, slots, result in zip(frame.parts, move.slots, parts, strict=True)
        )  # fmt: skip
        bucket = bucket_of(held_by, move.since, self._limits.bucket_fraction)
        move.write = FrameWrite(header, images, f"{bucket}-kept")
        return move.write

    def leaving(self, namespace: Fingerprint) -> set[Move]:
        """Return the moves that are being written though some of their blocks have left."""
        under_way = [*self._round, *(move for move, _ in self._durable)]
        return {m for m in under_way if m.write and m.frame.fingerprint == namespace and _is_gone(m)}

    def _free(self, move: Move) -> None:
        for slots in move.slots:
            self._catalog.free_slots(slots)
        move.slots = ()

    def written(self, results: Sequence[WriteResult]) -> None:
        """Take word of the writes, and let what is durable be found in its new place."""
        for move, result in zip(self._round, results, strict=True):
            self._free(move)
            if result.location is None:
                self.has_failed = True
                self._catalog.graves.written(move)
            else:
                labels = {"reason": self._reason}
                self._catalog.events.add(
                    "kvstore_ssd_copied_bytes_total", result.location.length_bytes, **labels
                )
                self._durable.append((move, result))
        self._round = []
        self.install()

    def install(self) -> None:
        """Let what is durable be found in its new place, unless somebody still needs the old one."""
        waiting, self._durable = self._durable, []
        for move, result in waiting:
            if self._install(move, result):
                self._catalog.graves.written(move)
            else:
                self._durable.append((move, result))

    def _install(self, move: Move, result: WriteResult) -> bool:
        catalog, frame, location = self._catalog, move.frame, result.location
        assert location is not None
        pieces = _covering(frame, move.start, move.count)
        if _is_gone(move) or catalog.segments.is_released(location.segment):
            # What left meanwhile must not come back by this copy.
            catalog.graves.bury(location, frame.fingerprint)
            return True
        if frame.loads or not frame.resident(0, frame.held_blocks).all():
            return False
        copy = Frame(
            fingerprint=frame.fingerprint, kind=frame.kind, parent=_header(move).parent, keys=move.keys,
            parts=frame.parts, retention_class=frame.retention_class, written_at=frame.written_at,
            provenance=frame.provenance,
        )  # fmt: skip
        for node, _ in pieces:
            _replace(node, frame, copy, move.start)
        catalog.moved(frame, copy, move.start)
        catalog.segments.place(copy, location)
        if any((n.retention_class, n.since) != (move.held_by, move.since) for n in copy.nodes):
            catalog.plan.touched[copy] = None
        return True


def _is_gone(move: Move) -> bool:
    """Say whether some of the blocks have left the index, or their old place."""
    there = sum(piece.count for _, piece in _covering(move.frame, move.start, move.count))
    return not move.is_in_place or there < move.count


def _header(move: Move) -> FrameHeader:
    assert move.write is not None
    return move.write.header


def _covering(frame: Frame, start: int, count: int) -> list[tuple[Node, Slice]]:
    """Return where the index has blocks [start, start + count) of a frame, cut to them."""
    found = []
    for node in frame.nodes:
        for piece in node.slices:
            if piece.frame is frame:
                first, end = max(start, piece.start), min(start + count, piece.start + piece.count)
                if first < end:
                    found.append((node, Slice(frame, first, end - first)))
    return found


def _replace(node: Node, frame: Frame, copy: Frame, start: int) -> None:
    """Let a node stand on a copy of blocks of a frame from `start` on instead of on the frame."""
    slices: list[Slice] = []
    for piece in node.slices:
        first = max(start, piece.start)
        end = min(start + copy.count, piece.start + piece.count)
        if piece.frame is not frame or first >= end:
            slices.append(piece)
            continue
        behind = piece.start + piece.count - end
        if first > piece.start:
            slices.append(Slice(frame, piece.start, first - piece.start))
        slices.append(Slice(copy, first - start, end - first))
        if behind:
            slices.append(Slice(frame, end, behind))
    node.slices = tuple(slices)
    copy.join(node)
    if not any(piece.frame is frame for piece in slices):
        frame.leave(node)
