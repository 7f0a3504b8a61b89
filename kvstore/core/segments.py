"""SSD segments as the core sees them: which frames live in which, awake or asleep, who holds them, which may
go first.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from kvstore.core.beds import Bed
from kvstore.core.frames import Frame
from kvstore.core.retention import Retention
from kvstore.tiers.base import FrameLocation
from kvstore.types import Fingerprint

RELEASED_MAX = 4096
MEASURES_MAX = 8
"""So many segments are measured anew before one of them has to go."""
MEASURES_FIRST = 32
"""So many are measured for the first time, those touched longest ago: after a start none has been."""


class Segment:
    """The living frames of one segment file and, per class, the latest touch of any of them. `frames` are
    awake, those in the `bed` are not.

    `living_bytes` and `value` are as of `measured_at`; `touched_since` collects the touches that a measure in
    progress finds. Units: bytes of frames, headers included, and of living blocks, with their share of them.
    """

    __slots__ = (
        "bed",
        "bytes",
        "class_bytes",
        "frames",
        "last_touch",
        "living_bytes",
        "measured_at",
        "number",
        "touched",
        "touched_since",
        "value",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.frames: dict[Frame, None] = {}
        self.bed = Bed()
        self.bytes = 0
        self.class_bytes: defaultdict[str, int] = defaultdict(int)
        self.last_touch = 0.0
        self.touched: dict[str, float] = {}
        self.touched_since: dict[str, float] | None = None
        self.living_bytes = 0.0
        self.value = 0.0
        self.measured_at: float | None = None

    def note_touch(self, retention_class: str, since: float) -> None:
        """Note that a class holds one of its frames since a wall time."""
        if since > self.touched.get(retention_class, -1.0):
            self.touched[retention_class] = since
        recent = self.touched_since
        if recent is not None and since > recent.get(retention_class, -1.0):
            recent[retention_class] = since
        if since > self.last_touch:
            self.last_touch = since

    @property
    def is_empty(self) -> bool:
        """Say whether no frame of it lives."""
        return not self.frames and not self.bed.count

    def held(self) -> bool:
        """Say whether a lease or I/O holds one of its frames."""
        return any(frame.holds or frame.loads for frame in self.frames)

    def end(self, retention: Retention, now: float) -> float:
        """Return until when the last of its frames is kept, derived from the classes' present TTLs."""
        return max(
            (since + retention.keep_seconds(name, now) for name, since in self.touched.items()), default=0.0
        )


class SegmentTable:
    """All segments with living frames. Units: bytes of living frames, headers included."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._released: dict[int, None] = {}
        self.used_bytes = 0
        self.class_bytes: defaultdict[str, int] = defaultdict(int)
        """By the class that the frames were written for."""
        self.going: dict[FrameLocation, Fingerprint] = {}
        """Frames that left the index with a segment which is let go a few frames at a time."""

    def place(self, frame: Frame, location: FrameLocation) -> None:
        """Note that a frame is durable at `location`, and who holds it."""
        segment = self.at(location.segment)
        frame.location = location
        frame.uses = max(2, frame.uses)  # admitted once is admitted for good
        segment.frames[frame] = None
        self.weigh(segment, frame.retention_class, location.length_bytes)
        for node in frame.nodes:
            self.touch(frame, node.retention_class, node.since)

    def at(self, number: int) -> Segment:
        """Return a segment, empty when nothing of it was known."""
        segment = self._segments.get(number)
        if segment is None:
            segment = self._segments[number] = Segment(number)
        return segment

    def weigh(self, segment: Segment, name: str, amount: int) -> None:
        """Count bytes that came to a segment, written for a class, or that left it."""
        segment.bytes += amount
        self.used_bytes += amount
        segment.class_bytes[name] += amount
        self.class_bytes[name] += amount
        if segment.is_empty:
            self._segments.pop(segment.number, None)

    def touch(self, frame: Frame, retention_class: str, since: float) -> None:
        """Note that a class holds a frame since a wall time."""
        if frame.location is None:
            return
        self._segments[frame.location.segment].note_touch(retention_class, since)

    def release(self, number: int) -> None:
        """Remember that a segment is on its way out; numbers are not used again."""
        self._released[number] = None
        if len(self._released) > RELEASED_MAX:
            del self._released[next(iter(self._released))]

    def is_released(self, number: int) -> bool:
        """Say whether a segment was let go: word of a write into it may come late."""
        return number in self._released

    def forget(self, frame: Frame) -> FrameLocation | None:
        """A frame left the SSD tier; returns where it was."""
        location = frame.location
        if location is None:
            return None
        segment = self._segments[location.segment]
        del segment.frames[frame]
        self.weigh(segment, frame.retention_class, -location.length_bytes)
        frame.location = None
        return location

    def victim(self, *, among: Mapping[int, int], measure: Callable[[Segment], None]) -> Segment | None:
        """Return the segment that is worth the least for its size and that nothing holds, of those that may
        go. `among` are bytes on disk by number; `measure` brings a segment's measure up to date.
        """
        there = [segment for number in among if (segment := self._segments.get(number)) is not None]
        unknown = [segment for segment in there if segment.measured_at is None]
        for segment in heapq.nsmallest(MEASURES_FIRST, unknown, key=lambda s: (s.last_touch, s.number)):
            measure(segment)
        if unknown:
            there = [segment for segment in there if segment.measured_at is not None]

        def density(segment: Segment) -> tuple[float, float, int]:
            return (
                segment.value / max(among[segment.number], segment.bytes),
                segment.last_touch,
                segment.number,
            )

        waiting = [(density(segment), segment) for segment in there]
        heapq.heapify(waiting)
        is_fresh: set[int] = set()
        while waiting:
            _, segment = heapq.heappop(waiting)
            if segment.held():
                continue
            if segment.number in is_fresh or len(is_fresh) == MEASURES_MAX:
                return segment
            measure(segment)
            is_fresh.add(segment.number)
            heapq.heappush(waiting, (density(segment), segment))
        return None

    def get(self, number: int) -> Segment | None:
        """Return a segment with living frames, or None."""
        return self._segments.get(number)

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def __len__(self) -> int:
        return len(self._segments)
