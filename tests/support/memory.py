"""Host memory and a tier without files, for tests of the core on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import TierUnavailable
from kvstore.namespace import Namespace
from kvstore.tiers.base import (
    FRAME_ROW,
    FrameHeader,
    FrameLocation,
    FrameRead,
    FrameShape,
    FrameTable,
    FrameWrite,
    Loss,
    ReadResult,
    RecoveredFrame,
    RecoveryReport,
    SegmentInfo,
    SliceTouch,
    TierHealth,
    TierUsage,
    TouchNote,
    WriteResult,
    WrittenBytes,
    marks_of,
)
from kvstore.types import DIGEST_BYTES, HASH_BYTES, PAGE_BYTES, Fingerprint, MissReason, key_count


class PrivateMemory:
    """An arena in private memory: the same addressing as the shared one."""

    def __init__(self, pages: int) -> None:
        self.first_page = 1
        self.total_pages = pages + 1
        self.generations: npt.NDArray[np.uint32] = np.zeros(self.total_pages, np.uint32)
        self.data = np.zeros(self.total_pages * PAGE_BYTES, np.uint8)

    def images(self, slots: npt.NDArray[np.uint32], *, stride_pages: int) -> tuple[memoryview, ...]:
        size = stride_pages * PAGE_BYTES
        view = self.data.data
        return tuple(view[s * PAGE_BYTES : s * PAGE_BYTES + size] for s in slots.tolist())

    def touched_pages(self) -> int:
        return self.total_pages - self.first_page


@dataclass(slots=True)
class StoredFrame:
    """A frame as a dict tier keeps it: per part, one (payload, digests) a block."""

    header: FrameHeader
    location: FrameLocation
    records: list[list[tuple[bytes, bytes]]]
    touches: tuple[SliceTouch, ...] = ()


@dataclass(slots=True)
class Disk:
    """What outlives a DictTier: hand it to the next one to reopen."""

    frames: dict[tuple[int, int], StoredFrame] = field(default_factory=dict)
    namespaces: dict[Fingerprint, Namespace] = field(default_factory=dict)
    next_offset: int = 0


class DictTier:
    """A tier over a dict. With `manual`, futures wait until `run` is called, so that tests choose the
    interleaving. With `tables`, all segments but the newest are recovered as tables.
    """

    def __init__(
        self, disk: Disk, *, frames_per_segment: int = 4, manual: bool = False, tables: bool = False
    ) -> None:
        self.disk = disk
        self.manual = manual
        self.tables = tables
        self.refuse_writes = ""
        self.refuse_deletes = ""
        self.urgent: list[bool] = []
        """Of each unlink, whether it was."""
        self._per_segment = frames_per_segment
        self._work: list[tuple[object, object, object]] = []

    def register(self, namespace: Namespace) -> None:
        self.disk.namespaces[namespace.fingerprint] = namespace

    def write(self, frames: Sequence[FrameWrite]) -> list[Future[WriteResult]]:
        return [self._submit(self._write, frame) for frame in frames]

    def read_into(self, reads: Sequence[FrameRead]) -> list[Future[ReadResult]]:
        return [self._submit(self._read, read) for read in reads]

    def _submit(self, function: object, argument: object) -> Future:  # type: ignore[type-arg]
        future: Future = Future()  # type: ignore[type-arg]
        self._work.append((function, argument, future))
        if not self.manual:
            self.run()
        return future

    def run(self, count: int = 1 << 30) -> int:
        """Carry out up to `count` pending operations."""
        done = 0
        while self._work and done < count:
            function, argument, future = self._work.pop(0)
            future.set_result(function(argument))  # type: ignore[attr-defined,operator]
            done += 1
        return done

    def _write(self, write: FrameWrite) -> WriteResult:
        if self.refuse_writes:
            return WriteResult(None, self.refuse_writes)
        segment = self.disk.next_offset // self._per_segment
        location = FrameLocation(segment, self.disk.next_offset, PAGE_BYTES, PAGE_BYTES)
        self.disk.next_offset += 1
        records = []
        for part in write.parts:
            image = b"".join(bytes(view) for view in part.images)
            lengths = np.frombuffer(part.lengths, np.uint32)
            width = DIGEST_BYTES * len(part.part.segments)
            records.append(
                [
                    (image[i * part.part.stride_bytes :][: int(n)], part.digests[i * width : (i + 1) * width])
                    for i, n in enumerate(lengths)
                ]
            )
        stored = StoredFrame(write.header, location, records)
        self.disk.frames[(segment, location.offset)] = stored
        return WriteResult(location)

    def _read(self, read: FrameRead) -> ReadResult:
        stored = self.disk.frames.get((read.location.segment, read.location.offset))
        if stored is None:
            return ReadResult(0, b"", b"", MissReason.TIER_DOWN, "frame is gone")
        records = stored.records[read.part_position][read.first : read.first + len(read.keys) // HASH_BYTES]
        lengths: list[int] = []
        digests: list[bytes] = []
        for index, (payload, digest) in enumerate(records):
            segments = stored.header.parts[read.part_position].segments
            found = b"".join(
                xxhash.xxh3_128_digest(payload[s.offset : s.offset + s.length]) for s in segments
            )
            key = stored.header.keys[(read.first + index) * HASH_BYTES :][:HASH_BYTES]
            if found != digest or key != read.keys[index * HASH_BYTES :][:HASH_BYTES]:
                return self._result(lengths, digests, MissReason.CORRUPT)
            view = read.into[index] if len(read.into) == len(records) else None
            assert view is not None
            view[: len(payload)] = payload
            lengths.append(len(payload))
            digests.append(digest)
        return self._result(lengths, digests, None)

    @staticmethod
    def _result(lengths: list[int], digests: list[bytes], reason: MissReason | None) -> ReadResult:
        return ReadResult(len(lengths), np.array(lengths, np.uint32).tobytes(), b"".join(digests), reason)

    def annotate(self, notes: Sequence[TouchNote]) -> None:
        for note in notes:
            stored = self.disk.frames.get((note.location.segment, note.location.offset))
            if stored is not None:
                stored.touches = note.slices

    def delete(self, frames: Sequence[FrameLocation]) -> Future[int]:
        future: Future[int] = Future()
        if self.refuse_deletes:
            future.set_exception(TierUnavailable(self.refuse_deletes))
            return future
        for location in frames:
            self.disk.frames.pop((location.segment, location.offset), None)
        future.set_result(0)
        return future

    def unlink(self, segments: Sequence[int], *, is_urgent: bool = True) -> Future[int]:
        self.urgent.append(is_urgent)
        gone = [place for place in self.disk.frames if place[0] in segments]
        return self.delete([self.disk.frames[place].location for place in gone])

    def recover(self) -> Iterable[RecoveredFrame | FrameTable]:
        found = [_recovered(stored) for stored in self.disk.frames.values()]
        if not self.tables:
            yield from found
            return
        newest = max((frame.location.segment for frame in found), default=0)
        by_segment: dict[int, list[RecoveredFrame]] = {}
        for frame in found:
            by_segment.setdefault(frame.location.segment, []).append(frame)
        for number, frames in by_segment.items():
            if number == newest:
                yield from frames
            else:
                yield _table(number, sorted(frames, key=lambda frame: frame.location.offset))

    def headers(self, frames: Sequence[FrameLocation]) -> Future[list[RecoveredFrame | None]]:
        # At once, also in manual mode: whoever decides waits for it.
        future: Future[list[RecoveredFrame | None]] = Future()
        future.set_result(self._headers(frames))
        return future

    def _headers(self, frames: Sequence[FrameLocation]) -> list[RecoveredFrame | None]:
        stored = [self.disk.frames.get((frame.segment, frame.offset)) for frame in frames]
        return [_recovered(frame) if frame is not None else None for frame in stored]

    def report(self) -> RecoveryReport:
        namespaces = tuple(self.disk.namespaces.values())
        return RecoveryReport(namespaces, len(self.disk.frames), 0, 0, 0, 0, (), False, 0.0)

    def usage(self) -> TierUsage:
        used = len(self.disk.frames) * PAGE_BYTES
        return TierUsage(0, used, 0, len(self.segments()), used, 0)

    def segments(self) -> list[SegmentInfo]:
        frames: dict[int, int] = {}
        for segment, _ in self.disk.frames:
            frames[segment] = frames.get(segment, 0) + 1
        newest = max(frames, default=0)
        return [SegmentInfo(s, "", "", n * PAGE_BYTES, n, s != newest, 0.0) for s, n in frames.items()]

    def sealed_bytes(self) -> dict[int, int]:
        return {info.segment: info.bytes for info in self.segments() if info.sealed}

    def written(self) -> list[WrittenBytes]:
        return []

    def losses(self) -> list[Loss]:
        return []

    def healthy(self) -> TierHealth:
        return TierHealth(True, True)

    def close(self, *, deadline_seconds: float) -> None:
        self.run()


def _recovered(stored: StoredFrame) -> RecoveredFrame:
    count = key_count(stored.header.keys)
    touches = tuple(replace(t, count=min(t.count, count - t.first)) for t in stored.touches)
    return RecoveredFrame(stored.header, stored.location, touches)


def _table(number: int, frames: Sequence[RecoveredFrame]) -> FrameTable:
    shapes: dict[FrameShape, int] = {}
    rows = []
    touches: dict[int, tuple[SliceTouch, ...]] = {}
    for index, frame in enumerate(frames):
        header, place = frame.header, frame.location
        name, written_at = header.retention_class, header.written_at
        shape = FrameShape(header.namespace, header.kind, header.parts, name, header.provenance)
        starts = (header.keys, header.keys[-HASH_BYTES:], header.parent)
        head, tail, parent = (int.from_bytes(key[:8], "little") for key in starts)
        sizes = (place.length_bytes, place.header_bytes, key_count(header.keys))
        number_of_shape = shapes.setdefault(shape, len(shapes))
        rows.append((place.offset, head, tail, parent, written_at, *sizes, number_of_shape))
        if frame.touches:
            touches[index] = frame.touches
        elif header.touched_at:
            # A table has no place for it: the tier tells it as a touch.
            touches[index] = (SliceTouch(0, key_count(header.keys), name, header.touched_at),)
    marks = marks_of(b"".join(frame.header.keys for frame in frames))
    return FrameTable(number, tuple(shapes), np.array(rows, FRAME_ROW), marks, touches)
