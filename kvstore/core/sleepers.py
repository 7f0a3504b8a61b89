"""Frames that lie on SSD alone and that nobody has asked for lately: a row each, found by their first key.

A frame asleep has no keys in memory and hangs in no tree. What needs it, such as a match that ends where it
begins, has its header read and wakes it (`core/waking.py`). Whether it lives, and what it is worth, is told
from its row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core.beds import Marks, Names, Rows, held_array, held_of_table, row_of, shape_of
from kvstore.core.frames import Frame, Node, Slice
from kvstore.core.index import NO_HASH
from kvstore.core.retention import Retention
from kvstore.core.segments import Segment, SegmentTable
from kvstore.core.tags import U64, TagMap, tag_of, tags_of
from kvstore.tiers.base import (
    FRAME_ROW,
    FrameHeader,
    FrameLocation,
    FrameShape,
    FrameTable,
    SliceTouch,
    marks_of,
)
from kvstore.types import BlockHash, Fingerprint, key_at, key_count

ROW_BITS = 24
ROWS_MAX = 1 << ROW_BITS
LEFT_SECONDS = 5.0
"""So long frames are not asked for again whose header did not come."""


class Sleeper(NamedTuple):
    """A frame asleep: the number of its segment and its row there."""

    segment: int
    row: int


class RunsAsleep(Exception):
    """A decision needs frames that sleep: wake them, then decide again. `keys` are those of the request."""

    def __init__(self, sleepers: Iterable[Sleeper], keys: bytes = b"") -> None:
        super().__init__("frames that are needed sleep")
        self.sleepers = list(sleepers)
        self.keys = keys


class Sleepers:
    """All frames asleep. Guarded by the ladder's lock."""

    def __init__(self, segments: SegmentTable) -> None:
        self.names = Names()
        self.count = 0
        self.blocks_held: Counter[tuple[int, int]] = Counter()
        """How many blocks of a shape a class holds, by the numbers of both."""
        self._segments = segments
        self._spaces: Counter[Fingerprint] = Counter()
        self._map = TagMap()
        self._left: dict[Sleeper, float] = {}

    def leave(self, sleepers: Iterable[Sleeper], *, now: float) -> None:
        """Do not ask for frames for a while whose header did not come. Units: monotonic seconds."""
        self._left.update(dict.fromkeys(sleepers, now + LEFT_SECONDS))

    def expire(self, monotonic: float) -> None:
        """Ask again for what did not come a while ago."""
        if self._left:
            self._left = {sleeper: until for sleeper, until in self._left.items() if until > monotonic}

    def wanted(self, sleepers: Iterable[Sleeper]) -> list[Sleeper]:
        """Return those of the frames whose header may come now."""
        return [sleeper for sleeper in sleepers if sleeper not in self._left]

    def is_empty(self, space: Fingerprint) -> bool:
        """Say whether no frame of a namespace sleeps."""
        return not self._spaces[space]

    # Going to bed

    def add_table(self, table: FrameTable, *, now: float) -> list[Sleeper]:
        """Take all frames of a segment that a start found; they are looked up from the next `rebuild` on.

        Returns those touched later than now, which have to be woken: what the disk says of them is wrong.
        """
        rows = table.rows.copy()
        codes = np.array([self.names.shape(shape) for shape in table.shapes], np.uint32)
        held, early = held_of_table(table, self.names, now=now)
        if len(rows):
            rows["shape"] = codes[rows["shape"]]
        first = self._lay(table.segment, rows, held, table.marks)
        return [Sleeper(table.segment, first + row) for row in early]

    def add(self, header: FrameHeader, location: FrameLocation, held: Iterable[SliceTouch]) -> Sleeper:
        """Take one frame, of which no block has left the index; one that slept before has its row again."""
        slices = held_array(0, held, self.names, now=math.inf)
        row = self._segments.at(location.segment).bed.row_at(location.offset)
        if row is None:
            sleeper = self._add_row(header, location, slices)
        else:
            sleeper = Sleeper(location.segment, row)
            self._restore(sleeper, slices, key_count(header.keys))
        if sleeper not in self.beginning_with(header.namespace, key_at(header.keys, 0)):
            self._index(sleeper)
        return sleeper

    def _restore(self, sleeper: Sleeper, held: Rows, blocks: int) -> None:
        segment = self._segments.at(sleeper.segment)
        segment.bed.restore(sleeper.row, held, blocks)
        self._count(segment, segment.bed.rows[sleeper.row : sleeper.row + 1], held)

    def _add_row(self, header: FrameHeader, location: FrameLocation, held: Rows) -> Sleeper:
        rows = np.array([row_of(header, location, self.names.shape(shape_of(header)))], FRAME_ROW)
        return Sleeper(location.segment, self._lay(location.segment, rows, held, marks_of(header.keys)))

    def _lay(self, number: int, rows: Rows, held: Rows, marks: Marks) -> int:
        segment = self._segments.at(number)
        first = segment.bed.add(rows, held, marks)
        assert first + len(rows) <= ROWS_MAX
        self._count(segment, rows, held)
        return first

    def _count(self, segment: Segment, rows: Rows, held: Rows) -> None:
        """Count frames that came, and who holds them; `held` numbers them from 0."""
        self.count += len(rows)
        pairs = rows["shape"][held["row"]].astype(np.uint64) << np.uint64(32) | held["name"]
        found, at = np.unique(pairs, return_inverse=True)
        for pair, blocks in zip(found.tolist(), np.bincount(at, held["count"]).tolist(), strict=True):
            self.blocks_held[pair >> 32, pair & 0xFFFFFFFF] += int(blocks)
        for code in np.unique(rows["shape"]).tolist():
            shape, mine = self.names.shapes[code], rows["shape"] == code
            length = int(rows["length_bytes"][mine].sum(dtype=np.int64))
            self._spaces[shape.namespace] += int(np.count_nonzero(mine))
            self._segments.weigh(segment, shape.retention_class, length)
        for code in np.unique(held["name"]).tolist():
            since = float(held["since"][held["name"] == code].max())
            segment.note_touch(self.names.classes[code], since)

    def _index(self, sleeper: Sleeper) -> None:
        row, value = self._row(sleeper), _value(sleeper)
        if not (self._map.add(int(row["head"]), value) and self._map.add(int(row["tail"]), value + 1)):
            self.rebuild()

    def rebuild(self, *, spare: float = 2.0) -> None:
        """Find all frames by their first and last keys from now on, and none that have left; `spare` times as
        many places are kept as that takes.
        """
        tags: list[U64] = []
        values: list[U64] = []
        for segment in self._segments:
            bed = segment.bed
            if bed.count:
                there = bed.there()
                numbers = _values(segment.number, there)
                tags += [bed.rows["head"][there], bed.rows["tail"][there]]
                values += [numbers, numbers + np.uint64(1)]
        self._map.rebuild(_joined(tags), _joined(values), spare=spare)

    # Leaving

    def take(self, sleeper: Sleeper) -> None:
        """A frame wakes, or leaves."""
        segment = self._segments.get(sleeper.segment)
        assert segment is not None
        row = segment.bed.rows[sleeper.row]
        number, length = int(row["shape"]), int(row["length_bytes"])
        shape = self.names.shapes[number]
        for touch in segment.bed.held_slices(sleeper.row, self.names):
            self.blocks_held[number, self.names.of_class(touch.retention_class)] -= touch.count
        segment.bed.take(sleeper.row)
        self.count -= 1
        self._spaces[shape.namespace] -= 1
        self._segments.weigh(segment, shape.retention_class, -length)

    def is_here(self, sleeper: Sleeper) -> bool:
        """Say whether a frame is still asleep."""
        segment = self._segments.get(sleeper.segment)
        return (
            segment is not None
            and sleeper.row < len(segment.bed.rows)
            and bool(segment.bed.rows["count"][sleeper.row])
        )

    # Looking up

    def located(self, sleepers: Iterable[Sleeper]) -> tuple[list[Sleeper], list[FrameLocation]]:
        """Return those of the frames that are still asleep, and where they lie."""
        there = [sleeper for sleeper in sleepers if self.is_here(sleeper)]
        return there, [self.location(sleeper) for sleeper in there]

    def location(self, sleeper: Sleeper) -> FrameLocation:
        """Return where a frame lies."""
        row = self._row(sleeper)
        return FrameLocation(
            sleeper.segment, int(row["offset"]), int(row["header_bytes"]), int(row["length_bytes"])
        )

    def shape(self, sleeper: Sleeper) -> FrameShape:
        """Return what a frame has in common with others."""
        return self.names.shapes[int(self._row(sleeper)["shape"])]

    def blocks(self, sleeper: Sleeper) -> int:
        """Return how many blocks a frame has."""
        return int(self._row(sleeper)["count"])

    def held(self, sleeper: Sleeper) -> list[SliceTouch]:
        """Return who holds the blocks of a frame."""
        segment = self._segments.get(sleeper.segment)
        assert segment is not None
        return segment.bed.held_slices(sleeper.row, self.names)

    def _row(self, sleeper: Sleeper) -> np.void:
        segment = self._segments.get(sleeper.segment)
        assert segment is not None
        row: np.void = segment.bed.rows[sleeper.row]
        return row

    def beginning_with(self, space: Fingerprint, key: bytes) -> list[Sleeper]:
        """Return the frames that begin with a block."""
        return self._at(space, key, "head", 0)

    def ending_with(self, space: Fingerprint, key: bytes) -> list[Sleeper]:
        """Return the frames that end with a block."""
        return self._at(space, key, "tail", 1)

    def _at(self, space: Fingerprint, key: bytes, name: str, kind: int) -> list[Sleeper]:
        if not self._spaces[space]:
            return []
        tag = tag_of(key)
        found = ((_sleeper(value), value) for value in self._map.get(tag) if (value & 1) == kind)
        return [sleeper for sleeper, _ in found if self._is(sleeper, space, name, tag)]

    def _is(self, sleeper: Sleeper, space: Fingerprint, name: str, tag: int) -> bool:
        if not self.is_here(sleeper):
            return False
        row = self._row(sleeper)
        return int(row[name]) == tag and self.names.shapes[row["shape"]].namespace == space

    def along(self, space: Fingerprint, keys: bytes) -> list[Sleeper]:
        """Return the frames that begin with any of these blocks, in order of the blocks."""
        if not self._spaces[space] or not keys:
            return []
        tags = tags_of(keys)
        found: dict[Sleeper, None] = {}
        for position, value in self._map.find(tags):
            sleeper = _sleeper(value)
            if not value & 1 and self._is(sleeper, space, "head", int(tags[position])):
                found[sleeper] = None
        return list(found)

    def of_segment(self, number: int) -> list[Sleeper]:
        """Return the frames that sleep in a segment."""
        segment = self._segments.get(number)
        rows = segment.bed.there().tolist() if segment is not None else []
        return [Sleeper(number, row) for row in rows]

    def within(self, number: int, start: int, length_bytes: int) -> list[Sleeper]:
        """Return the frames asleep that begin in a stretch of a segment."""
        end = start + length_bytes
        sleepers = self.of_segment(number)
        return [sleeper for sleeper in sleepers if start <= int(self._row(sleeper)["offset"]) < end]

    def living(self, number: int, retention: Retention, now: float) -> list[Sleeper]:
        """Return the frames asleep in a segment of which some blocks may not go for their age."""
        segment = self._segments.get(number)
        if segment is None:
            return []
        rows = np.unique(segment.bed.held["row"][segment.bed.lives(self.names, retention, now)])
        return [Sleeper(number, row) for row in rows.tolist()]

    def of_class(self, number: int, name: str) -> list[tuple[float, Sleeper]]:
        """Return the frames asleep in a segment that were written for a class, each with its last touch."""
        found = []
        for sleeper in self.of_segment(number):
            if self.shape(sleeper).retention_class == name:
                found.append((max(touch.touched_at for touch in self.held(sleeper)), sleeper))
        return found

    def of_spaces(
        self, spaces: Collection[Fingerprint], *, among: Iterable[Segment] | None = None
    ) -> Iterator[Sleeper]:
        """Yield the frames of some namespaces that slept when their segment's turn came."""
        codes = self.names.codes(spaces)
        for segment in self._segments if among is None else among:
            there = segment.bed.there()
            rows = there[np.isin(segment.bed.rows["shape"][there], codes)].tolist()
            yield from (Sleeper(segment.number, row) for row in rows)

    def stand_ins(self, sleepers: Iterable[Sleeper]) -> Iterator[Node]:
        """Yield a node for each slice of frames asleep, to be counted: it hangs nowhere and has no keys."""
        for sleeper in sleepers:
            if self.is_here(sleeper):
                yield from self._stand_ins(sleeper, None)

    def described(self, sleeper: Sleeper, header: FrameHeader) -> list[Node]:
        """Return a node for each slice of a frame, to be looked at; none when it is no longer asleep."""
        return list(self._stand_ins(sleeper, header)) if self.is_here(sleeper) else []

    def _stand_ins(self, sleeper: Sleeper, header: FrameHeader | None) -> Iterator[Node]:
        shape, row = self.shape(sleeper), self._row(sleeper)
        keys = header.keys if header is not None else b""
        frame = Frame(
            fingerprint=shape.namespace, kind=shape.kind, parent=NO_HASH, keys=keys, parts=shape.parts,
            retention_class=shape.retention_class, written_at=float(row["written_at"]),
            provenance=shape.provenance,
        )  # fmt: skip
        frame.count, frame.location = int(row["count"]), self.location(sleeper)
        for touch in self.held(sleeper):
            above = header.parent if header is not None and not touch.first else key_at(keys, touch.first - 1)
            yield Node(
                [Slice(frame, touch.first, touch.count)], parent_hash=BlockHash(above),
                retention_class=touch.retention_class, since=touch.touched_at,
            )  # fmt: skip


def _value(sleeper: Sleeper) -> int:
    """Return what the map holds for a frame's first key; one more for its last."""
    return ((sleeper.segment + 1) << ROW_BITS | sleeper.row) << 1


def _values(segment: int, rows: npt.NDArray[np.intp]) -> U64:
    values: U64 = (rows.astype(np.uint64) << np.uint64(1)) + np.uint64(_value(Sleeper(segment, 0)))
    return values


def _sleeper(value: int) -> Sleeper:
    return Sleeper((value >> (ROW_BITS + 1)) - 1, (value >> 1) & (ROWS_MAX - 1))


def _joined(arrays: list[U64]) -> U64:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.uint64)
