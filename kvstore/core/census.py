"""What lives in the segments: measured a few frames at a time, round and round, never all at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from kvstore.core.catalog import Catalog
from kvstore.core.frames import Frame, Node
from kvstore.core.retention import Retention
from kvstore.core.segments import Segment
from kvstore.retention import DAY

CHILDREN_MAX = 64
LIFE_SECONDS_MAX = 90 * DAY
"""A class without an end is valued like one of this life."""


def living(
    retention: Retention, frame: Frame, now: float, *, is_whole: bool
) -> Iterator[tuple[Node, int, int]]:
    """Yield the stretches of a frame that may not go for their age: node, first block, how many. Of a whole
    frame no block has left the index.
    """
    for node in frame.nodes:
        if retention.may_go(node, now):
            continue
        if is_whole and len(frame.nodes) == 1:
            # Most frames: spares a search through the node.
            yield node, 0, frame.count
        else:
            for piece in node.slices:
                if piece.frame is frame:
                    yield node, piece.start, piece.count


def weight(life_seconds: float) -> float:
    """Return what a byte of a class is worth at its touch: the root of its life in days."""
    return float((min(life_seconds, LIFE_SECONDS_MAX) / DAY) ** 0.5)


def _life(retention: Retention, name: str) -> float:
    return min(retention.held_by(name).ttl_seconds, LIFE_SECONDS_MAX)


def worth(retention: Retention, node: Node, now: float) -> float:
    """Return what a byte of a run is worth now: its class's weight, less as its life passes."""
    life = _life(retention, node.retention_class)
    return weight(life) * max(0.0, 1.0 - max(0.0, now - node.since) / life)


class Census:
    """Measures segments in turn. A measure is a little old; who acts on one measures that segment again."""

    def __init__(self, catalog: Catalog) -> None:
        self._retention = catalog.retention
        self._segments = catalog.segments
        self._sleepers = catalog.sleepers
        self._partial = catalog.partial
        self._turn: list[Segment] = []
        self._frames: list[Frame] = []
        self._segment: Segment | None = None
        self._bytes = 0.0
        self._value = 0.0

    def step(self, now: float, *, frames_max: int) -> None:
        """Look at so many frames."""
        while frames_max > 0:
            if self._segment is None and not self._begin():
                return
            batch = self._frames[-frames_max:]
            del self._frames[-len(batch) :]
            frames_max -= len(batch) + 1
            self._count(batch, now)
            if not self._frames:
                self._end(now)

    def measure(self, segment: Segment, now: float) -> None:
        """Measure one segment now."""
        self._drop()
        self._segment, self._frames = segment, list(segment.frames)
        segment.touched_since = {}
        self._count(self._frames, now)
        self._end(now)

    def _begin(self) -> bool:
        if not self._turn:
            self._turn = list(self._segments)
        while self._turn:
            segment = self._turn.pop()
            if not segment.is_empty:
                self._segment, self._frames = segment, list(segment.frames)
                self._bytes, self._value = 0.0, 0.0
                segment.touched_since = {}
                return True
        return False

    def _drop(self) -> None:
        if self._segment is not None:
            self._segment.touched_since = None
        self._segment, self._frames, self._bytes, self._value = None, [], 0.0, 0.0

    def _count(self, frames: list[Frame], now: float) -> None:
        segment, retention = self._segment, self._retention
        assert segment is not None
        for frame in frames:
            if frame not in segment.frames:
                continue
            location = frame.location
            block_bytes = location.length_bytes / frame.count if location is not None else 0.0
            for node, _, count in living(retention, frame, now, is_whole=frame not in self._partial):
                self._bytes += count * block_bytes
                self._value += count * block_bytes * worth(retention, node, now)
                # What hangs below leaves with it when it is evicted; one level tells a head from a leaf.
                for child in islice(node.children.values(), CHILDREN_MAX):
                    self._value += child.count * block_bytes * worth(retention, child, now)
                segment.note_touch(node.retention_class, node.since)

    def _count_asleep(self, segment: Segment, now: float) -> None:
        """Count what sleeps, all at once; of what follows a frame asleep nothing is known."""
        bed, names, retention = segment.bed, self._sleepers.names, self._retention
        if not bed.count:
            return
        held = bed.held[bed.lives(names, retention, now)]
        block_bytes = bed.rows["length_bytes"][held["row"]] / bed.rows["count"][held["row"]]
        size = held["count"] * block_bytes
        lives = np.array([_life(retention, name) for name in names.classes])[held["name"]]
        passed = np.maximum(0.0, 1.0 - np.maximum(0.0, now - held["since"]) / lives)
        self._bytes += float(size.sum())
        self._value += float((size * (lives / DAY) ** 0.5 * passed).sum())
        for code in np.unique(held["name"]).tolist():
            since = float(held["since"][held["name"] == code].max())
            segment.note_touch(names.classes[code], since)

    def _end(self, now: float) -> None:
        segment = self._segment
        assert segment is not None
        self._count_asleep(segment, now)
        segment.living_bytes, segment.value, segment.measured_at = self._bytes, self._value, now
        if segment.touched_since is not None:
            segment.touched = segment.touched_since
        self._drop()
