"""Going to sleep: a frame on SSD that nobody has asked for in a while gives up its keys and its place in the
tree.
"""

from __future__ import annotations

import math

from kvstore.core.catalog import Catalog
from kvstore.core.frames import Frame, Node, Slice
from kvstore.core.limits import Limits
from kvstore.core.segments import Segment
from kvstore.core.touches import filled
from kvstore.tiers.base import FrameHeader, FrameKind, SliceTouch
from kvstore.types import BlockHash

FRAMES_AT_ONCE = 16
IDLE_SEGMENTS_AT_ONCE = 256


class Bedtime:
    """Goes round the frames that are awake. Guarded by the ladder's lock."""

    def __init__(self, catalog: Catalog, limits: Limits) -> None:
        self._catalog = catalog
        self._seconds = limits.sleep_seconds
        self._turn: list[Segment] = []
        self._frames: list[Frame] = []

    def step(self, now: float) -> bool:
        """Look at a few frames more, up to one that may sleep; says whether there was one."""
        if math.isinf(self._seconds) or not (self._frames or self._begin()):
            return False
        for _ in range(min(FRAMES_AT_ONCE, len(self._frames))):
            frame = self._frames.pop()
            if self._may_sleep(frame, now):
                self._put(frame)
                return True
        return False

    def _begin(self) -> bool:
        if not self._turn:
            self._turn = list(self._catalog.segments)
        for _ in range(min(IDLE_SEGMENTS_AT_ONCE, len(self._turn))):
            # The first first: what follows a run was put later, and has to go before it.
            self._frames = list(self._turn.pop().frames)
            if self._frames:
                return True
        return False

    def _may_sleep(self, frame: Frame, now: float) -> bool:
        """Say whether nothing needs a frame awake: no slots, no holds, no I/O, nothing awake behind it, no
        block that left the index, and no touch for a while.
        """
        catalog = self._catalog
        if frame.kind is not FrameKind.MAIN or frame.location is None or frame.host is not None:
            return False
        if frame.holds or frame.loads or frame.waiters or frame.queued or frame.dead:
            return False
        if frame in catalog.partial or frame in catalog.zombies or now - frame.used_at < self._seconds:
            return False
        return bool(frame.nodes) and all(self._is_idle(node, frame, now) for node in frame.nodes)

    def _is_idle(self, node: Node, frame: Frame, now: float) -> bool:
        if node.loose or node in self._catalog.policy or now - node.since < self._seconds:
            return False
        if self._catalog.retention.may_go(node, now):
            return False  # it leaves anyway
        if node.slices[-1].frame is not frame or sum(p.frame is frame for p in node.slices) > 1:
            return False
        return all(child in frame.nodes for child in node.children.values())

    def _put(self, frame: Frame) -> None:
        catalog, location = self._catalog, frame.location
        assert location is not None
        state = catalog.namespaces[frame.fingerprint]
        header = FrameHeader(
            frame.fingerprint, frame.kind, BlockHash(frame.parent), frame.keys, frame.parts,
            frame.retention_class, frame.written_at, frame.provenance,
        )  # fmt: skip
        mine: list[tuple[Slice, Node]] = [(node.slices[-1], node) for node in frame.nodes]
        mine.sort(key=lambda pair: pair[0].start)
        held = [SliceTouch(p.start, p.count, node.retention_class, node.since) for p, node in mine]
        for piece, node in reversed(mine):
            state.runs.truncate(node, node.count - piece.count)
        catalog.sleepers.add(
            header, location, filled(held, frame.count, frame.retention_class, frame.written_at)
        )
        catalog.segments.forget(frame)
