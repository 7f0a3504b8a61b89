"""Tables of sealed segments: when a start takes them, when the rows count instead, and who writes them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.testing.frames import BuiltFrame
from kvstore.testing.tier_suite import TOUCHES, found_frames, frames_of_table, registered, written
from kvstore.tiers.base import FrameLocation, FrameTable, SliceTouch, TouchNote
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyTable, tenant_key
from kvstore.tiers.ssd.index import Change, Growth, Index
from kvstore.tiers.ssd.index_rows import SegmentRow
from kvstore.tiers.ssd.index_tables import pack_table, unpack_table
from tests.support.memory import DictTier, Disk
from tests.support.ssd import open_ssd, recovered_ssd
from tests.unit.tiers.test_ssd_index_pace import row

WAIT_SECONDS = 30.0


def stored(
    directory: Path, *sizes: int, touched: bool = False, **options: object
) -> tuple[list[BuiltFrame], list[FrameLocation]]:
    """Write frames and close, which seals their segment."""
    tier = recovered_ssd(directory, **options)
    builder = registered(tier)
    frames = [builder.frame(n) for n in sizes]
    places = written(tier, frames)
    if touched:
        tier.annotate([TouchNote(places[0], TOUCHES), TouchNote(places[1], (SliceTouch.whole("chat", 9.0),))])
    tier.close(deadline_seconds=WAIT_SECONDS)
    return frames, places


def start(directory: Path, **options: object) -> tuple[list[FrameTable], list[FrameLocation]]:
    """Start and close; returns the tables, and the places of the frames that came alone."""
    tier = open_ssd(directory, **options)  # type: ignore[arg-type]
    items = list(tier.recover())
    tier.close(deadline_seconds=WAIT_SECONDS)
    tables = [item for item in items if isinstance(item, FrameTable)]
    return tables, [item.location for item in items if not isinstance(item, FrameTable)]


def tables_of(directory: Path) -> dict[int, bytes]:
    with lmdb.open(str(directory / "index"), max_dbs=5) as env:
        db = env.open_db(b"tables")
        with env.begin() as txn:
            return {int.from_bytes(key, "big"): value for key, value in txn.cursor(db=db)}


def put_table(directory: Path, number: int, value: bytes | None) -> None:
    with lmdb.open(str(directory / "index"), max_dbs=5) as env:
        db = env.open_db(b"tables")
        with env.begin(write=True) as txn:
            key = number.to_bytes(8, "big")
            if value is None:
                assert txn.delete(key, db=db)
            else:
                txn.put(key, value, db=db)


def as_an_older_build(tier: SsdTier) -> None:
    """An index without the table knows nothing of it."""
    assert tier._running is not None
    tier._running.index._tables = None


def test_a_sealed_segment_comes_in_one_table_without_keys(tmp_path: Path) -> None:
    frames, places = stored(tmp_path, 3, 1, 7, touched=True)
    tier = open_ssd(tmp_path)
    (table,) = tier.recover()
    assert isinstance(table, FrameTable)
    assert table.rows["offset"].tolist() == [place.offset for place in places]
    assert table.rows["count"].tolist() == [3, 1, 7]
    assert table.touches == {0: TOUCHES, 1: (SliceTouch(0, 1, "chat", 9.0),)}
    assert len(table.shapes) == 1
    report = tier.report()
    assert (report.frames, report.blocks) == (3, 11)
    assert report.bytes_kept == sum(place.length_bytes for place in places)
    assert tier.segments()[0].frames == 3
    told = frames_of_table(tier, table)
    assert [frame.header for frame in told] == [built.write.header for built in frames]
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_a_table_says_what_the_rows_say(tmp_path: Path) -> None:
    stored(tmp_path, 3, 1, 7, touched=True)
    put_table(tmp_path, 1, None)
    by_rows = open_ssd(tmp_path)
    rows = list(by_rows.recover())
    assert not any(isinstance(item, FrameTable) for item in rows)
    by_rows.close(deadline_seconds=WAIT_SECONDS)
    tier = open_ssd(tmp_path)
    assert found_frames(tier) == rows
    assert tier.report().bytes_kept == by_rows.report().bytes_kept
    tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize("at", [0, 10, 24, 40, -60, -1])
def test_a_damaged_table_is_ignored_and_written_again(tmp_path: Path, at: int) -> None:
    _, places = stored(tmp_path, 3, 1)
    good = tables_of(tmp_path)[1]
    bad = bytearray(good)
    bad[at] ^= 0x10
    put_table(tmp_path, 1, bytes(bad))
    assert start(tmp_path) == ([], places)
    assert not (tmp_path / "index.stale").exists()
    assert tables_of(tmp_path) == {1: good}
    assert len(start(tmp_path)[0]) == 1


@pytest.mark.parametrize("value", [b"", b"x", bytes(40)])
def test_a_table_that_is_none_is_ignored(tmp_path: Path, value: bytes) -> None:
    _, places = stored(tmp_path, 3, 1)
    put_table(tmp_path, 1, value)
    assert start(tmp_path) == ([], places)


def test_the_table_of_another_segment_is_ignored(tmp_path: Path) -> None:
    stored(tmp_path, 3, 1)
    _, places = stored(tmp_path, 2, 5)
    put_table(tmp_path, 2, tables_of(tmp_path)[1])
    tables, alone = start(tmp_path)
    assert [table.segment for table in tables] == [1]
    assert alone == places


@pytest.mark.parametrize("is_older", [False, True], ids=["this build", "an older build"])
def test_a_deletion_ends_the_table_and_the_next_start_writes_another(tmp_path: Path, is_older: bool) -> None:
    _, places = stored(tmp_path, 3, 1, 2)
    tier = recovered_ssd(tmp_path)
    if is_older:
        as_an_older_build(tier)
    tier.delete(places[:1]).result(WAIT_SECONDS)
    tier.close(deadline_seconds=WAIT_SECONDS)
    assert bool(tables_of(tmp_path)) is is_older
    assert start(tmp_path) == ([], places[1:])
    ((table,), alone) = start(tmp_path)
    assert alone == []
    assert table.rows["offset"].tolist() == [place.offset for place in places[1:]]


def test_an_index_without_tables_gets_them_at_the_first_start(tmp_path: Path) -> None:
    for _ in range(3):
        stored(tmp_path, 2, 1)
    with lmdb.open(str(tmp_path / "index"), max_dbs=5) as env:
        db = env.open_db(b"tables")
        with env.begin(write=True) as txn:
            txn.drop(db, delete=True)
    tables, alone = start(tmp_path)
    assert (len(tables), len(alone)) == (0, 6)
    tables, alone = start(tmp_path)
    assert ([table.segment for table in tables], alone) == ([1, 2, 3], [])


def test_an_older_build_opens_an_index_with_tables(tmp_path: Path) -> None:
    stored(tmp_path, 2, 1)
    with lmdb.open(str(tmp_path / "index"), max_dbs=4) as env:
        names = (b"meta", b"segments", b"frames", b"touches")
        assert len([env.open_db(name) for name in names]) == 4


def test_a_start_that_must_check_the_rows_takes_no_table(tmp_path: Path) -> None:
    _, places = stored(tmp_path, 3, 1)
    (tmp_path / "deletions").write_bytes(struct.pack("<QQ", 7, 0))
    tier = recovered_ssd(tmp_path)
    tier.delete(places[:1]).result(WAIT_SECONDS)
    tier.close(deadline_seconds=WAIT_SECONDS)
    (tmp_path / "deletions").unlink()
    assert start(tmp_path) == ([], places[1:])
    assert len(start(tmp_path)[0]) == 1


def test_a_segment_that_grew_behind_its_seal_is_read_by_rows(tmp_path: Path) -> None:
    _, places = stored(tmp_path, 3, 1)
    path = tmp_path / "segments" / f"{1:016x}.seg"
    with path.open("ab") as file:
        file.write(bytes(8192))
    assert start(tmp_path) == ([], places)


def test_frames_of_a_key_that_is_not_at_hand_are_left_alone_by_rows(tmp_path: Path) -> None:
    keys = KeyRing(lambda: KeyTable({"": (tenant_key(1, b"\x11" * 32),)}))
    _, places = stored(tmp_path, 3, 1, keys=keys)
    before = tables_of(tmp_path)
    assert len(start(tmp_path, keys=keys)[0]) == 1
    blind = open_ssd(tmp_path)
    assert list(blind.recover()) == []
    assert [frame.location for frame in blind.report().unread] == places
    blind.close(deadline_seconds=WAIT_SECONDS)
    assert tables_of(tmp_path) == before
    assert len(start(tmp_path, keys=keys)[0]) == 1


def test_a_removed_segment_leaves_no_table(tmp_path: Path) -> None:
    stored(tmp_path, 3, 1)
    tier = recovered_ssd(tmp_path)
    tier.unlink([1]).result(WAIT_SECONDS)
    tier.close(deadline_seconds=WAIT_SECONDS)
    assert tables_of(tmp_path) == {}


def test_only_the_commit_of_a_seal_makes_a_table(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", store=bytes(16), bytes_max=1 << 26, create=True)
    rows = tuple(row(4096 + 8192 * place) for place in range(3))
    index.commit(Change([Growth(1, bytes(16), 4096, 20480, rows[:2])]), next_number=2)
    index.commit(Change([Growth(1, bytes(16), 20480, 28672, rows[2:])]), next_number=2)
    index.close()
    assert tables_of(tmp_path) == {}
    index = Index(tmp_path / "index", store=bytes(16), bytes_max=1 << 26, create=False)
    index.commit(Change([Growth(1, bytes(16), 28672, 28672, (), sealed=True)]), next_number=2)
    index.close()
    assert tables_of(tmp_path) == {1: pack_table(1, bytes(16), rows)}


def test_rows_that_come_after_the_seal_end_the_table(tmp_path: Path) -> None:
    """A file may be longer than the seal said; a start reads on from there."""
    index = Index(tmp_path / "index", store=bytes(16), bytes_max=1 << 26, create=True)
    rows = tuple(row(4096 + 8192 * place) for place in range(3))
    index.commit(Change([Growth(1, bytes(16), 4096, 20480, rows[:2], sealed=True)]), next_number=2)
    index.commit(Change([Growth(1, bytes(16), 20480, 28672, rows[2:])]), next_number=2)
    index.close()
    assert tables_of(tmp_path) == {}


def test_a_table_handed_in_counts_only_for_the_rows_there_are(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", store=bytes(16), bytes_max=1 << 26, create=True)
    rows = tuple(row(4096 + 8192 * place) for place in range(3))
    index.commit(Change([Growth(1, bytes(16), 4096, 28672, rows, sealed=True)]), next_number=2)
    packed = {1: pack_table(1, bytes(16), rows), 2: pack_table(2, bytes(16), rows)}
    index.commit(Change(frames_gone=[(1, 4096)], tables=packed), next_number=2)
    index.close()
    assert tables_of(tmp_path) == {}


def test_shapes_are_told_apart() -> None:
    rows = [row(4096), row(12288)._replace(retention_class="chat"), row(20480)._replace(provenance=640)]
    rows += [row(28672)._replace(key_id=3, key_check=9), row(36864)._replace(parts=(0, 2)), row(45056)]
    value = pack_table(5, bytes(16), rows)
    assert unpack_table(5, value, row=None) is None
    found = unpack_table(5, value, row=SegmentRow(bytes(16), 53248, True, len(rows)))
    assert found is not None
    assert found.rows["shape"].tolist() == [0, 1, 2, 3, 4, 0]
    assert [shape.retention_class for shape in found.shapes] == ["agent", "chat", "agent", "agent", "agent"]
    assert [shape.parts for shape in found.shapes] == [(0,), (0,), (0,), (0,), (0, 2)]
    assert [(shape.key_id, shape.key_check) for shape in found.shapes][3] == (3, 9)
    assert found.shapes[2].provenance == 640


def test_a_dict_tier_yields_its_frames_as_tables() -> None:
    disk = Disk()
    tier = DictTier(disk)
    builder = registered(tier)
    frames = [builder.frame(n) for n in (3, 1, 2, 5, 4)]
    places = written(tier, frames)
    tier.annotate([TouchNote(places[0], TOUCHES)])
    again = DictTier(disk, tables=True)
    kinds = [isinstance(item, FrameTable) for item in again.recover()]
    assert kinds == [True, False]
    assert found_frames(again) == list(tier.recover())


def test_a_start_without_room_for_tables_loses_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, places = stored(tmp_path, 3, 1)
    put_table(tmp_path, 1, None)
    commit, refused = Index.commit, []

    def without_room(index: Index, change: Change, **options: Any) -> list[Growth]:
        if change.tables:
            refused.append(bool(change.growths or change.frames_gone or change.deletions))
            raise lmdb.MapFullError("no room")
        return commit(index, change, **options)

    monkeypatch.setattr(Index, "commit", without_room)
    assert start(tmp_path) == ([], places)
    assert refused == [False]
    monkeypatch.undo()
    assert start(tmp_path) == ([], places)
    assert len(start(tmp_path)[0]) == 1


class _FullEnvironment:
    def open_db(self, name: bytes) -> object:
        raise lmdb.DiskError("no room")


def test_an_index_that_cannot_have_tables_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_or_none = Index._open_or_none

    def full(index: Index, name: bytes) -> object:
        env, index._env = index._env, _FullEnvironment()
        found = open_or_none(index, name)
        index._env = env
        return found

    monkeypatch.setattr(Index, "_open_or_none", full)
    _, places = stored(tmp_path, 3, 1)
    tier = recovered_ssd(tmp_path)
    tier.delete(places[:1]).result(WAIT_SECONDS)
    tier.close(deadline_seconds=WAIT_SECONDS)
    assert start(tmp_path) == ([], places[1:])
    monkeypatch.undo()
    assert start(tmp_path) == ([], places[1:])
    assert len(start(tmp_path)[0]) == 1
