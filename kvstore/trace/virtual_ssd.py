"""An SSD tier without bytes: segments by bucket, their sizes, and answers at once, for the simulator.

Places frames as the SSD tier's writer does: one open segment a bucket, sealed when full or idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvstore.namespace import Namespace
from kvstore.tiers.base import (
    FrameLocation,
    FrameRead,
    FrameWrite,
    Loss,
    ReadResult,
    RecoveredFrame,
    RecoveryReport,
    SegmentInfo,
    TierHealth,
    TierUsage,
    TouchNote,
    WriteResult,
    WrittenBytes,
)
from kvstore.types import DIGEST_BYTES, HASH_BYTES, PAGE_BYTES, round_up

Value = TypeVar("Value")
OPEN_SEGMENTS_MAX = 16
IDLE_SECONDS_MAX = 600.0
HEADER_BYTES = 512
"""What the header of a frame holds beside the keys, before it is rounded up to pages."""


@dataclass(slots=True)
class _Segment:
    number: int
    bucket: str
    created_at: float
    used_at: float
    end: int = PAGE_BYTES
    bytes: int = PAGE_BYTES
    frames: int = 0


class VirtualSsd:
    """Segments as numbers. Units: bytes as the file system would count them, wall seconds.

    Threads: the simulator's one.
    """

    def __init__(self, *, capacity_bytes: int, segment_bytes: int, now: Callable[[], float]) -> None:
        self.written_bytes = 0
        self._capacity = capacity_bytes
        self._segment_bytes = segment_bytes
        self._now = now
        self._segments: dict[int, _Segment] = {}
        self._open: dict[str, _Segment] = {}
        self._next = 1
        self._used = 0

    def register(self, namespace: Namespace) -> None:
        """Do nothing: what is stored here does not outlive the simulation."""

    def write(self, frames: Sequence[FrameWrite]) -> list[Future[WriteResult]]:
        """Place frames in order; refused beyond the capacity."""
        return [_resolved(self._place(frame)) for frame in frames]

    def _place(self, frame: FrameWrite) -> WriteResult:
        blocks = len(frame.header.keys) // HASH_BYTES
        header = round_up(HEADER_BYTES + HASH_BYTES * blocks, PAGE_BYTES)
        length = header + blocks * sum(image.part.stride_bytes for image in frame.parts)
        # Each open segment will still get its seal, and a frame may need a new segment with a header.
        if self._used + length + PAGE_BYTES * (len(self._open) + 2) > self._capacity:
            return WriteResult(None, f"capacity: limit {self._capacity} bytes, used {self._used}")
        segment = self._segment_for(frame.bucket, length)
        location = FrameLocation(segment.number, segment.end, header, length)
        segment.end += length
        segment.frames += 1
        segment.used_at = self._now()
        self._grow(segment, length)
        self.written_bytes += length
        return WriteResult(location)

    def _segment_for(self, bucket: str, length: int) -> _Segment:
        """Return the segment to append to, sealing what is in the way."""
        now = self._now()
        for other in [s for s in self._open.values() if now - s.used_at > IDLE_SECONDS_MAX]:
            self._seal(other)
        segment = self._open.get(bucket)
        is_full = segment is not None and segment.end + length + PAGE_BYTES > self._segment_bytes
        if segment is not None and is_full and segment.end > PAGE_BYTES:
            self._seal(segment)
            segment = None
        if segment is None:
            if len(self._open) >= OPEN_SEGMENTS_MAX:
                self._seal(min(self._open.values(), key=lambda other: other.used_at))
            segment = self._open[bucket] = _Segment(self._next, bucket, now, now)
            self._segments[self._next] = segment
            self._next += 1
            self._used += segment.bytes
        return segment

    def _seal(self, segment: _Segment) -> None:
        """Close a segment; a page says that it is whole."""
        del self._open[segment.bucket]
        self._grow(segment, PAGE_BYTES)

    def _grow(self, segment: _Segment, amount: int) -> None:
        segment.bytes += amount
        self._used += amount

    def read_into(self, reads: Sequence[FrameRead]) -> list[Future[ReadResult]]:
        """Answer that everything is there and intact."""
        return [_resolved(_intact(read)) for read in reads]

    def annotate(self, notes: Sequence[TouchNote]) -> None:
        """Do nothing: nothing is recovered from here."""

    def delete(self, frames: Sequence[FrameLocation]) -> Future[int]:
        """Give the bytes of frames back, as punched holes do."""
        freed = 0
        for location in frames:
            segment = self._segments.get(location.segment)
            if segment is not None:
                self._grow(segment, -location.length_bytes)
                segment.frames -= 1
                freed += location.length_bytes
        return _resolved(freed)

    def unlink(self, segments: Sequence[int], *, is_urgent: bool = True) -> Future[int]:
        """Remove whole segments."""
        freed = 0
        for number in segments:
            segment = self._segments.pop(number, None)
            if segment is not None:
                freed += segment.bytes
                if self._open.get(segment.bucket) is segment:
                    del self._open[segment.bucket]
        self._used -= freed
        return _resolved(freed)

    def recover(self) -> Iterable[RecoveredFrame]:
        """Yield nothing."""
        return ()

    def headers(self, frames: Sequence[FrameLocation]) -> Future[list[RecoveredFrame | None]]:
        """Answer that there are none: nothing is recovered from here, so nothing sleeps."""
        return _resolved([None] * len(frames))

    def report(self) -> RecoveryReport:
        """Return that nothing was found."""
        return RecoveryReport((), 0, 0, 0, 0, 0, (), False, 0.0)

    def usage(self) -> TierUsage:
        """Return the present usage."""
        free = self._capacity - self._used
        return TierUsage(self._capacity, self._used, free, len(self._segments), self.written_bytes, 0)

    def segments(self) -> list[SegmentInfo]:
        """Return the present segments."""
        return [
            SegmentInfo(
                segment=s.number,
                path="",
                bucket=s.bucket,
                bytes=s.bytes,
                frames=s.frames,
                sealed=self._open.get(s.bucket) is not s,
                created_at=s.created_at,
            )
            for s in self._segments.values()
        ]

    def sealed_bytes(self) -> dict[int, int]:
        """Return how many bytes each present segment takes that nothing is appended to any more."""
        return {s.number: s.bytes for s in self._segments.values() if self._open.get(s.bucket) is not s}

    def written(self) -> list[WrittenBytes]:
        """Return nothing: a simulation counts its writes as a whole."""
        return []

    def losses(self) -> list[Loss]:
        """Return nothing."""
        return []

    def healthy(self) -> TierHealth:
        """Return that all is well."""
        return TierHealth(True, True)

    def close(self, *, deadline_seconds: float) -> None:
        """Do nothing."""


def _intact(read: FrameRead) -> ReadResult:
    count = len(read.keys) // HASH_BYTES
    part = read.parts[read.part_position]
    lengths = np.full(count, part.bytes_max, np.uint32).tobytes()
    return ReadResult(count, lengths, bytes(DIGEST_BYTES * len(part.segments) * count))


def _resolved(value: Value) -> Future[Value]:
    future: Future[Value] = Future()
    future.set_result(value)
    return future
