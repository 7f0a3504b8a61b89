"""The LMDB index: one row per frame, so that a start need not read the segments. A cache of what they say.

It lags behind the segments by about a second and may be lost at any time: a row per segment holds the
watermark up to which rows are complete, and whatever lies beyond is read from the segment itself. LMDB has
its own files, outside the file-system seam.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import lmdb
import xxhash

from kvstore.tiers.base import FrameLocation, SliceTouch
from kvstore.tiers.ssd.index_rows import (
    INDEX_VERSION,
    VERSIONS_READ,
    FrameRow,
    IndexUnusable,
    SegmentRow,
    Touches,
    pack_row,
    pack_segment,
    pack_touches,
    text_of,
    unpack_row,
    unpack_segment,
    unpack_touches,
)
from kvstore.tiers.ssd.index_tables import StoredTable, pack_table, unpack_table

log = logging.getLogger(__name__)

INDEX_BYTES_MAX = 64 << 30
"""Address space kept for the index; the file takes only what its rows need."""

_KEY = struct.Struct(">QQ")
_META = struct.Struct("<I16sQ")
_META_KEY = b"meta"
_WRITTEN_PREFIX = b"written:"
_WRITTEN_KEY = struct.Struct(">8sI32s")
_WRITTEN = struct.Struct("<Q")
_DELETIONS_KEY = b"deletions"
# Where LMDB keeps the number of its last page and its page size, in each of the two meta pages.
_LMDB_META = struct.Struct("<16x I I Q Q I 92x Q Q")
_LMDB_MAGIC = 0xBEEFC0DE
_LMDB_PAGE_BYTES = 4096


Seen = tuple[FrameRow | None, Touches]
"""What the index knows of a frame."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Rows of frames that became durable in [start, end) of a segment, in order.

    `start` must be the segment's watermark, else rows would be missing below the new one.
    """

    segment: int
    identity: bytes
    start: int
    end: int
    rows: tuple[FrameRow, ...]
    sealed: bool = False


@dataclass(slots=True)
class Change:
    """What one transaction does, in this order."""

    growths: list[Growth] = field(default_factory=list)
    touches: dict[tuple[int, int], Touches] = field(default_factory=dict)
    frames_gone: list[tuple[int, int]] = field(default_factory=list)
    segments_gone: list[int] = field(default_factory=list)
    tables: dict[int, bytes] = field(default_factory=dict)
    """Packed tables of sealed segments that have none; kept where they say what the rows say then."""
    deletions: int = 0
    """How many deletions there were with those of this change; 0: none in it."""
    written: dict[tuple[int, str], int] = field(default_factory=dict)
    """Bytes by day and class, as they are from now on."""

    def __bool__(self) -> bool:
        return any(
            (
                self.growths,
                self.touches,
                self.frames_gone,
                self.segments_gone,
                self.tables,
                self.deletions,
                self.written,
            )
        )


FORGOTTEN_PER_ROW = 4
"""Of a segment that went so many rows are deleted in the time that it takes to write one."""
INDEX_ERRORS = (lmdb.Error, SystemError)
"""What the binding raises; SystemError when damaged pages confuse it."""
_DAMAGE = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, IndexUnusable, SystemError)


def is_damage(error: Exception) -> bool:
    """Say whether an error means damaged pages, and not a full disk or map."""
    return isinstance(error, _DAMAGE)


def _go_on() -> None:
    """Nobody waits."""


class Index:
    """An open LMDB environment.

    `segments` are the segment rows that were there when it was opened.

    Threads: one thread writes (LMDB allows no second), any thread reads.
    Errors: INDEX_ERRORS from every verb, also for a full disk or a full map.
    """

    def __init__(self, path: Path, *, store: bytes, bytes_max: int, create: bool) -> None:
        """Open the index, or create an empty one.

        Errors: IndexUnusable when it has to be rebuilt.
        """
        if not create:
            _check_length(path / "data.mdb")
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._path, self._store = path, store
        self._on_row = _go_on
        self.segments: dict[int, SegmentRow] = {}
        try:
            self._env: Any = lmdb.open(str(path), map_size=bytes_max, max_dbs=5, mode=0o640, max_readers=16)
        except lmdb.Error as error:
            raise IndexUnusable(f"{path} cannot be opened: {error}") from error
        try:
            self._open_tables(create=create)
        except INDEX_ERRORS as error:
            self._env.close()
            raise IndexUnusable(f"{path} cannot be read: {error}") from error
        except IndexUnusable:
            self._env.close()
            raise

    @classmethod
    def rebuilt(cls, path: Path, *, store: bytes, bytes_max: int) -> Self:
        """Put what is there aside, in the place of what was put aside before, and create an empty index.

        Errors: IndexUnusable or OSError when it cannot be created.
        """
        if path.exists():
            aside = _aside(path)
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
        return cls(path, store=store, bytes_max=bytes_max, create=True)

    def forget_broken(self) -> None:
        """Remove what an earlier start put aside; this index is good."""
        shutil.rmtree(_aside(self._path), ignore_errors=True)

    def _open_tables(self, *, create: bool) -> None:
        names = (b"meta", b"segments", b"frames", b"touches")
        self._meta, self._segments, self._frames, self._touches = (self._env.open_db(name) for name in names)
        self._tables = self._open_or_none(b"tables")
        if create:
            with self._env.begin(write=True) as txn:
                txn.put(_META_KEY, _META.pack(INDEX_VERSION, self._store, 1), db=self._meta)
            return
        with self._env.begin() as txn:
            packed = txn.get(_META_KEY, db=self._meta)
            if packed is None or len(packed) != _META.size:
                raise IndexUnusable("the index says nothing of its store")
            version, store, _ = _META.unpack(packed)
            if version not in VERSIONS_READ or store != self._store:
                raise IndexUnusable(f"the index is of version {version} and store {store.hex()}")
            for key, value in txn.cursor(db=self._segments):
                row = unpack_segment(value)
                if row is not None:
                    self.segments[int.from_bytes(key, "big")] = row

    def _open_or_none(self, name: bytes) -> Any:
        """Open a table that older builds did not make, or make it; on a full disk the index does without."""
        try:
            return self._env.open_db(name)
        except INDEX_ERRORS as error:
            if is_damage(error):
                raise
            log.warning("the index has no table name=%s error=%s", name.decode(), error)
            return None

    def next_number(self) -> int:
        """Return the segment number that comes after all that were ever used, as far as the index knows."""
        with self._env.begin() as txn:
            return int(_META.unpack(txn.get(_META_KEY, db=self._meta))[2])

    def deletions(self) -> int:
        """Return up to which deletion the rows are told of."""
        with self._env.begin() as txn:
            return int.from_bytes(txn.get(_DELETIONS_KEY, db=self._meta) or b"", "little")

    def commit(
        self, change: Change, *, next_number: int, on_row: Callable[[], None] = _go_on
    ) -> list[Growth]:
        """Apply a change in one transaction; returns the growths that left a gap behind the watermark.

        `on_row` is called after each row, and after FORGOTTEN_PER_ROW of a segment that went.
        """
        skipped: list[Growth] = []
        self._on_row = on_row
        with self._env.begin(write=True) as txn:
            for growth in change.growths:
                if not self._grow(txn, growth):
                    skipped.append(growth)
            for (segment, offset), touches in change.touches.items():
                txn.put(_KEY.pack(segment, offset), pack_touches(offset, touches), db=self._touches)
                self._on_row()
            for segment, offset in change.frames_gone:
                self._drop(txn, segment, offset)
            for segment in {segment for segment, _ in change.frames_gone}:
                self._drop_table(txn, segment)
            for segment in change.segments_gone:
                self._forget(txn, segment)
            for segment, table in change.tables.items():
                self._put_table(txn, segment, table)
            if change.deletions:
                txn.put(_DELETIONS_KEY, change.deletions.to_bytes(8, "little"), db=self._meta)
            for (day, name), amount in change.written.items():
                value = _WRITTEN.pack(amount)
                key = _WRITTEN_KEY.pack(_WRITTEN_PREFIX, day, name.encode())
                txn.put(key, value + xxhash.xxh3_64_digest(value), db=self._meta)
            txn.put(_META_KEY, _META.pack(INDEX_VERSION, self._store, next_number), db=self._meta)
        return skipped

    def _grow(self, txn: Any, growth: Growth) -> bool:
        key = struct.pack(">Q", growth.segment)
        before = unpack_segment(txn.get(key, db=self._segments))
        if before is not None and before.identity != growth.identity:
            # A number used twice: only after the index forgot a segment whose file is gone.
            self._forget(txn, growth.segment)
            before = None
        if (before.watermark if before is not None else FIRST_OFFSET) != growth.start:
            return False
        for row in growth.rows:
            self._on_row()
            place = _KEY.pack(growth.segment, row.offset)
            txn.put(place, pack_row(row), db=self._frames)
            if row.touched_at:
                touches = (SliceTouch.whole(row.retention_class, row.touched_at),)
                # A start that reads a frame from its segment may know later touches of it already.
                txn.put(place, pack_touches(row.offset, touches), db=self._touches, overwrite=False)
        frames = len(growth.rows) + (before.frames if before is not None else 0)
        after = SegmentRow(growth.identity, growth.end, growth.sealed, frames)
        txn.put(key, pack_segment(after), db=self._segments)
        self._drop_table(txn, growth.segment)
        if growth.sealed:
            rows = growth.rows if before is None else self._read_back(txn, growth.segment)
            self._tabulate(txn, growth, rows)
        return True

    def _tabulate(self, txn: Any, growth: Growth, rows: Iterable[FrameRow]) -> None:
        """Put all rows of a sealed segment together."""
        try:
            table = pack_table(growth.segment, growth.identity, rows)
        except IndexUnusable as error:
            log.warning("segment gets no table segment=%016x error=%s", growth.segment, error)
        else:
            self._put_table(txn, growth.segment, table)

    def _read_back(self, txn: Any, segment: int) -> Iterator[FrameRow]:
        for offset, value in _range(txn, self._frames, segment):
            self._on_row()
            yield unpack_row(offset, value)

    def _put_table(self, txn: Any, segment: int, table: bytes) -> None:
        key = struct.pack(">Q", segment)
        row = unpack_segment(txn.get(key, db=self._segments))
        if self._tables is not None and unpack_table(segment, table, row=row) is not None:
            txn.put(key, table, db=self._tables)

    def _drop_table(self, txn: Any, segment: int) -> None:
        if self._tables is not None:
            txn.delete(struct.pack(">Q", segment), db=self._tables)

    def _drop(self, txn: Any, segment: int, offset: int) -> None:
        self._on_row()
        key = _KEY.pack(segment, offset)
        txn.delete(key, db=self._touches)
        if not txn.delete(key, db=self._frames):
            return
        prefix = struct.pack(">Q", segment)
        row = unpack_segment(txn.get(prefix, db=self._segments))
        if row is not None:
            txn.put(prefix, pack_segment(replace(row, frames=row.frames - 1)), db=self._segments)

    def _forget(self, txn: Any, segment: int) -> None:
        prefix = struct.pack(">Q", segment)
        txn.delete(prefix, db=self._segments)
        self._drop_table(txn, segment)
        for db in (self._frames, self._touches):
            cursor = txn.cursor(db=db)
            is_there = cursor.set_range(prefix)
            count = 0
            while is_there and cursor.key()[:8] == prefix:
                is_there = cursor.delete() and bool(cursor.key())  # goes on to the next
                count += 1
                if not count % FORGOTTEN_PER_ROW:
                    self._on_row()

    def rows(self, segment: int, *, count: int) -> list[FrameRow]:
        """Return the frame rows of a segment in write order.

        Errors: IndexUnusable when one is damaged or there are not as many as there must be.
        """
        with self._env.begin() as txn:
            rows = [unpack_row(offset, value) for offset, value in _range(txn, self._frames, segment)]
        if len(rows) != count:
            raise IndexUnusable(f"{len(rows)} frame rows of segment {segment:016x}, {count} expected")
        return rows

    def table(self, segment: int, row: SegmentRow) -> StoredTable | None:
        """Return all frames of a segment without their keys; None unless that says the same as its rows."""
        if self._tables is None:
            return None
        with self._env.begin() as txn:
            value = txn.get(struct.pack(">Q", segment), db=self._tables)
        return unpack_table(segment, value, row=row)

    def look(
        self,
        places: Sequence[FrameLocation],
        identities: Mapping[int, bytes],
        *,
        on_damage: Callable[[IndexUnusable], None],
    ) -> list[Seen]:
        """Return the rows and latest touches of frames, all of one moment, in the order asked.

        A row counts only when it is whole, and of the segment with this identity.
        """
        seen: list[Seen] = []
        with self._env.begin() as txn:
            known = {number: self._is_of(txn, number, identity) for number, identity in identities.items()}
            for place in places:
                key = _KEY.pack(place.segment, place.offset)
                value = txn.get(key, db=self._frames) if known.get(place.segment) else None
                touched = txn.get(key, db=self._touches)
                touches = unpack_touches(place.offset, touched) if touched is not None else ()
                try:
                    row = unpack_row(place.offset, value) if value is not None else None
                except IndexUnusable as error:
                    on_damage(error)
                    row = None
                seen.append((row, touches))
        return seen

    def _is_of(self, txn: Any, segment: int, identity: bytes) -> bool:
        row = unpack_segment(txn.get(struct.pack(">Q", segment), db=self._segments))
        return row is not None and row.identity == identity

    def has_row(self, segment: int, offset: int) -> bool:
        """Say whether a frame has a row."""
        with self._env.begin() as txn:
            return txn.get(_KEY.pack(segment, offset), db=self._frames) is not None

    def touches(self, segment: int) -> dict[int, Touches]:
        """Return the latest touches by frame offset."""
        found = {}
        with self._env.begin() as txn:
            for offset, value in _range(txn, self._touches, segment):
                touches = unpack_touches(offset, value)
                if touches:
                    found[offset] = touches
        return found

    def written(self) -> dict[tuple[int, str], int]:
        """Return the bytes written by day and class since the index was made."""
        found = {}
        with self._env.begin() as txn:
            cursor = txn.cursor(db=self._meta)
            for key, value in cursor if cursor.set_range(_WRITTEN_PREFIX) else ():
                body = value[:-8]
                if len(key) == _WRITTEN_KEY.size and value[-8:] == xxhash.xxh3_64_digest(body):
                    _, day, name = _WRITTEN_KEY.unpack(key)
                    found[(day, text_of(name))] = int(_WRITTEN.unpack(body)[0])
        return found

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".broken")


FIRST_OFFSET = 4096
"""Frames start behind the segment's header page."""


