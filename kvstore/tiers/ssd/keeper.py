"""The keeper of the index: one thread that commits rows and touches every second, and carries out deletions.

A deletion is durable on the segment itself first (a tombstone in the frame's header, or the file's unlink),
then in the index, and only then are the bytes given back: neither rows nor a rebuild can bring a frame back.
It is counted on disk before it begins, so that an index older than that is told at the start.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from kvstore.clock import Clock
from kvstore.errors import TierUnavailable
from kvstore.tiers.base import FrameLocation, TouchNote, WrittenBytes
from kvstore.tiers.fs import FileSystem, aligned_buffer, read_up_to, write_all
from kvstore.tiers.ssd.directory import DataDirectory, distrust_index, read_deletions, write_deletions
from kvstore.tiers.ssd.format import (
    SEAL_MAGIC,
    TOMBSTONE_BYTES,
    TOMBSTONE_MAGIC,
    FormatError,
    decode_prefix,
    encode_tombstone,
)
from kvstore.tiers.ssd.health import Health
from kvstore.tiers.ssd.index import INDEX_ERRORS, Change, Growth, Index, is_damage
from kvstore.tiers.ssd.index_rows import Touches
from kvstore.tiers.ssd.segments import SegmentState, SegmentTable
from kvstore.tiers.ssd.tails import Tails
from kvstore.tiers.ssd.written import WrittenDays
from kvstore.types import PAGE_BYTES

log = logging.getLogger(__name__)

COMMIT_SECONDS = 1.0
ROWS_AT_ONCE, PAUSE_SECONDS = 32, 0.0002
"""Writing so many rows takes about as long as a match: who answers requests meanwhile waits no longer."""
TOUCHES_MAX = 1 << 20
ROWS_KEPT_MAX = 4096
"""Rows that wait for an index that cannot be written; a row is a few kilobytes."""


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of a command: bytes freed, and why it may not last. `needs_index`: rows must be gone, too."""

    freed: int = 0
    failure: str = ""
    needs_index: bool = False


_Finish = Callable[[], _Done]
_Command = tuple[Callable[[Change], _Finish], "Future[int]"]


