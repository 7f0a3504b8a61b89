"""Reads what single frames say of themselves: of sleeping ones no more than their place is in memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from kvstore.layout import Part
from kvstore.namespace import Namespace
from kvstore.tiers.base import FrameHeader, FrameLocation, RecoveredFrame
from kvstore.tiers.ssd.format import FormatError, StoredPart
from kvstore.tiers.ssd.health import Health
from kvstore.tiers.ssd.index import INDEX_ERRORS, Index, Seen, is_damage
from kvstore.tiers.ssd.index_rows import FrameRow
from kvstore.tiers.ssd.recovery_rows import cut_touches, resolve_parts, row_of
from kvstore.tiers.ssd.scan import Scanner
from kvstore.tiers.ssd.segments import SegmentTable
from kvstore.types import HASH_BYTES, Fingerprint

FRAMES_AT_ONCE = 1024
"""An open read transaction keeps the index from using pages again: after so many frames it is a new one."""
FRAMES_QUEUED_MAX = 1 << 20
Headers = list[RecoveredFrame | None]
_Job = tuple[Sequence[FrameLocation], "Future[Headers]"]


class HeaderReader:
    """Takes rows from the index; frames that have none yet are read from their segment.

    Threads: `submit` and `refuse` are thread-safe and never wait for the disk; `run` is the reader's thread.
    """

    def __init__(
        self,
        scanner: Scanner,
        *,
        table: SegmentTable,
        index: Index,
        health: Health,
        namespaces: dict[Fingerprint, Namespace],
        is_buried: Callable[[FrameLocation], bool],
        on_unreadable: Callable[[int], None],
        distrust: Callable[[], object],
    ) -> None:
        self._scanner, self._distrust = scanner, distrust
        self._table, self._index, self._health = table, index, health
        self._namespaces, self._is_buried, self._on_unreadable = namespaces, is_buried, on_unreadable
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[Future[Headers], int] = {}
        self._frames_open = 0
        self._is_closed = self._is_distrusted = False
        self._known_parts: dict[tuple[object, ...], tuple[Part, ...]] = {}
        self._thread = health.supervised("kvstore-ssd-look", self.run)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, frames: Sequence[FrameLocation]) -> Future[Headers]:
        """Queue frames to look at; nothing is found of any when that cannot be done now."""
        future: Future[Headers] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            is_refused = self._is_closed or self._frames_open + len(frames) > FRAMES_QUEUED_MAX
            if not is_refused and not self._health.reads_hang:
                self._open[future] = len(frames)
                self._frames_open += len(frames)
                self._jobs.put((frames, future))
                return future
        future.set_result([None] * len(frames))
        return future

    def refuse(self) -> None:
        """Answer whoever waits; what the thread has at hand, once the disk returns, is for nobody."""
        with self._lock:
            waiting = list(self._open.items())
        for future, count in waiting:
            self._answer(future, [None] * count)

    def _answer(self, future: Future[Headers], found: Headers) -> None:
        with self._lock:
            self._frames_open -= self._open.pop(future, 0)
        with suppress(InvalidStateError):
            future.set_result(found)

    def run(self) -> None:
        """Look at frames until closed."""
        while (job := self._jobs.get()) is not None:
            frames, future = job
            if future.done():
                continue
            try:
                found = self._headers(frames)
            except Exception:
                self._health.thread_failed(threading.current_thread().name)
                found = [None] * len(frames)
            self._answer(future, found)

    def _headers(self, frames: Sequence[FrameLocation]) -> Headers:
        found: Headers = []
        for start in range(0, len(frames), FRAMES_AT_ONCE):
            found += self._some(frames[start : start + FRAMES_AT_ONCE])
        return found

    def _some(self, frames: Sequence[FrameLocation]) -> Headers:
        states = {number: self._table.get(number) for number in {frame.segment for frame in frames}}
        identities = {
            number: state.header.identity
            for number, state in states.items()
            if state is not None and not state.quarantined
        }
        # Before the index is read: what is told to it meanwhile is no longer told here.
        asked = [f if f.segment in identities and not self._is_buried(f) else None for f in frames]
        there = [frame for frame in asked if frame is not None]
        seen = iter(self._seen(there, identities))
        return [
            self._header(frame, identities[frame.segment], next(seen)) if frame is not None else None
            for frame in asked
        ]

    def _seen(self, frames: Sequence[FrameLocation], identities: dict[int, bytes]) -> list[Seen]:
        try:
            # A page of the index that is not in memory is read like any other file.
            with self._health.watching("read"):
                return self._index.look(frames, identities, on_damage=self._damaged)
        except INDEX_ERRORS as error:
            if is_damage(error):
                self._damaged(error)
            else:
                self._health.count("index", error)
            return [(None, ())] * len(frames)

    def _damaged(self, error: Exception) -> None:
        """A start that finds good tables reads no rows: what is wrong with them shows here."""
        self._health.count("index", error)
        if not self._is_distrusted:
            self._is_distrusted = True
            self._distrust()

    def _header(self, place: FrameLocation, identity: bytes, seen: Seen) -> RecoveredFrame | None:
        row, touches = seen
        stored: tuple[StoredPart, ...] = ()
        if row is None:
            row, stored = self._from_segment(place, identity)
        if row is None or (row.header_bytes, row.length_bytes) != (place.header_bytes, place.length_bytes):
            return None
        parts = self._parts(row, stored)
        if parts is None:
            return None
        header = FrameHeader(
            row.namespace,
            row.kind,
            row.parent,
            row.keys,
            parts,
            row.retention_class,
            row.written_at,
            row.provenance,
            row.touched_at,
        )
        return RecoveredFrame(header, place, cut_touches(touches, blocks=len(row.keys) // HASH_BYTES))

    def _from_segment(
        self, place: FrameLocation, identity: bytes
    ) -> tuple[FrameRow | None, tuple[StoredPart, ...]]:
        try:
            with self._table.reading(place.segment) as handle:
                frame = self._scanner.frame(handle, segment_id=identity, offset=place.offset)
        except (KeyError, FormatError):
            return None, ()
        except OSError as error:
            if self._health.read_failed(place.segment, error):
                self._on_unreadable(place.segment)
            return None, ()
        return row_of(frame, place.offset), frame.parts

    def _parts(self, row: FrameRow, stored: tuple[StoredPart, ...]) -> tuple[Part, ...] | None:
        key = (row.namespace, stored or row.parts)
        parts = self._known_parts.get(key)
        if parts is None:
            # Not kept when they are not known: the namespace may be registered later.
            parts = resolve_parts(self._namespaces.get(row.namespace), row.parts, stored)
            if parts is not None:
                self._known_parts[key] = parts
        return parts

    def close(self) -> None:
        """Answer what waits, and end the thread."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._jobs.put(None)
        self.refuse()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread so long; says whether it has ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()
