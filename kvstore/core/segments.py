"""SSD segments as the core sees them: which frames live in which, who holds them, which may go first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from kvstore.core.frames import Frame
from kvstore.core.retention import Retention
from kvstore.tiers.base import FrameLocation

RELEASED_MAX = 4096


class Segment:
    """The living frames of one segment file and, per class, the latest touch of any of them."""

    __slots__ = ("bytes", "class_bytes", "frames", "last_touch", "number", "touched")

    def __init__(self, number: int) -> None:
        self.number = number
        self.frames: dict[Frame, None] = {}
        self.bytes = 0
        self.class_bytes: defaultdict[str, int] = defaultdict(int)
        self.last_touch = 0.0
        self.touched: dict[str, float] = {}

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

    def place(self, frame: Frame, location: FrameLocation) -> None:
        """Note that a frame is durable at `location`, and who holds it."""
        segment = self._segments.setdefault(location.segment, Segment(location.segment))
        frame.location = location
        segment.frames[frame] = None
        segment.bytes += location.length_bytes
        self.used_bytes += location.length_bytes
        for count in (segment.class_bytes, self.class_bytes):
            count[frame.retention_class] += location.length_bytes
        for node in frame.nodes:
            self.touch(frame, node.retention_class, node.since)

    def touch(self, frame: Frame, retention_class: str, since: float) -> None:
        """Note that a class holds a frame since a wall time."""
        if frame.location is None:
            return
        segment = self._segments[frame.location.segment]
        segment.touched[retention_class] = max(since, segment.touched.get(retention_class, 0.0))
        segment.last_touch = max(segment.last_touch, since)

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
        segment.bytes -= location.length_bytes
        self.used_bytes -= location.length_bytes
        for count in (segment.class_bytes, self.class_bytes):
            count[frame.retention_class] -= location.length_bytes
        frame.location = None
        if not segment.frames:
            del self._segments[segment.number]
        return location

    def expired(self, retention: Retention, now: float) -> list[Segment]:
        """Return the segments in which nothing lives any more."""
        return [s for s in self._segments.values() if s.end(retention, now) <= now and not s.held()]

    def victim(self, *, among: Collection[int]) -> Segment | None:
        """Return the segment touched longest ago that nothing holds, of those that may go."""
        there = (segment for number in among if (segment := self._segments.get(number)) is not None)
        oldest = sorted(there, key=lambda segment: (segment.last_touch, segment.number))
        return next((segment for segment in oldest if not segment.held()), None)

    def get(self, number: int) -> Segment | None:
        """Return a segment with living frames, or None."""
        return self._segments.get(number)

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def __len__(self) -> int:
        return len(self._segments)