class IndexKeeper:
    """Owns the writing side of the index.

    Threads: `run` is the keeper's thread; all other methods are thread-safe and return at once.
    """

    def __init__(
        self, *, fs: FileSystem, directory: DataDirectory, table: SegmentTable, index: Index, clock: Clock,
        health: Health, release: Callable[[int], None], free_bytes: int, tails: Tails,
    ) -> None:  # fmt: skip
        self._fs, self._directory, self._table, self._index = fs, directory, table, index
        self._clock, self._health, self._release, self._tails = clock, health, release, tails
        self._wake = threading.Condition()
        self._moment, self._rows = threading.Event(), 0
        self._written = WrittenDays(self._written_before())
        self._growths: list[Growth] = []
        self._touches: dict[tuple[int, int], Touches] = {}
        self._commands: list[_Command] = []
        self._is_called = self._is_closing = False
        self._has_ended = False
        self._unsaved_gone: set[tuple[int, int]] = set()
        self._unsynced_names, self._names_failure = False, ""
        self._deletions = read_deletions(fs, directory) or 0
        self.free_bytes = free_bytes
        self._page = aligned_buffer(PAGE_BYTES)

    def grow(self, growth: Growth, *, is_new: bool = True) -> None:
        """Take rows of durable frames; committed within about a second. New ones were written now."""
        with self._wake:
            self._growths.append(growth)
            if is_new:
                self._written.add(growth.rows, wall=self._clock.wall())

    def _written_before(self) -> dict[tuple[int, str], int]:
        try:
            return self._index.written()
        except INDEX_ERRORS as error:
            self._health.count("index", error)
            return {}

    def written(self) -> list[WrittenBytes]:
        """Return what was written by day and class, the oldest day first."""
        with self._wake:
            return self._written.rows()

    def annotate(self, notes: Sequence[TouchNote]) -> None:
        """Take touches; the latest of each frame are kept, what exceeds TOUCHES_MAX frames is forgotten."""
        with self._wake:
            for note in notes:
                key = (note.location.segment, note.location.offset)
                known = self._touches.get(key)
                if known is None and len(self._touches) >= TOUCHES_MAX:
                    continue
                if known is None or _newest(known) <= _newest(note.slices):
                    self._touches[key] = note.slices

    def delete(self, frames: Sequence[FrameLocation]) -> Future[int]:
        """Forget frames for good; resolves to bytes freed.

        Errors (of the future): TierUnavailable when one of them may return with a restart.
        """
        return self._command(lambda change: self._bury(frames, change))

    def unlink(self, segments: Sequence[int], *, is_urgent: bool = True) -> Future[int]:
        """Remove whole segments, with the next commit unless that is urgent: so many at once cost readers
        fewer switches of threads. Resolves to bytes freed.

        Errors (of the future): TierUnavailable when one may return with a restart.
        """
        return self._command(lambda change: self._remove(segments, change), is_urgent=is_urgent)

    def flush(self) -> Future[int]:
        """Commit what is known now; resolves to 0."""
        return self._command(lambda change: _Done)

    def is_buried(self, frame: FrameLocation) -> bool:
        """Say whether a frame is deleted although the index, which could not be told, still has its row."""
        return (frame.segment, frame.offset) in self._unsaved_gone

    def _command(self, work: Callable[[Change], _Finish], *, is_urgent: bool = True) -> Future[int]:
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            if not self._has_ended:
                self._commands.append((work, future))
                if is_urgent:
                    self._is_called = True
                    self._wake.notify_all()
                return future
        _refuse(future)
        return future

    def close(self) -> None:
        """Let the thread end after a last commit."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()

    def run(self) -> None:
        """Commit and obey until closed."""
        try:
            self._look_at_space()
            while self._turn():
                self._look_at_space()
        finally:
            with self._wake:
                self._has_ended = True
                rest, self._commands = self._commands, []
            for _, future in rest:
                _refuse(future)

    def _look_at_space(self) -> None:
        """Keep the free space at hand for whoever must not wait, and see when there is room again."""
        try:
            self.free_bytes = self._fs.free_bytes(self._directory.segments)
        except OSError as error:
            self._health.count("stat", error)
            return
        missing = self._health.missing_bytes
        if missing and self.free_bytes >= missing:
            self._health.has_room()

    def _turn(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._is_called or self._is_closing, timeout=COMMIT_SECONDS)
            is_last, self._is_called = self._is_closing, False
            commands, self._commands = self._commands, []
            change = Change(self._growths, self._touches, sorted(self._unsaved_gone))
            change.written = self._written.take()
            self._growths, self._touches = [], {}
        try:
            finishers = [work(change) for work, _ in commands]
            self._remove_emptied(change)
            self._sync_names()
            committed = self._commit(change)
            results = [finish() for finish in finishers]
            if committed:
                self._unsaved_gone.clear()
            # Only now: making holes may have made the room that this needs on a full disk.
            agrees = committed or self._has_told_of(change)
        except BaseException:
            for _, future in commands:
                _refuse(future)
            raise
        for (_, future), done in zip(commands, results, strict=True):
            failure = done.failure or ("" if agrees or not done.needs_index else "the index still names it")
            if failure:
                future.set_exception(TierUnavailable(f"deleted, but a restart may bring it back: {failure}"))
            else:
                future.set_result(done.freed)
        return not is_last

    def _has_told_of(self, change: Change) -> bool:
        """The index could not be told of deletions: have the next start rebuild it; says whether it will."""
        if not self._unsaved_gone.issuperset(change.frames_gone):
            if not self.distrust():
                return False
            self._unsaved_gone.update(change.frames_gone)
        return True

    def _commit(self, change: Change) -> bool:
        if not change:
            return True
        try:
            with self._health.watching("index"):
                skipped = self._index.commit(
                    change, next_number=self._table.next_number, on_row=self._make_way
                )
        except INDEX_ERRORS as error:
            # The watermarks stay where they are, so a start reads from the segments what the rows lack.
            self._health.count("index", error)
            self._health.note("index", f"the index lags: {error}")
            self._keep_for_later(change)
            if is_damage(error):
                self.distrust()
            return False
        self._health.note("index", "the index lags behind some segments" if skipped else "")
        return True

    def _make_way(self) -> None:
        """Let others have the interpreter for a moment after some rows, unless the store closes."""
        self._rows += 1
        if not self._rows % ROWS_AT_ONCE and not self._is_closing:
            self._moment.wait(PAUSE_SECONDS)

    def _keep_for_later(self, change: Change) -> None:
        """Try again with the next commit, as far as there is room; rows forgotten here are read at start."""
        with self._wake:
            touches = dict(islice(change.touches.items(), TOUCHES_MAX))
            self._touches = touches | self._touches
            self._written.put_back(change.written)
            if sum(len(growth.rows) for growth in change.growths) <= ROWS_KEPT_MAX:
                self._growths[:0] = change.growths

    def distrust(self) -> bool:
        """Have the next start rebuild the index; says whether it will. Waits for the disk."""
        try:
            distrust_index(self._fs, self._directory)
        except OSError as error:
            self._health.count("index", error)
            return False
        return True

    def _count_deletion(self, change: Change) -> None:
        """Count a deletion on disk before it begins, once in a commit."""
        if change.deletions:
            return
        change.deletions = self._deletions = self._deletions + 1
        try:
            write_deletions(self._fs, self._directory, count=self._deletions)
        except OSError as error:
            # Then the index is ahead, and that is told at the start as well.
            self._health.count("delete", error)

    def _bury(self, frames: Sequence[FrameLocation], change: Change) -> _Finish:
        if frames:
            self._count_deletion(change)
        by_segment: defaultdict[int, dict[FrameLocation, None]] = defaultdict(dict)
        for frame in frames:
            by_segment[frame.segment][frame] = None
        open_graves: list[tuple[int, list[FrameLocation], bool]] = []
        failure = self._tails.cut()
        for number, some in by_segment.items():
            state = self._table.get(number)
            if state is not None:
                done, trouble = self._entomb(state, some, change)
                failure = failure or trouble
                change.frames_gone += [(number, frame.offset) for frame in done]
                open_graves.append((number, done, not trouble))
        return lambda: _Done(sum(self._give_back(*grave) for grave in open_graves), failure, bool(frames))

    def _entomb(
        self, state: SegmentState, frames: Iterable[FrameLocation], change: Change
    ) -> tuple[list[FrameLocation], str]:
        """Turn headers into tombstones; returns the frames that died by it, and why that may not last."""
        done: list[FrameLocation] = []
        failure = ""
        gone = self._unsaved_gone.union(change.frames_gone)
        path = self._directory.segment_path(state.header.number)
        try:
            handle = self._fs.open(path, flags=os.O_RDWR | self._table.direct_flag)
        except OSError as error:
            self._health.count("delete", error)
            return [], str(error)
        try:
            for frame in frames:
                try:
                    grave = self._dig(handle, state, frame)
                except OSError as error:
                    self._health.count("delete", error)
                    failure = str(error)
                    continue
                was_living = (frame.segment, frame.offset) not in gone and self._has_row(frame)
                if grave is Grave.NEW or was_living:
                    done.append(frame)
            self._fs.fdatasync(handle)
        except OSError as error:
            # The frames are dead in this process all the same; their bytes stay until their segment dies.
            self._health.count("delete", error)
            failure = str(error)
        finally:
            self._fs.close(handle)
        return done, failure

    def _dig(self, handle: int, state: SegmentState, frame: FrameLocation) -> Grave:
        identity, now = state.header.identity, self._clock.wall()
        return entomb(self._fs, handle, self._page, segment_id=identity, offset=frame.offset, deleted_at=now)

    def _has_row(self, frame: FrameLocation) -> bool:
        """Say whether the index still takes a frame for living, whatever its header says."""
        try:
            return self._index.has_row(frame.segment, frame.offset)
        except INDEX_ERRORS as error:
            self._health.count("index", error)
            return False

    def _give_back(self, number: int, frames: Sequence[FrameLocation], is_durable: bool) -> int:
        before = self._table.get(number)
        if before is None or not frames:
            return 0
        allocated = before.allocated_bytes
        if self._table.bury(number, frames=len(frames)):
            return self._unlink_file(number)
        if not is_durable:
            return 0
        try:
            handle = self._fs.open(self._directory.segment_path(number), flags=os.O_RDWR)
            try:
                for frame in frames:
                    # The tombstone's page stays: a rebuild steps over the hole by its length.
                    rest = frame.length_bytes - PAGE_BYTES
                    if not self._fs.punch(handle, frame.offset + PAGE_BYTES, length_bytes=rest):
                        self._health.note(
                            "punch", "no holes here: deleted bytes stay until their segment dies"
                        )
                        break
                after = self._fs.fstat(handle).allocated_bytes
            finally:
                self._fs.close(handle)
        except OSError as error:
            self._health.count("punch", error)
            return 0
        self._table.weigh(number, allocated_bytes=after)
        return max(0, allocated - after)

    def _remove(self, segments: Sequence[int], change: Change) -> _Finish:
        freed = 0
        for number in segments:
            self._release(number)
            freed += self._unlink_file(number)
        self._unsynced_names = True
        change.segments_gone += [number for number in segments if self._table.get(number) is None]
        is_left = any(self._table.get(number) is not None for number in segments)
        return lambda: _Done(freed, "a segment cannot be removed" if is_left else self._names_failure)

    def _remove_emptied(self, change: Change) -> None:
        """Remove segments that were sealed after their last frame had been deleted."""
        numbers = {growth.segment for growth in change.growths if growth.sealed}
        empty = [n for n in numbers if self._table.bury(n, frames=0)]
        if empty:
            self._remove(empty, change)

    def _unlink_file(self, number: int) -> int:
        if self._table.get(number) is None:
            return 0
        try:
            self._fs.unlink(self._directory.segment_path(number))
        except FileNotFoundError:
            log.warning("segment was gone already segment=%016x", number)
        except OSError as error:
            self._health.count("unlink", error)
            return 0
        return self._table.drop(number)

    def _sync_names(self) -> None:
        """Make the removals of a turn durable, all at once."""
        if not self._unsynced_names:
            return
        self._unsynced_names, self._names_failure = False, ""
        try:
            self._fs.fsync_directory(self._directory.segments)
        except OSError as error:
            self._health.count("unlink", error)
            self._names_failure = str(error)


def _refuse(future: Future[int]) -> None:
    future.set_exception(TierUnavailable("the ssd tier has ended: a restart may bring back what was deleted"))


def _newest(touches: Touches) -> float:
    return max(touch.touched_at for touch in touches)


class Grave(Enum):
    """What `entomb` found: a frame that is a tombstone NEW-ly, one of OLD, or NONE of both."""

    NEW = "new"
    OLD = "old"
    NONE = "none"


def entomb(
    fs: FileSystem, handle: int, page: memoryview, *, segment_id: bytes, offset: int, deleted_at: float
) -> Grave:
    """Replace the first sector of a frame's header by a tombstone; not synced yet.

    The rest of the page is written back as it was: whatever sectors a torn write leaves, they are either the
    old frame or a valid tombstone.
    Errors: OSError.
    """
    if read_up_to(fs, handle, [page], offset=offset) < PAGE_BYTES:
        return Grave.NONE
    try:
        prefix = decode_prefix(page)
    except FormatError:
        return Grave.NONE
    if prefix.segment_id != segment_id or prefix.magic == SEAL_MAGIC:
        return Grave.NONE
    if prefix.magic == TOMBSTONE_MAGIC:
        # Written again: the sync that was to make it durable may have failed.
        write_all(fs, handle, [page], offset=offset)
        return Grave.OLD
    page[:TOMBSTONE_BYTES] = encode_tombstone(prefix, deleted_at=deleted_at)
    write_all(fs, handle, [page], offset=offset)
    return Grave.NEW