def _range(txn: Any, db: Any, segment: int) -> Iterator[tuple[int, bytes]]:
    prefix = struct.pack(">Q", segment)
    cursor = txn.cursor(db=db)
    if not cursor.set_range(prefix):
        return
    for key, value in cursor:
        if not key.startswith(prefix):
            return
        if len(key) != _KEY.size:
            raise IndexUnusable(f"a key of {len(key)} bytes")
        yield int.from_bytes(key[8:], "big"), value


def _check_length(path: Path) -> None:
    """Refuse a file shorter than its own meta pages say: reading its map would raise SIGBUS."""
    try:
        with path.open("rb") as file:
            pages = file.read(2 * _LMDB_PAGE_BYTES)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise IndexUnusable(f"{path} cannot be read: {error}") from error
    if len(pages) < 2 * _LMDB_PAGE_BYTES:
        raise IndexUnusable(f"{path} has {size} bytes")
    ends = []
    for start in (0, _LMDB_PAGE_BYTES):
        magic, _, _, _, page_bytes, last_page, txn = _LMDB_META.unpack_from(pages, start)
        if magic == _LMDB_MAGIC:
            ends.append((txn, (last_page + 1) * page_bytes))
    if not ends or size < max(ends)[1]:
        raise IndexUnusable(
            f"{path} has {size} bytes, its last page ends at {max(ends)[1] if ends else 'no known place'}"
        )
