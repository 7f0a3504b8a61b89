"""The SSD tier, put together from its writer, readers, index keeper and recovery. No TTL, no policy."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.clock import Clock
from kvstore.errors import TierUnavailable, UnknownNamespace
from kvstore.events import Events
from kvstore.namespace import Namespace
from kvstore.tiers.base import (
    FrameLocation,
    FrameRead,
    FrameTable,
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
from kvstore.tiers.fs import FileSystem, aligned_buffer
from kvstore.tiers.ssd.crypto_keys import KeyRing
from kvstore.tiers.ssd.directory import (
    PROBE_NAME,
    DataDirectory,
    prepare,
    read_store_id,
    segment_number,
    write_namespace,
    write_store_id,
)
from kvstore.tiers.ssd.format import ID_BYTES, FormatError
from kvstore.tiers.ssd.health import NO_SPACE, Health
from kvstore.tiers.ssd.index import INDEX_BYTES_MAX, Growth, Index
from kvstore.tiers.ssd.keeper import IndexKeeper
from kvstore.tiers.ssd.look import HeaderReader
from kvstore.tiers.ssd.queue import WriteQueue
from kvstore.tiers.ssd.reader import Readers
from kvstore.tiers.ssd.recovery import Recovery
from kvstore.tiers.ssd.scan import Scanner
from kvstore.tiers.ssd.scrub import Losses, Scrubber
from kvstore.tiers.ssd.segments import SegmentTable
from kvstore.tiers.ssd.tails import Tails
from kvstore.tiers.ssd.watch import WatchedFileSystem
from kvstore.tiers.ssd.writer import SegmentWriter, WriteLimits
from kvstore.types import PAGE_BYTES, Fingerprint

log = logging.getLogger(__name__)

SEGMENT_BYTES_MAX = 1 << 30
READERS = 4
WATCH_SECONDS = 1.0
STOP_SECONDS = 5.0
"""How long a thread may take to finish what it has at hand."""


@dataclass(frozen=True, slots=True)
class _Running:
    """What works once the directory has been recovered."""

    index: Index
    keeper: IndexKeeper
    writer: SegmentWriter
    scrubber: Scrubber
    looker: HeaderReader
    keeper_thread: threading.Thread
    writer_thread: threading.Thread


class SsdTier:
    """Frames in append-only segment files below one directory.

    Threads: one writer, one keeper of the index, a few readers; they start when `recover` is exhausted.
    Errors: TierUnavailable when the directory cannot be used, and from verbs before `recover`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fs: FileSystem,
        clock: Clock,
        events: Events,
        capacity_bytes: int,
        min_free_bytes: int,
        queue_bytes_max: int,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        readers: int = READERS,
        entropy: Callable[[int], bytes] = os.urandom,
        index_bytes_max: int = INDEX_BYTES_MAX,
        scrub_bytes_per_second: int = 0,
        keys: KeyRing | None = None,
    ) -> None:
        self._clock, self._events, self._entropy, self._keys = clock, events, entropy, keys
        self._capacity_bytes = capacity_bytes
        self._directory = DataDirectory(directory)
        self._health = Health(clock, events)
        fs = self._fs = WatchedFileSystem(fs, self._health)
        prepare(fs, self._directory)
        self._table = SegmentTable(fs, self._directory)
        self._table.direct_flag = self._probe_direct()
        self._store = self._own_store_id()
        self._namespaces: dict[Fingerprint, Namespace] = {}
        self._free_at_start = fs.free_bytes(self._directory.segments)
        self._unwritten: set[Fingerprint] = set()
        self._losses = Losses(events)
        self._queue = WriteQueue(bytes_max=queue_bytes_max)
        self._readers = Readers(
            fs=fs,
            table=self._table,
            events=events,
            health=self._health,
            threads=readers,
            on_unreadable=self._quarantine,
            keys=keys,
        )
        self._scrub_bytes_per_second = scrub_bytes_per_second
        self._limits = WriteLimits(capacity_bytes, min_free_bytes, segment_bytes_max)
        self._recovery = Recovery(
            fs=fs,
            directory=self._directory,
            table=self._table,
            store=self._store,
            clock=clock,
            health=self._health,
            index_bytes_max=index_bytes_max,
            namespaces=self._namespaces,
            keys=keys,
        )
        self._running: _Running | None = None
        self._is_closed = False
        self._closing = threading.Event()

    def _probe_direct(self) -> int:
        """Return O_DIRECT where the file system takes a direct write, else 0."""
        path = self._directory.root / PROBE_NAME
        flag = getattr(os, "O_DIRECT", 0)
        try:
            handle = self._fs.open(path, flags=os.O_RDWR | os.O_CREAT | flag)
            try:
                # A full disk takes no write of either kind: then that the file opened must do.
                self._fs.pwritev(handle, [aligned_buffer(PAGE_BYTES)], 0)
            finally:
                self._fs.close(handle)
        except OSError as error:
            if error.errno not in NO_SPACE:
                log.warning("direct I/O is not used error=%s", error)
                flag = 0
        try:
            self._fs.unlink(path)
        except OSError as error:
            log.debug("probe file stays error=%s", error)
        if not flag:
            self._health.note("direct", "buffered I/O: the file system takes no direct I/O")
        return flag

    def _own_store_id(self) -> bytes:
        """Return the store's id; a lost one is taken from the segments, an empty directory gets a new one."""
        identity = read_store_id(self._fs, self._directory)
        if identity is not None:
            return identity
        found = set(self._store_ids_of_segments())
        if len(found) > 1:
            names = ", ".join(sorted(store.hex() for store in found))
            raise TierUnavailable(
                f"{self._directory.root}: STORE is missing and the segments are of several stores: {names}"
            )
        identity = found.pop() if found else self._entropy(ID_BYTES)
        write_store_id(self._fs, self._directory, identity=identity, created_at=self._clock.wall())
        return identity

    def _store_ids_of_segments(self) -> Iterator[bytes]:
        scanner = Scanner(self._fs)
        for name in self._fs.listdir(self._directory.segments):
            if segment_number(name) is None:
                continue
            handle = self._fs.open(self._directory.segments / name, flags=os.O_RDONLY)
            try:
                yield scanner.header(handle).store
            except FormatError as error:
                log.debug("segment tells no store name=%s error=%s", name, error)
            finally:
                self._fs.close(handle)

    def register(self, namespace: Namespace) -> None:
        """Make a namespace known; the writer makes it durable before the first frame of it. Idempotent.

        Nothing is written here: who opens a namespace must neither wait for a disk nor fail with it.
        """
        if namespace.fingerprint not in self._namespaces:
            self._unwritten.add(namespace.fingerprint)
            self._namespaces[namespace.fingerprint] = namespace

    def _write_namespace(self, fingerprint: Fingerprint) -> None:
        """Make a namespace durable, on the writer's thread.

        Errors: OSError.
        """
        if fingerprint in self._unwritten:
            write_namespace(self._fs, self._directory, namespace=self._namespaces[fingerprint])
            self._unwritten.discard(fingerprint)

    def _quarantine(self, segment: int) -> None:
        self._table.quarantine(segment)
        self._losses.add(Loss(segment))
        log.error("segment is in quarantine after read errors segment=%016x", segment)

    def write(self, frames: Sequence[FrameWrite]) -> list[Future[WriteResult]]:
        """Append frames in order; each resolves when it and all before it are durable, or when it is refused.

        A refusal refuses all that follows in the same call: a run is cut at its tail, never in the middle.
        Errors: InvalidArgument on a frame that does not fit together, UnknownNamespace before `register`.
        """
        self._started()
        for frame in frames:
            if frame.header.namespace not in self._namespaces:
                raise UnknownNamespace(
                    f"namespace {frame.header.namespace.hex()} is not registered with the ssd tier"
                )
        return self._queue.submit(frames, refusal=self._health.read_only_reason)

    def read_into(self, reads: Sequence[FrameRead]) -> list[Future[ReadResult]]:
        """Read and verify records into the caller's slots."""
        self._started()
        return self._readers.submit(reads)

    def annotate(self, notes: Sequence[TouchNote]) -> None:
        """Remember touches lazily."""
        self._started().keeper.annotate(notes)

    def delete(self, frames: Sequence[FrameLocation]) -> Future[int]:
        """Forget frames for good and give their bytes back where possible; resolves to bytes freed.

        Errors (of the future): TierUnavailable when a frame may return with a restart; it is counted.
        """
        return self._started().keeper.delete(frames)

    def unlink(self, segments: Sequence[int], *, is_urgent: bool = True) -> Future[int]:
        """Remove whole segments, with the next commit of the index unless that is urgent; resolves to bytes
        freed.

        Errors (of the future): TierUnavailable when one cannot be removed; it is counted and stays.
        """
        return self._started().keeper.unlink(segments, is_urgent=is_urgent)

    def sync_index(self) -> Future[int]:
        """Commit rows and touches now instead of within a second; resolves to 0."""
        return self._started().keeper.flush()

    def recover(self) -> Iterator[RecoveredFrame | FrameTable]:
        """Yield every durable frame once, in write order within a segment, then start the threads."""
        if self._running is not None or self._is_closed:
            raise TierUnavailable("the ssd tier has been recovered already, or is closed")
        try:
            yield from self._recovery.frames()
        except OSError as error:
            raise TierUnavailable(f"{self._directory.root} cannot be recovered: {error}") from error
        self._start()

    def headers(self, frames: Sequence[FrameLocation]) -> Future[list[RecoveredFrame | None]]:
        """Read what frames say of themselves; touches are as of about a second ago.

        None of one that is not there, or whose layout or key is not known; of all while the disk hangs.
        """
        return self._started().looker.submit(frames)

    def _put_together(self) -> _Running:
        index = self._recovery.index
        assert index is not None
        tails = Tails(fs=self._fs, directory=self._directory, table=self._table, health=self._health)
        writer = SegmentWriter(
            fs=self._fs,
            directory=self._directory,
            table=self._table,
            queue=self._queue,
            clock=self._clock,
            events=self._events,
            health=self._health,
            limits=self._limits,
            store=self._store,
            new_id=self._new_id,
            on_durable=self._on_durable,
            before_frame=self._write_namespace,
            namespaces=self._namespaces,
            tails=tails,
            keys=self._keys,
        )
        keeper = IndexKeeper(
            fs=self._fs,
            directory=self._directory,
            table=self._table,
            index=index,
            clock=self._clock,
            health=self._health,
            release=writer.release,
            free_bytes=self._free_at_start,
            tails=tails,
        )
        scrubber = Scrubber(
            fs=self._fs,
            directory=self._directory,
            table=self._table,
            events=self._events,
            health=self._health,
            losses=self._losses,
            bytes_per_second=self._scrub_bytes_per_second,
            is_busy=lambda: self._readers.are_busy,
            keys=self._keys,
        )
        looker = HeaderReader(
            Scanner(self._fs),
            table=self._table,
            index=index,
            health=self._health,
            namespaces=self._namespaces,
            is_buried=keeper.is_buried,
            on_unreadable=self._quarantine,
            distrust=keeper.distrust,
        )
        keeper_thread = self._health.supervised("kvstore-ssd-index", keeper.run)
        writer_thread = self._health.supervised("kvstore-ssd-write", writer.run)
        return _Running(index, keeper, writer, scrubber, looker, keeper_thread, writer_thread)

    def _start(self) -> None:
        self._running = running = self._put_together()
        for growth in self._recovery.unsaved:
            running.keeper.grow(growth, is_new=False)
        if self._recovery.shredded:
            running.keeper.delete(self._recovery.shredded)
        running.keeper_thread.start()
        running.writer_thread.start()
        running.looker.start()
        self._readers.start()
        if self._scrub_bytes_per_second:
            self._health.supervised("kvstore-ssd-scrub", running.scrubber.run).start()
        self._health.supervised("kvstore-ssd-watch", self._watch).start()

    def _watch(self) -> None:
        """Answer what waits for a disk that hangs; touches no disk itself."""
        while not self._closing.wait(WATCH_SECONDS):
            self.refuse_if_it_hangs()

    def refuse_if_it_hangs(self) -> None:
        """Refuse queued writes and answer queued reads when calls to the disk do not return."""
        self._health.look()
        hangs, _ = self._health.hanging()
        if hangs:
            self._queue.refuse(hangs)
        if reads_hang := self._health.reads_hang:
            self._readers.refuse(reads_hang)
            if self._running is not None:
                self._running.looker.refuse()

    def _new_id(self) -> bytes:
        return self._entropy(ID_BYTES)

    def _on_durable(self, growth: Growth) -> None:
        self._started().keeper.grow(growth)

    def _started(self) -> _Running:
        if self._running is None:
            raise TierUnavailable("the ssd tier has not been recovered yet")
        return self._running

    def report(self) -> RecoveryReport:
        """Return what `recover` found, once it is exhausted."""
        return self._recovery.report()

    def usage(self) -> TierUsage:
        """Return the present usage; the free space is as of about a second ago."""
        running = self._running
        free = running.keeper.free_bytes if running is not None else self._free_at_start
        written = running.writer.written_bytes if running is not None else 0
        return TierUsage(
            self._capacity_bytes, self._table.used_bytes, free, len(self._table), written, self._queue.bytes
        )

    def segments(self) -> list[SegmentInfo]:
        """Return the present segments."""
        return self._table.infos()

    def sealed_bytes(self) -> dict[int, int]:
        """Return how many bytes each present segment takes that nothing is appended to any more."""
        return self._table.sealed_bytes()

    def healthy(self) -> TierHealth:
        """Return the present health."""
        running = self._running
        return replace(self._health.state(), scrub=running.scrubber.progress() if running is not None else "")

    def written(self) -> list[WrittenBytes]:
        """Return what was written by day and class; it is as old as the index, and lags it by nothing."""
        running = self._running
        return running.keeper.written() if running is not None else []

    def losses(self) -> list[Loss]:
        """Return what turned out bad since the last call, without being asked for."""
        return self._losses.take()

    def close(self, *, deadline_seconds: float) -> None:
        """Drain writes until the deadline, seal, sync and let go; idempotent.

        What is still queued at the deadline is refused. A disk that hangs is left to its threads.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._closing.set()
        running = self._running
        if running is not None:
            running.scrubber.close()
            running.looker.close()
            self._queue.drain(timeout_seconds=deadline_seconds)
        self._queue.close("closing")
        self._readers.close()
        if running is not None:
            self._stop(running)
        elif self._recovery.index is not None:
            self._recovery.index.close()

    def _stop(self, running: _Running) -> None:
        running.writer_thread.join(STOP_SECONDS)
        running.keeper.close()
        running.keeper_thread.join(STOP_SECONDS)
        has_ended = self._readers.join(timeout_seconds=STOP_SECONDS) and running.looker.join(STOP_SECONDS)
        if running.keeper_thread.is_alive() or running.writer_thread.is_alive() or not has_ended:
            log.error("ssd threads hang and are left behind")
            return
        running.index.close()
        self._table.close()
