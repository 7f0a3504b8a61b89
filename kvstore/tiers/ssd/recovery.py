"""The start: finds every durable frame. Index rows first, then whatever the segments hold beyond the rows.

Frames beyond the rows count only when they are in a sealed segment (all of it was synced) or verify in full.
A torn tail is cut off. No segment is appended to again: what is found unsealed is sealed here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from kvstore.clock import Clock
from kvstore.layout import Part
from kvstore.namespace import Namespace
from kvstore.tiers.base import (
    FrameHeader,
    FrameLocation,
    FrameTable,
    RecoveredFrame,
    RecoveryReport,
    UnreadFrame,
)
from kvstore.tiers.fs import FileSystem, aligned_buffer, write_all
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyState, find_key
from kvstore.tiers.ssd.directory import (
    SEGMENTS_NAME,
    DataDirectory,
    read_deletions,
    read_namespaces,
    segment_number,
    unknown_names,
    write_deletions,
)
from kvstore.tiers.ssd.format import (
    FormatError,
    SegmentHeader,
    StoredPart,
    encode_seal,
)
from kvstore.tiers.ssd.health import Health
from kvstore.tiers.ssd.index import INDEX_ERRORS, Change, Growth, Index, is_damage
from kvstore.tiers.ssd.index_rows import FrameRow, IndexUnusable, SegmentRow, Touches
from kvstore.tiers.ssd.index_tables import StoredTable, pack_table
from kvstore.tiers.ssd.keeper import entomb
from kvstore.tiers.ssd.opening import end_reading, open_index
from kvstore.tiers.ssd.recovery_ahead import Opened, SegmentOpener
from kvstore.tiers.ssd.recovery_rows import cut_touches, resolve_parts, row_of
from kvstore.tiers.ssd.recovery_tables import TableResolver
from kvstore.tiers.ssd.recovery_tally import Tally
from kvstore.tiers.ssd.scan import Found, Piece, Scanner
from kvstore.tiers.ssd.segments import SegmentState, SegmentTable
from kvstore.types import HASH_BYTES, PAGE_BYTES, Fingerprint

log = logging.getLogger(__name__)

ROWS_PER_COMMIT = 4096
TABLES_PER_COMMIT = 256
_PartsKey = tuple[int, ...] | tuple[StoredPart, ...]


class Recovery:
    """One pass over a data directory.

    `index` is open once the pass has begun; `unsaved` are rows that it could not take; `shredded` are frames
    whose key is gone for good, to be deleted.

    Threads: one.
    """

    def __init__(
        self, *, fs: FileSystem, directory: DataDirectory, table: SegmentTable, store: bytes, clock: Clock,
        health: Health, index_bytes_max: int, namespaces: dict[Fingerprint, Namespace],
        keys: KeyRing | None = None,
    ) -> None:  # fmt: skip
        self.index: Index | None = None
        self.unsaved: list[Growth] = []
        self.shredded: list[FrameLocation] = []
        self._fs, self._directory, self._table, self._store = fs, directory, table, store
        self._clock, self._health, self._index_bytes_max = clock, health, index_bytes_max
        self._namespaces = namespaces
        self._keys = keys
        self._tables = TableResolver(namespaces, keys)
        self._scanner = Scanner(fs, keys)
        self._page = aligned_buffer(PAGE_BYTES)
        self._tally = Tally()
        self._change = Change()
        self._same: dict[Any, Any] = {}
        self._known_parts: dict[tuple[Fingerprint, _PartsKey], tuple[Part, ...] | None] = {}
        self._index_is_damaged = self._must_check_rows = False
        self._seconds = 0.0

    def frames(self) -> Iterator[RecoveredFrame | FrameTable]:
        """Yield every durable frame once, in write order within a segment: alone, or all in a table.

        Errors: OSError when the directory cannot be listed, TierUnavailable when no index can be created.
        """
        started = self._clock.monotonic()
        # A name that is found may still hang in the air: its maker failed, or fell, before it was synced.
        for folder in (self._directory.namespaces, self._directory.segments):
            self._fs.fsync_directory(folder)
        self._tally.unknown += unknown_names(self._fs, self._directory)
        for name, namespace in read_namespaces(self._fs, self._directory):
            if namespace is None:
                self._tally.unknown.append(f"namespaces/{name}")
            else:
                self._namespaces[namespace.fingerprint] = namespace
        self.index, self._tally.rebuilt = open_index(
            self._fs, self._directory, store=self._store, bytes_max=self._index_bytes_max
        )
        self._settle_deletions()
        rows = dict(self.index.segments)
        self._table.skip_numbers(below=self.index.next_number())
        names = self._fs.listdir(self._directory.segments)
        numbers = sorted(number for number in map(segment_number, names) if number is not None)
        opener = SegmentOpener(self._fs, self._directory, direct_flag=self._table.direct_flag)
        for opened in opener.each(numbers):
            try:
                yield from self._segment(opened, rows.pop(opened.number, None))
            finally:
                opener.close(opened)
            new = sum(len(growth.rows) for growth in self._change.growths)
            if new >= ROWS_PER_COMMIT or len(self._change.tables) >= TABLES_PER_COMMIT:
                self._commit()
        # What is left are rows of segments whose file is gone.
        self._change.segments_gone += list(rows)
        self._commit()
        try:
            end_reading(self._fs, self._directory, is_damaged=self._index_is_damaged)
        except OSError as error:
            self._health.count("index", error)
        self._seconds = self._clock.monotonic() - started
        log.debug("recovered %s", self.report())

    def _settle_deletions(self) -> None:
        """See whether the index was told of every deletion; if not, each row is checked against its frame."""
        assert self.index is not None
        known, happened = self.index.deletions(), read_deletions(self._fs, self._directory)
        if known == happened:
            return
        self._must_check_rows = True
        log.warning("index lacks deletions, its rows are checked known=%d happened=%s", known, happened)
        count = max(known, happened or 0)
        try:
            write_deletions(self._fs, self._directory, count=count)
        except OSError as error:
            self._health.count("delete", error)
        else:
            self._change.deletions = count

    def report(self) -> RecoveryReport:
        """Return what was found."""
        return self._tally.report(self._namespaces.values(), seconds=self._seconds)

    def _commit(self) -> None:
        assert self.index is not None
        change, self._change = self._change, Change()
        tables, change.tables = change.tables, {}
        if change:
            self._apply(change)
        if tables:
            # On their own: for want of room for them nothing else may be lost.
            self._apply(Change(tables=tables))

    def _apply(self, change: Change) -> None:
        assert self.index is not None
        try:
            self.index.commit(change, next_number=self._table.next_number)
        except INDEX_ERRORS as error:
            self._index_is_damaged |= is_damage(error)
            self._health.count("index", error)
            self._health.note("index", f"the index lags: {error}")
            if sum(len(growth.rows) for growth in self.unsaved) <= ROWS_PER_COMMIT:
                self.unsaved += change.growths

    def _segment(self, opened: Opened, row: SegmentRow | None) -> Iterator[RecoveredFrame | FrameTable]:
        number, found = opened.number, opened.found
        if found is None:
            assert isinstance(opened.fault, OSError)
            self._health.count("recover", opened.fault)
            self._foreign(number, str(opened.fault), 0)
            return
        try:
            header = self._own_header(opened)
        except FormatError as error:
            self._refuse(number, error, found.size_bytes, found.allocated_bytes)
            return
        self._tally.segments += 1
        state = SegmentState(header, PAGE_BYTES, sealed=True, allocated_bytes=found.allocated_bytes)
        self._table.add(state)
        yield from self._frames_of(opened.handle, state, row, found.size_bytes)

    def _own_header(self, opened: Opened) -> SegmentHeader:
        header, number = opened.header, opened.number
        if header is None:
            assert opened.fault is not None
            raise opened.fault
        if header.store != self._store or header.number != number:
            raise FormatError(f"segment {header.number:016x} of store {header.store.hex()}", version=-1)
        return header

    def _refuse(self, number: int, error: FormatError, size_bytes: int, allocated_bytes: int) -> None:
        """Leave a file alone that is not ours to read; remove one whose creation was cut short."""
        if size_bytes > PAGE_BYTES or error.version:
            self._foreign(number, str(error), allocated_bytes)
            return
        # The header is synced before the first frame is written, so this file never held one.
        try:
            self._fs.unlink(self._directory.segment_path(number))
            self._tally.bytes_dropped += size_bytes
        except OSError as failure:
            self._health.count("unlink", failure)
            self._foreign(number, str(error), allocated_bytes)

    def _foreign(self, number: int, reason: str, allocated_bytes: int) -> None:
        name = f"{SEGMENTS_NAME}/{self._directory.segment_path(number).name}"
        log.warning("segment left alone name=%s reason=%s", name, reason)
        self._tally.unknown.append(name)
        self._table.add_foreign(name, allocated_bytes=allocated_bytes)
        self._table.skip_numbers(below=number + 1)

    def _frames_of(
        self, handle: int, state: SegmentState, row: SegmentRow | None, size_bytes: int
    ) -> Iterator[RecoveredFrame | FrameTable]:
        assert self.index is not None
        number, identity = state.header.number, state.header.identity
        touches: dict[int, Touches] = {}
        if row is not None and row.identity == identity:
            is_whole = row.sealed and size_bytes == row.watermark + PAGE_BYTES
            frame_rows: list[FrameRow] = []
            try:
                touches = self.index.touches(number)
                stored = self._stored_table(number, row) if is_whole else None
                table = self._tables.resolve(number, stored, touches) if stored else None
                if table is None:
                    frame_rows = self._rows_of(handle, state, row, size_bytes)
                if is_whole and frame_rows and stored is None:
                    self._change.tables[number] = pack_table(number, identity, frame_rows)
            except (IndexUnusable, *INDEX_ERRORS) as error:
                self._index_is_damaged |= is_damage(error)
                log.warning("segment is scanned, its rows are no use segment=%016x error=%s", number, error)
                self._start_over(number, touches)
            else:
                state.end = row.watermark
                if table is not None:
                    state.frames = len(table.rows)
                    self._tally.keep_table(table)
                    yield table
                for frame_row in frame_rows:
                    yield from self._keep(state, frame_row, touches)
                if is_whole:
                    self._drop_if_empty(state)
                    return
        yield from self._replay(handle, state, size_bytes, touches)

    def _stored_table(self, number: int, row: SegmentRow) -> StoredTable | None:
        assert self.index is not None
        if self._must_check_rows or not row.frames:
            return None
        try:
            return self.index.table(number, row)
        except INDEX_ERRORS as error:
            self._index_is_damaged |= is_damage(error)
            return None

    def _rows_of(self, handle: int, state: SegmentState, row: SegmentRow, size_bytes: int) -> list[FrameRow]:
        assert self.index is not None
        if row.watermark > size_bytes:
            raise IndexUnusable(f"they reach to {row.watermark} and the file to {size_bytes}")
        rows = self.index.rows(state.header.number, count=row.frames)
        if not self._must_check_rows:
            return rows
        gone = {r.offset for r in rows if self._scanner.is_deleted(handle, offset=r.offset)}
        self._change.frames_gone += [(state.header.number, offset) for offset in gone]
        return [r for r in rows if r.offset not in gone]

    def _start_over(self, number: int, touches: dict[int, Touches]) -> None:
        """Drop the rows of a segment, so that its scan can write them anew; the touches are kept."""
        self._change.segments_gone.append(number)
        self._commit()
        self._change.touches.update({(number, offset): touch for offset, touch in touches.items()})

    def _replay(
        self, handle: int, state: SegmentState, size_bytes: int, touches: dict[int, Touches]
    ) -> Iterator[RecoveredFrame]:
        """Read frames beyond the rows from the segment itself."""
        number, identity = state.header.number, state.header.identity
        sealed = self._scanner.is_sealed(handle, segment_id=identity, size_bytes=size_bytes)
        start, end = state.end, state.end
        rows: list[FrameRow] = []
        lost: list[Piece] = []
        # Rows end before the first unknown frame: a build that knows more shall still find it.
        unknown_at = 0
        for piece in self._scanner.pieces(handle, segment_id=identity, start=start, size_bytes=size_bytes):
            behind = piece.offset + piece.length_bytes
            if piece.found is Found.FRAME and piece.frame is not None:
                if not sealed and not self._scanner.is_intact(handle, piece.frame, offset=piece.offset):
                    lost.append(piece)
                    continue
                row = row_of(piece.frame, piece.offset)
                if not unknown_at:
                    rows.append(row)
                yield from self._keep(state, row, touches, stored=piece.frame.parts)
                end = behind
            elif piece.found is Found.TOMBSTONE:
                end = behind
            elif piece.found is Found.UNKNOWN:
                unknown_at, end = unknown_at or piece.offset, behind
                self._unknown_in(number, piece.detail)
            elif piece.found is Found.DAMAGE:
                lost.append(piece)
        state.end = end
        self._count_lost(number, lost, size_bytes if sealed else end)
        if not sealed and not unknown_at:
            sealed = self._mend(state, lost, size_bytes)
        growth = Growth(
            number, identity, start, unknown_at or end, tuple(rows), sealed=sealed and not unknown_at
        )
        self._change.growths.append(growth)
        if not unknown_at and not any(piece.offset < end for piece in lost):
            self._drop_if_empty(state)

    def _count_lost(self, number: int, lost: list[Piece], end: int) -> None:
        """Count what is lost; what was promised, and not just a torn tail, ends before `end`."""
        for piece in lost:
            self._tally.frames_dropped += piece.frame is not None or piece.offset < end
            self._tally.bytes_dropped += piece.length_bytes
            log.warning(
                "dropped segment=%016x offset=%d bytes=%d reason=%s",
                number,
                piece.offset,
                piece.length_bytes,
                piece.detail or "a record is not intact",
            )

    def _mend(self, state: SegmentState, lost: list[Piece], size_bytes: int) -> bool:
        """Cut the torn tail off, bury torn frames in the middle, and seal; says whether that is durable."""
        header = state.header
        try:
            handle = self._fs.open(
                self._directory.segment_path(header.number), flags=os.O_RDWR | self._table.direct_flag
            )
            try:
                for piece in lost:
                    if piece.frame is not None and piece.offset < state.end:
                        entomb(self._fs, handle, self._page, segment_id=header.identity, offset=piece.offset,
                               deleted_at=self._clock.wall())  # fmt: skip
                if size_bytes > state.end:
                    self._fs.truncate(handle, state.end)
                page = encode_seal(
                    segment_id=header.identity,
                    frames=state.frames,
                    end=state.end,
                    sealed_at=self._clock.wall(),
                )
                self._page[:] = page
                write_all(self._fs, handle, [self._page], offset=state.end)
                self._fs.fdatasync(handle)
                self._table.weigh(header.number, allocated_bytes=self._fs.fstat(handle).allocated_bytes)
            finally:
                self._fs.close(handle)
        except OSError as error:
            self._health.count("mend", error)
            return False
        return True

    def _drop_if_empty(self, state: SegmentState) -> None:
        number = state.header.number
        if state.frames:
            return
        try:
            self._fs.unlink(self._directory.segment_path(number))
        except OSError as error:
            self._health.count("unlink", error)
            return
        self._table.drop(number)
        self._change.segments_gone.append(number)

    def _keep(
        self, state: SegmentState, row: FrameRow, touches: dict[int, Touches],
        stored: tuple[StoredPart, ...] = (),
    ) -> Iterator[RecoveredFrame]:  # fmt: skip
        """Count a living frame, and yield it unless its namespace, layout or key is not known here."""
        state.frames += 1
        same = self._same.setdefault  # one object for what very many frames have in common
        size, length = same(row.header_bytes, row.header_bytes), same(row.length_bytes, row.length_bytes)
        location = FrameLocation(state.header.number, row.offset, size, length)
        if row.key_id and not self._has_key(location, row):
            return
        parts = self._parts(row, stored)
        if parts is None:
            self._unknown_in(
                state.header.number, f"namespace {row.namespace.hex()} or its layout is not known"
            )
            self._leave_alone(location, row)
            return
        header = FrameHeader(
            same(row.namespace, row.namespace),
            row.kind,
            row.parent,
            row.keys,
            parts,
            same(row.retention_class, row.retention_class),
            row.written_at,
            row.provenance,
            row.touched_at,
        )
        blocks = len(row.keys) // HASH_BYTES
        self._tally.keep(blocks=blocks, length_bytes=row.length_bytes)
        yield RecoveredFrame(header, location, cut_touches(touches.get(row.offset, ()), blocks=blocks))

    def _leave_alone(self, location: FrameLocation, row: FrameRow) -> None:
        self._tally.unread.append(
            UnreadFrame(location, row.namespace, row.parent, row.keys, row.retention_class)
        )

    def _has_key(self, location: FrameLocation, row: FrameRow) -> bool:
        """Say whether a frame can be decrypted; one whose key may come back is left alone."""
        found = find_key(self._keys, row.key_id, row.key_check)
        if not isinstance(found, KeyState):
            return True
        if found is KeyState.SHREDDED:
            self.shredded.append(location)
            self._tally.frames_dropped += 1
            self._tally.bytes_dropped += row.length_bytes
        else:
            what = f"frames encrypted with key {row.key_id}, which is {found.value}"
            self._unknown_in(location.segment, what)
            self._leave_alone(location, row)
        return False

    def _parts(self, row: FrameRow, stored: tuple[StoredPart, ...]) -> tuple[Part, ...] | None:
        key = (row.namespace, stored or row.parts)
        if key not in self._known_parts:
            self._known_parts[key] = resolve_parts(self._namespaces.get(row.namespace), row.parts, stored)
        return self._known_parts[key]

    def _unknown_in(self, number: int, what: str) -> None:
        line = f"{SEGMENTS_NAME}/{self._directory.segment_path(number).name}: {what}"
        if line not in self._tally.unknown:
            self._tally.unknown.append(line)
