"""The scrub: re-reads sealed segments in the background at a bounded rate and reports what has turned bad."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.events import Events
from kvstore.tiers.base import Loss
from kvstore.tiers.fs import FileSystem
from kvstore.tiers.ssd.crypto_keys import KeyRing
from kvstore.tiers.ssd.directory import SCRUB_NAME, DataDirectory, read_small, write_durable
from kvstore.tiers.ssd.health import Health
from kvstore.tiers.ssd.index import FIRST_OFFSET
from kvstore.tiers.ssd.scan import Found, Piece, Scanner
from kvstore.tiers.ssd.segments import SegmentState, SegmentTable
from kvstore.tiers.ssd.watch import WatchedFileSystem
from kvstore.tiers.ssd.writer import CORRUPT_METRIC

log = logging.getLogger(__name__)

SCRUBBED_METRIC = "kvstore_scrubbed_bytes_total"
IDLE_SECONDS = 60.0
"""How long it rests between two passes."""
BUSY_SECONDS = 0.05
_NICE_MAX = 19


class Losses:
    """What turned out bad and has not been told yet; each is counted and told once.

    Threads: thread-safe.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._untold: list[Loss] = []
        self._known: set[tuple[int, int]] = set()

    def add(self, loss: Loss) -> bool:
        """Take a loss; says whether it is news."""
        with self._lock:
            if (loss.segment, loss.offset) in self._known:
                return False
            self._known.add((loss.segment, loss.offset))
            self._untold.append(loss)
        if loss.length_bytes:
            self._events.add(CORRUPT_METRIC, tier="ssd")
        return True

    def take(self) -> list[Loss]:
        """Return what is untold."""
        with self._lock:
            untold, self._untold = self._untold, []
            return untold


class _PacedFileSystem(WatchedFileSystem):
    """Tells how much was read, before the next read may be made."""

    def __init__(self, fs: FileSystem, health: Health, came: Callable[[int], None]) -> None:
        super().__init__(fs, health)
        self._came = came

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read, then wait as long as it should have taken."""
        size = super().preadv(handle, buffers, offset)
        self._came(size)
        return size


class _Stopped(Exception):
    """The tier is being closed."""


class Scrubber:
    """Goes round and round over the sealed segments; where it is survives a restart, to the segment.

    Threads: `run` is the scrub's thread; `progress` and `close` may be called from any.
    """

    def __init__(
        self,
        *,
        fs: FileSystem,
        directory: DataDirectory,
        table: SegmentTable,
        events: Events,
        health: Health,
        losses: Losses,
        bytes_per_second: int,
        is_busy: Callable[[], bool],
        keys: KeyRing | None = None,
    ) -> None:
        self._fs = _PacedFileSystem(fs, health, self._pace)
        self._directory, self._table, self._events, self._health = directory, table, events, health
        self._losses, self._bytes_per_second, self._is_busy = losses, bytes_per_second, is_busy
        self._scanner = Scanner(self._fs, keys)
        self._stop = threading.Event()
        self._next = 0
        self._passes = 0
        self._bad = 0

    def run(self) -> None:
        """Scrub until closed."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE_MAX)
        self._resume()
        with suppress(_Stopped):
            while not self._stop.is_set():
                self.scrub_pass()
                self._stop.wait(IDLE_SECONDS)

    def scrub_pass(self) -> int:
        """Check every sealed segment from where the last pass stopped; returns how many were checked."""
        numbers = [info.segment for info in self._table.infos() if info.sealed and info.segment >= self._next]
        for number in numbers:
            if self._next:
                self._remember()
            self._segment(number)
            self._next = number + 1
        if self._next:
            self._passes += 1
            self._next = 0
            self._remember()
        return len(numbers)

    def _segment(self, number: int) -> None:
        state = self._table.get(number)
        if state is None or state.quarantined:
            return
        try:
            handle = self._fs.open(
                self._directory.segment_path(number), flags=os.O_RDONLY | self._table.direct_flag
            )
        except OSError as error:
            self._failed(number, error)
            return
        try:
            self._pieces(handle, state)
        except OSError as error:
            self._failed(number, error)
        finally:
            self._fs.close(handle)

    def _failed(self, number: int, error: OSError) -> None:
        """An error of the disk; too many of them and nothing more is read from the segment."""
        if self._table.get(number) is not None and self._health.read_failed(number, error):
            self._table.quarantine(number)
            self._losses.add(Loss(number))

    def _pieces(self, handle: int, state: SegmentState) -> None:
        identity, number = state.header.identity, state.header.number
        pieces = self._scanner.pieces(handle, segment_id=identity, start=FIRST_OFFSET, size_bytes=state.end)
        for piece in pieces:
            if piece.found is Found.DAMAGE:
                self._lost(handle, state, piece, block=0, reason=piece.detail)
            if piece.found is not Found.FRAME or piece.frame is None:
                continue
            faults = self._scanner.faults(handle, piece.frame, offset=piece.offset)
            fault = next((fault for fault in faults if not fault.is_unreadable), None)
            if fault is not None:
                reason = f"part {fault.part} block {fault.block}: {fault.reason}"
                self._lost(handle, state, piece, block=fault.block, reason=reason)
            if self._table.get(number) is None:
                return

    def _lost(self, handle: int, state: SegmentState, piece: Piece, *, block: int, reason: str) -> None:
        """Report a piece, unless it was deleted while it was being read."""
        number = state.header.number
        again = next(
            self._scanner.pieces(
                handle, segment_id=state.header.identity, start=piece.offset, size_bytes=state.end
            )
        )
        if again.found is Found.TOMBSTONE or self._table.get(number) is None:
            return
        if self._losses.add(Loss(number, piece.offset, piece.length_bytes, block)):
            self._bad += 1
            log.error("scrub found damage segment=%016x offset=%d reason=%s", number, piece.offset, reason)

    def _pace(self, size: int) -> None:
        self._events.add(SCRUBBED_METRIC, size)
        if self._bytes_per_second and self._stop.wait(size / self._bytes_per_second):
            raise _Stopped
        while self._is_busy():
            if self._stop.wait(BUSY_SECONDS):
                raise _Stopped

    def progress(self) -> str:
        """Return in words how far the scrub is."""
        if not self._bytes_per_second:
            return "off"
        return f"pass {self._passes + 1}, next segment {self._next:016x}, {self._bad} bad"

    def _resume(self) -> None:
        with suppress(FileNotFoundError):
            try:
                document = json.loads(read_small(self._fs, self._directory.root / SCRUB_NAME))
                self._next, self._passes = int(document["next"]), int(document["passes"])
            except (ValueError, KeyError, TypeError) as error:
                log.debug("scrub starts at the first segment error=%s", error)
            except FileNotFoundError:
                raise
            except OSError as error:
                self._health.count("scrub", error)

    def _remember(self) -> None:
        document = {"next": self._next, "passes": self._passes}
        try:
            write_durable(
                self._fs, self._directory.root / SCRUB_NAME, content=json.dumps(document).encode() + b"\n"
            )
        except OSError as error:
            self._health.count("scrub", error)

    def close(self) -> None:
        """Let the thread end at its next read."""
        self._stop.set()
