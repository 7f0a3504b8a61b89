"""The readers: a few threads that fill slots from segments and check every record while it is in cache."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import numpy as np

from kvstore.errors import InvalidArgument
from kvstore.events import Events
from kvstore.tiers.base import FrameRead, ReadResult
from kvstore.tiers.fs import FileSystem, aligned_buffer, is_aligned, read_up_to
from kvstore.tiers.ssd.crypto import FramePlace, RecordOpener
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyState
from kvstore.tiers.ssd.health import Health
from kvstore.tiers.ssd.segments import SegmentTable
from kvstore.tiers.ssd.trailer import Checked, check_records, shape_of
from kvstore.tiers.ssd.writer import CORRUPT_METRIC
from kvstore.types import HASH_BYTES, MissReason

UNREADABLE_METRIC = "kvstore_ssd_unreadable_total"
READS_QUEUED_MAX = 65_536
_Job = tuple[FrameRead, "Future[ReadResult]"]


class Readers:
    """Reads records into the caller's slots; whatever is not intact ends the read before it.

    Threads: `submit` is thread-safe; `run` is each reader's thread.
    """

    def __init__(
        self,
        *,
        fs: FileSystem,
        table: SegmentTable,
        events: Events,
        health: Health,
        threads: int,
        on_unreadable: Callable[[int], None],
        keys: KeyRing | None = None,
    ) -> None:
        self._fs, self._table, self._events, self._health = fs, table, events, health
        self._on_unreadable, self._keys = on_unreadable, keys
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        names = [f"kvstore-ssd-read-{i}" for i in range(threads)]
        self._threads = [health.supervised(name, self.run) for name in names]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, reads: Sequence[FrameRead]) -> list[Future[ReadResult]]:
        """Queue reads.

        Errors: InvalidArgument when the slots and the keys of a read do not fit together.
        """
        for read in reads:
            _check(read)
        futures: list[Future[ReadResult]] = [Future() for _ in reads]
        with self._lock:
            refusal = self._refusal(len(reads))
            if refusal is None:
                for job in zip(reads, futures, strict=True):
                    self._jobs.put(job)
                return futures
        for future in futures:
            future.set_result(refusal)
        return futures

    def _refusal(self, count: int) -> ReadResult | None:
        if self._is_closed:
            return ReadResult(0, b"", b"", MissReason.TIER_DOWN, "closed")
        if hangs := self._health.reads_hang:
            return ReadResult(0, b"", b"", MissReason.TIER_DOWN, hangs)
        if self._jobs.qsize() + count > READS_QUEUED_MAX:
            return ReadResult(
                0, b"", b"", MissReason.THROTTLED, f"read queue full: limit {READS_QUEUED_MAX} reads"
            )
        return None

    @property
    def are_busy(self) -> bool:
        """Say whether reads wait for a thread."""
        return not self._jobs.empty()

    def refuse(self, reason: str) -> None:
        """Answer what waits for a thread; what a thread has at hand goes on."""
        waiting: list[_Job] = []
        with self._lock:
            if self._is_closed:
                return
            with suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    waiting.append(job)
        for _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(ReadResult(0, b"", b"", MissReason.TIER_DOWN, reason))

    def run(self) -> None:
        """Serve reads until closed."""
        while (job := self._jobs.get()) is not None:
            read, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = self._read(read)
            except Exception:
                self._health.thread_failed(threading.current_thread().name)
                result = ReadResult(0, b"", b"", MissReason.TIER_DOWN, "the reader failed")
            future.set_result(result)

    def _read(self, read: FrameRead) -> ReadResult:
        shape = shape_of(read.parts[read.part_position])
        before = sum(part.stride_bytes for part in read.parts[: read.part_position])
        location = read.location
        offset = (
            location.offset
            + location.header_bytes
            + read.block_count * before
            + read.first * shape.stride_bytes
        )
        state = self._table.get(location.segment)
        if state is not None and state.quarantined:
            detail = f"segment {location.segment:016x} is in quarantine after read errors"
            return ReadResult(0, b"", b"", MissReason.TIER_DOWN, detail)
        try:
            with self._table.reading(location.segment) as handle:
                came = self._fill(handle, read.into, offset)
        except KeyError:
            return ReadResult(0, b"", b"", MissReason.EVICTED, f"segment {location.segment:016x} is gone")
        except OSError as error:
            if self._health.read_failed(location.segment, error):
                self._on_unreadable(location.segment)
            return ReadResult(0, b"", b"", MissReason.TIER_DOWN, f"segment {location.segment:016x}: {error}")
        whole = came // shape.stride_bytes
        wanted = len(read.keys) // HASH_BYTES
        views = read.into if whole == wanted else _first_bytes(read.into, whole * shape.stride_bytes)
        identity = state.header.identity if state is not None else b""
        opener = RecordOpener(self._keys, FramePlace(identity, location.offset), first=read.first)
        checked = check_records(views, shape, keys=read.keys[: whole * HASH_BYTES], opener=opener)
        if checked.good == wanted:
            return ReadResult(checked.good, checked.lengths, checked.digests)
        reason = self._counted(checked)
        fault = checked.fault or f"the file ends before record {whole}"
        detail = (
            f"segment {location.segment:016x} frame at {location.offset} from record {read.first}: {fault}"
        )
        return ReadResult(checked.good, checked.lengths, checked.digests, reason, detail)

    def _counted(self, checked: Checked) -> MissReason:
        """Count what stopped a read; a key that is not at hand may come back, a shredded one never does."""
        if checked.key is None:
            self._events.add(CORRUPT_METRIC, tier="ssd")
            return MissReason.CORRUPT
        self._events.add(UNREADABLE_METRIC, key=checked.key.value)
        return MissReason.DELETED if checked.key is KeyState.SHREDDED else MissReason.TIER_DOWN

    def _fill(self, handle: int, into: Sequence[memoryview], offset: int) -> int:
        if not self._table.direct_flag or all(map(is_aligned, into)):
            return read_up_to(self._fs, handle, into, offset=offset)
        total = sum(view.nbytes for view in into)
        bounce = aligned_buffer(total)
        came = read_up_to(self._fs, handle, [bounce[:total]], offset=offset)
        source = np.frombuffer(bounce, np.uint8)
        at = 0
        for view in into:
            np.copyto(np.frombuffer(view, np.uint8), source[at : at + view.nbytes])
            at += view.nbytes
        return came

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in self._threads:
                self._jobs.put(None)

    def join(self, *, timeout_seconds: float) -> bool:
        """Wait for the threads, all of them together so long; says whether all have ended."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_seconds / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)


def _check(read: FrameRead) -> None:
    stride = read.parts[read.part_position].stride_bytes
    count = len(read.keys) // HASH_BYTES
    room = sum(view.nbytes for view in read.into)
    if not count or len(read.keys) % HASH_BYTES or room != count * stride:
        raise InvalidArgument(
            f"read: {len(read.keys)} bytes of keys need {count * stride} bytes of slots, got {room}"
        )
    if (
        any(view.nbytes % stride for view in read.into)
        or read.first < 0
        or read.first + count > read.block_count
    ):
        raise InvalidArgument(
            f"read: records {read.first}..{read.first + count} of {read.block_count}, in whole slots"
        )


def _first_bytes(views: Sequence[memoryview], size: int) -> list[memoryview]:
    kept: list[memoryview] = []
    for view in views:
        if size <= 0:
            break
        kept.append(view[:size])
        size -= view.nbytes
    return kept
