"""The writer: one thread that appends frames to segments and answers once they are durable.

Group commit: all that is queued is written, each touched file is synced once, then the futures resolve in
order. What resolves with a location is behind an fdatasync, and so is everything submitted before it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.clock import Clock
from kvstore.events import Events
from kvstore.namespace import Namespace
from kvstore.tiers.base import FrameLocation
from kvstore.tiers.fs import FileSystem, aligned_buffer, is_aligned, write_all
from kvstore.tiers.ssd.crypto import FramePlace, FrameSeal
from kvstore.tiers.ssd.crypto_keys import KeyRing, TenantKey
from kvstore.tiers.ssd.directory import DataDirectory
from kvstore.tiers.ssd.format import KEY_NONE, SegmentHeader, encode_frame, encode_seal, encode_segment
from kvstore.tiers.ssd.health import Health
from kvstore.tiers.ssd.index import Growth
from kvstore.tiers.ssd.index_rows import FrameRow, row_of_header
from kvstore.tiers.ssd.queue import QueuedFrame, WriteQueue
from kvstore.tiers.ssd.segments import SegmentState, SegmentTable
from kvstore.tiers.ssd.tails import Tails
from kvstore.tiers.ssd.trailer import bad_payload, sealed, stamp
from kvstore.types import PAGE_BYTES, Fingerprint

log = logging.getLogger(__name__)

WRITTEN_METRIC = "kvstore_ssd_written_bytes_total"
CORRUPT_METRIC = "kvstore_corrupt_total"
OPEN_SEGMENTS_MAX = 16
IDLE_SECONDS_MAX = 600.0
"""An open segment that nothing was appended to for so long is sealed."""
_WAKE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """What may not be crossed. Units: bytes."""

    capacity_bytes: int
    min_free_bytes: int
    segment_bytes_max: int


@dataclass(slots=True)
class OpenSegment:
    """A segment being appended to.

    `durable` is where its last acknowledged frame ends, `end` where the next one goes, `fresh` what was
    written since the last sync. After a failure the segment is never appended to again. `serial` counts the
    attempts to append a frame and, unlike `sequence`, is never taken back: no two encryptions share one.
    """

    header: SegmentHeader
    handle: int
    used_at: float
    durable: int = PAGE_BYTES
    end: int = PAGE_BYTES
    sequence: int = 0
    serial: int = 0
    fresh: list[QueuedFrame] = field(default_factory=list)
    has_failed: bool = False


class SegmentWriter:
    """Appends frames.

    Threads: `run` is the writer's thread; `release` and `seal_all` wait for the batch at hand.
    """

    def __init__(
        self,
        *,
        fs: FileSystem,
        directory: DataDirectory,
        table: SegmentTable,
        queue: WriteQueue,
        clock: Clock,
        events: Events,
        health: Health,
        limits: WriteLimits,
        store: bytes,
        new_id: Callable[[], bytes],
        on_durable: Callable[[Growth], None],
        before_frame: Callable[[Fingerprint], None],
        namespaces: Mapping[Fingerprint, Namespace],
        tails: Tails,
        keys: KeyRing | None = None,
    ) -> None:
        self._fs, self._directory, self._table, self._queue = fs, directory, table, queue
        self._clock, self._events, self._health, self._limits = clock, events, health, limits
        self._store, self._new_id, self._on_durable = store, new_id, on_durable
        self._namespaces, self._keys = namespaces, keys
        self._before_frame, self._tails = before_frame, tails
        self.written_bytes = self._cut_call = 0
        self._appending = threading.Lock()
        self._open: dict[str, OpenSegment] = {}
        self._header_buffer = aligned_buffer(16 * PAGE_BYTES)
        self._bounce = aligned_buffer(1 << 20)

    def run(self) -> None:
        """Serve the queue until it is closed, then seal every open segment."""
        try:
            while (batch := self._queue.take(timeout_seconds=_WAKE_SECONDS)) is not None:
                self._serve(batch)
                self._seal_idle()
            self._seal_all()
        finally:
            self._queue.close("the writer has ended")

    def _serve(self, batch: list[QueuedFrame]) -> None:
        try:
            with self._appending:
                self._commit(batch)
        except BaseException:
            for item in batch:
                item.location, item.refusal = None, "the writer failed"
            for segment in list(self._open.values()):
                self._let_go(segment)
            raise
        finally:
            self._count(batch)
            self._queue.answer(batch)

    def _count(self, batch: Sequence[QueuedFrame]) -> None:
        for item in batch:
            if item.location is not None:
                self.written_bytes += item.length_bytes
                name = item.frame.header.retention_class
                self._events.add(WRITTEN_METRIC, item.length_bytes, **{"class": name})

    def _commit(self, batch: Sequence[QueuedFrame]) -> None:
        """Write, sync, and decide what of the batch is kept: whatever comes before the first disk error."""
        broken = ""
        group: list[QueuedFrame] = []
        for item in batch:
            full = None if broken else self._in_the_way(item)
            if full is not None:
                # Sealing means syncing, and that settles all that was written before.
                broken = self._sync(group)
                group = []
                if not broken:
                    self._seal(full)
            if broken:
                self._cut(item, broken)
            elif item.call == self._cut_call:
                item.refusal = "a frame before it in the same write was refused"
            else:
                broken = self._try_append(item)
            group.append(item)
        self._sync(group)

    def _cut(self, item: QueuedFrame, refusal: str) -> None:
        """Refuse a frame and all that follows in its write: a run loses its tail, never its middle."""
        item.refusal = refusal
        self._cut_call = item.call

    def _try_append(self, item: QueuedFrame) -> str:
        """Append a frame, or note why it is refused; returns the disk error that ends the batch, if any."""
        try:
            over = self._over_limit(item)
            if not over:
                self._before_frame(item.frame.header.namespace)
        except OSError as error:
            self._health.write_failed("register", error)
            over = f"disk error: {error}"
        if over:
            self._cut(item, over)
            return ""
        key, refusal = self._writing_key(item)
        item.refusal = refusal or self._bad_source(item)
        if item.refusal:
            return ""
        try:
            self._append(item, key)
        except OSError as error:
            self._cut(item, f"disk error: {error}")
        return item.refusal

    def _writing_key(self, item: QueuedFrame) -> tuple[TenantKey | None, str]:
        """Return the key to encrypt a frame with, None for a plain one; or why it may not be stored."""
        if self._keys is None:
            return None, ""
        namespace = self._namespaces.get(item.frame.header.namespace)
        if namespace is None:
            return None, "encryption: the namespace is not registered, so nobody knows whose key to use"
        return self._keys.writing_key(namespace.tenant)

    def _append(self, item: QueuedFrame, key: TenantKey | None) -> None:
        segment = self._open.get(item.frame.bucket) or self._create(item.frame.bucket)
        segment.serial += 1
        header = encode_frame(
            item.frame,
            segment_id=segment.header.identity,
            sequence=segment.sequence,
            key_id=key.key_id if key is not None else KEY_NONE,
            key_check=key.check if key is not None else 0,
        )
        try:
            if key is None:
                self._write_plain(segment, item, header)
            else:
                self._write_sealed(segment, item, header, key)
        except OSError as error:
            segment.has_failed = True
            self._health.write_failed("write", error)
            raise
        item.location = FrameLocation(segment.header.number, segment.end, len(header), item.length_bytes)
        if key is not None:
            item.key_id, item.key_check = key.key_id, key.check
        segment.fresh.append(item)
        segment.end += item.length_bytes
        segment.sequence += 1
        segment.used_at = self._clock.monotonic()

    def _write_plain(self, segment: OpenSegment, item: QueuedFrame, header: bytes) -> None:
        buffers = [self._in_header_buffer(header)]
        for image in item.frame.parts:
            stamp(image, item.frame.header)
            buffers += image.images
        self._write(segment.handle, buffers, segment.end)

    def _write_sealed(self, segment: OpenSegment, item: QueuedFrame, header: bytes, key: TenantKey) -> None:
        """Encrypt into the bounce buffer and write that, piece by piece; readers still use the slots."""
        seal = FrameSeal(key, FramePlace(segment.header.identity, segment.end), segment.serial)
        write_all(self._fs, segment.handle, [self._in_header_buffer(header)], offset=segment.end)
        offset = segment.end + len(header)
        for image in item.frame.parts:
            if self._bounce.nbytes < image.part.stride_bytes:
                self._bounce = aligned_buffer(image.part.stride_bytes)
            for piece in sealed(image, item.frame.header, seal, buffer=self._bounce):
                write_all(self._fs, segment.handle, [piece], offset=offset)
                offset += piece.nbytes

    def _over_limit(self, item: QueuedFrame) -> str:
        # Each open segment will still get its seal, and a frame may need a new segment with a header.
        unsynced = sum(segment.end - segment.durable for segment in self._open.values())
        need = item.length_bytes + PAGE_BYTES * (len(self._open) + 2)
        used, limits = self._table.used_bytes + unsynced, self._limits
        if used + need > limits.capacity_bytes:
            text = f"capacity: limit {limits.capacity_bytes} bytes, used {used}, frame {item.length_bytes}"
            self._health.no_room(text)
            return text
        try:
            free = self._fs.free_bytes(self._directory.segments)
        except OSError as error:
            return f"free space cannot be told: {error}"
        if free - need < limits.min_free_bytes:
            text = f"free space: limit {limits.min_free_bytes} bytes, free {free}, frame {item.length_bytes}"
            self._health.no_room(text, need_bytes=limits.min_free_bytes + need)
            return text
        return ""

    def _bad_source(self, item: QueuedFrame) -> str:
        for image in item.frame.parts:
            record = bad_payload(image)
            if record >= 0:
                self._events.add(CORRUPT_METRIC, tier="host")
                return f"corrupt: record {record} of part {image.part.index} does not match its digest"
        return ""

    def _in_the_way(self, item: QueuedFrame) -> OpenSegment | None:
        """Return the open segment to seal before this frame can be appended, if any."""
        segment = self._open.get(item.frame.bucket)
        if segment is not None:
            is_full = segment.end + item.length_bytes + PAGE_BYTES > self._limits.segment_bytes_max
            return segment if is_full and segment.end > PAGE_BYTES else None
        if len(self._open) >= OPEN_SEGMENTS_MAX:
            return min(self._open.values(), key=lambda other: other.used_at)
        return None

    def _create(self, bucket: str) -> OpenSegment:
        number = self._table.take_number()
        header = SegmentHeader(number, self._new_id(), self._store, bucket, self._clock.wall())
        path = self._directory.segment_path(number)
        handle = -1
        try:
            handle = self._fs.open(path, flags=os.O_RDWR | os.O_CREAT | os.O_EXCL | self._table.direct_flag)
            # Header and name are durable before the first frame: a file with a torn header holds no frame.
            write_all(self._fs, handle, [self._in_header_buffer(encode_segment(header))], offset=0)
            self._fs.fdatasync(handle)
            self._fs.fsync_directory(self._directory.segments)
            allocated = self._fs.fstat(handle).allocated_bytes
        except OSError as error:
            self._health.write_failed("create", error)
            if handle >= 0:
                self._close_handle(handle)
                self._discard(number)
            raise
        self._table.add(SegmentState(header, PAGE_BYTES, allocated_bytes=allocated))
        self._open[bucket] = OpenSegment(header, handle, self._clock.monotonic())
        return self._open[bucket]

    def _discard(self, number: int) -> None:
        try:
            self._fs.unlink(self._directory.segment_path(number))
        except OSError as error:
            self._health.count("unlink", error)

    def _write(self, handle: int, buffers: Sequence[memoryview], offset: int) -> None:
        if not self._table.direct_flag or all(map(is_aligned, buffers)):
            write_all(self._fs, handle, buffers, offset=offset)
            return
        for buffer in buffers:
            for start in range(0, buffer.nbytes, self._bounce.nbytes):
                piece = buffer[start : start + self._bounce.nbytes]
                self._bounce[: piece.nbytes] = piece
                write_all(self._fs, handle, [self._bounce[: piece.nbytes]], offset=offset)
                offset += piece.nbytes

    def _in_header_buffer(self, content: bytes) -> memoryview:
        if self._header_buffer.nbytes < len(content):
            self._header_buffer = aligned_buffer(len(content))
        self._header_buffer[: len(content)] = content
        return self._header_buffer[: len(content)]

    def _sync(self, group: Sequence[QueuedFrame]) -> str:
        """Sync what was written and keep the group up to the first disk error; returns that error, if any."""
        touched = [segment for segment in self._open.values() if segment.fresh or segment.has_failed]
        for segment in touched:
            if not segment.fresh:
                continue
            try:
                self._fs.fdatasync(segment.handle)
            except OSError as error:
                # The kernel may have dropped the dirty pages: nothing since the last good sync counts.
                segment.has_failed = True
                self._health.write_failed("sync", error)
                for item in segment.fresh:
                    item.refusal = f"disk error: {error}"
        failure = ""
        for item in group:
            if item.location is None:
                continue
            failure = failure or item.refusal
            if failure:
                item.location, item.refusal = None, failure
        for segment in touched:
            self._settle(segment)
        return failure

    def _settle(self, segment: OpenSegment) -> None:
        """Publish what of a segment is acknowledged; take the rest back off the file."""
        kept = [item for item in segment.fresh if item.location is not None]
        segment.sequence -= len(segment.fresh) - len(kept)
        segment.fresh = []
        start = segment.durable
        segment.durable += sum(item.length_bytes for item in kept)
        if segment.end > segment.durable or segment.has_failed:
            self._take_back(segment)
        number = segment.header.number
        try:
            allocated = self._fs.fstat(segment.handle).allocated_bytes
        except OSError as error:
            self._health.count("stat", error)
            allocated = segment.durable
        self._table.grow(number, end=segment.durable, frames=len(kept), allocated_bytes=allocated)
        if kept:
            self._health.has_room()
            rows = tuple(_row(item) for item in kept)
            self._on_durable(Growth(number, segment.header.identity, start, segment.durable, rows))
        if segment.has_failed:
            self._abandon(segment)

    def _take_back(self, segment: OpenSegment) -> None:
        try:
            self._fs.truncate(segment.handle, segment.durable)
            segment.end = segment.durable
            self._tails.add(segment.header.number)
        except OSError as error:
            self._health.count("truncate", error)
            segment.has_failed = True
            self._tails.add(segment.header.number, uncut_at=segment.durable)

    def _abandon(self, segment: OpenSegment) -> None:
        """Never append to a segment again that failed; having no seal page, a rebuild checks its payloads."""
        self._let_go(segment)
        log.warning("segment abandoned segment=%016x end=%d", segment.header.number, segment.durable)

    def _seal(self, segment: OpenSegment) -> None:
        """Write the page that vouches for all before it; without it the segment is closed all the same."""
        number, end = segment.header.number, segment.durable
        page = encode_seal(
            segment_id=segment.header.identity, frames=segment.sequence, end=end, sealed_at=self._clock.wall()
        )
        try:
            write_all(self._fs, segment.handle, [self._in_header_buffer(page)], offset=end)
            self._fs.fdatasync(segment.handle)
            self._table.weigh(number, allocated_bytes=self._fs.fstat(segment.handle).allocated_bytes)
            self._on_durable(Growth(number, segment.header.identity, end, end, (), sealed=True))
        except OSError as error:
            self._health.write_failed("seal", error)
        self._let_go(segment)

    def _let_go(self, segment: OpenSegment) -> None:
        self._open.pop(segment.header.bucket, None)
        self._table.seal(segment.header.number)
        self._close_handle(segment.handle)

    def _close_handle(self, handle: int) -> None:
        try:
            self._fs.close(handle)
        except OSError as error:
            self._health.count("close", error)

    def _seal_idle(self) -> None:
        now = self._clock.monotonic()
        with self._appending:
            for segment in list(self._open.values()):
                if now - segment.used_at > IDLE_SECONDS_MAX:
                    self._seal(segment)

    def release(self, number: int) -> None:
        """Stop appending to a segment that is about to be removed, without sealing it."""
        with self._appending:
            for segment in list(self._open.values()):
                if segment.header.number == number:
                    self._let_go(segment)

    def _seal_all(self) -> None:
        with self._appending:
            for segment in list(self._open.values()):
                self._seal(segment)


def _row(item: QueuedFrame) -> FrameRow:
    assert item.location is not None
    return row_of_header(item.frame.header, item.location, key_id=item.key_id, key_check=item.key_check)
