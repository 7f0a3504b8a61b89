"""Room on SSD: which segments go because nothing in them lives, which are emptied first, and when.

Time alone copies nothing: what lives in a segment moves when it is at most LIVING_SHARE of it, or at most
PRESSED_SHARE while the tier is nearly full. A segment goes a few frames at a time: nobody waits for all.
"""

from __future__ import annotations

from itertools import islice

from kvstore.core.catalog import Catalog
from kvstore.core.census import Census
from kvstore.core.farewells import dismiss
from kvstore.core.frames import Frame
from kvstore.core.limits import Limits
from kvstore.core.moves import Moves
from kvstore.core.segments import Segment
from kvstore.tiers.base import Tier
from kvstore.types import MissReason

LIVING_SHARE = 0.15
PRESSED_SHARE = 0.5
PRESSED_AT = 0.9
"""Of the capacity: from here on there is pressure."""
LOOK_EVERY_SECONDS = 1.0
FAILED_SECONDS = 60.0
STEP_FRAMES = 1
STEP_SEGMENTS = 128
CENSUS_FRAMES = 16


class Reclaim:
    """Bounded work per step. Guarded by the ladder's lock."""

    def __init__(
        self, catalog: Catalog, limits: Limits, tier: Tier | None, moves: Moves, census: Census
    ) -> None:
        self._catalog = catalog
        self._limits = limits
        self._tier = tier
        self._moves = moves
        self._census = census
        self._look_due = 0.0
        self._moves_due = 0.0
        self._turn: list[Segment] = []
        self._expired: dict[Segment, None] = {}
        self._going: Segment | None = None

    def step(self, now: float, *, monotonic: float) -> bool:
        """Do one of four things, a little of it; says whether there is more to do at once."""
        if monotonic >= self._look_due:
            self._look_due = monotonic + LOOK_EVERY_SECONDS
            self._turn = list(self._catalog.segments)
            self._choose(now, monotonic)
        elif self._turn:
            some, self._turn = self._turn[:STEP_SEGMENTS], self._turn[STEP_SEGMENTS:]
            retention = self._catalog.retention
            ended = (segment for segment in some if segment.end(retention, now) <= now)
            self._expired.update((segment, None) for segment in ended if segment is not self._going)
        elif self._going is not None:
            self._let_go(self._going, now)
        elif self._expired:
            segment, _ = self._expired.popitem()
            self._going = None if segment.held() else segment
        return bool(self._turn or self._expired or self._going)

    def look_around(self, now: float) -> None:
        """Measure a few frames more."""
        self._census.step(now, frames_max=CENSUS_FRAMES)

    def _let_go(self, segment: Segment, now: float) -> None:
        """Forget some frames of a segment in which nothing lives; its file goes with the last one."""
        catalog = self._catalog
        if catalog.segments.get(segment.number) is not segment or self._is_needed(segment, now):
            self._keep(segment)
            return
        going = catalog.segments.going
        for frame in list(islice(segment.frames, STEP_FRAMES)):
            if frame.location is not None:
                going[frame.location] = frame.fingerprint
            catalog.forget_on_ssd(frame, MissReason.EXPIRED)
        if segment.frames:
            return
        if self._is_needed(segment, now):
            self._keep(segment)
            return
        gone = dismiss(catalog, catalog.sleepers.of_segment(segment.number), MissReason.EXPIRED)
        going.update((leaver.location, leaver.namespace) for leaver in gone)
        catalog.graves.bury_segment(segment.number, going.values(), is_urgent=self._is_pressed())
        catalog.segments.release(segment.number)
        self._going, catalog.segments.going = None, {}

    def _is_needed(self, segment: Segment, now: float) -> bool:
        """Say whether the frames to be forgotten next live or are held: those awake come first."""
        frames = list(islice(segment.frames, STEP_FRAMES))
        if frames:
            return any(frame.holds or frame.loads or self._lives(frame, now) for frame in frames)
        names, retention = self._catalog.sleepers.names, self._catalog.retention
        return bool(segment.bed.lives(names, retention, now).any())

    def _keep(self, segment: Segment) -> None:
        """Leave a segment that is needed after all, or went another way meanwhile: what was forgotten of it
        is deleted frame by frame.
        """
        self._catalog.graves.bury_all(self._catalog.segments.going)
        self._going, segment.measured_at, self._catalog.segments.going = None, None, {}

    def _lives(self, frame: Frame, now: float) -> bool:
        return not all(self._catalog.retention.may_go(node, now) for node in frame.nodes)

    def _choose(self, now: float, monotonic: float) -> None:
        """Begin to empty the segment in which the least lives, if it is little enough."""
        if self._moves.segment is not None:
            self._look_at_moves(monotonic)
            return
        if self._tier is None or not self._moves.is_idle or monotonic < self._moves_due:
            return
        sizes = self._tier.sealed_bytes()
        found = [
            (segment.living_bytes / max(sizes[segment.number], segment.bytes), segment.number)
            for segment in self._catalog.segments
            if segment.measured_at is not None and segment.number in sizes
        ]
        if not found:
            return
        share, number = min(found)
        if share > (PRESSED_SHARE if self._is_pressed() else LIVING_SHARE):
            return
        catalog = self._catalog
        segment = catalog.segments.get(number)
        assert segment is not None
        # Measured a while ago: what was touched since, or put again, may live.
        self._census.measure(segment, now)
        share = segment.living_bytes / max(sizes[number], segment.bytes)
        if share > LIVING_SHARE and not (share <= PRESSED_SHARE and self._is_pressed()):
            return
        asleep = catalog.sleepers.living(segment.number, catalog.retention, now)
        if asleep:
            # What moves is awake, and moves at the next look.
            catalog.plan.wake += catalog.sleepers.wanted(asleep)
        else:
            self._moves.begin(segment, reason="time" if share <= LIVING_SHARE else "capacity")

    def _is_pressed(self) -> bool:
        capacity = self._limits.ssd_capacity_bytes
        if not capacity or self._tier is None:
            return False
        used = max(self._catalog.segments.used_bytes, self._tier.usage().used_bytes)
        return used > PRESSED_AT * capacity

    def _look_at_moves(self, monotonic: float) -> None:
        segment = self._moves.segment
        assert segment is not None
        if self._moves.has_failed and self._moves.is_idle:
            self._moves.end()
            self._moves_due = monotonic + FAILED_SECONDS
        elif self._moves.is_done:
            self._moves.end()
            if not segment.is_empty and not segment.held():
                self._expired[segment] = None
