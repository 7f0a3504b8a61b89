"""What a start makes of an index that is lost, damaged, full, or behind the segments."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import lmdb
import pytest

from kvstore.events import Events
from kvstore.testing.tier_suite import assert_reads_back, registered, written
from kvstore.types import PAGE_BYTES
from tests.support.ssd import open_ssd, recovered_ssd
from tests.support.ssd_directory import WAIT_SECONDS, overwrite, reopened, stored


def test_a_lost_index_is_rebuilt_from_the_segments(tmp_path: Path) -> None:
    frames, places = stored(tmp_path, 3, 1)
    shutil.rmtree(tmp_path / "index")
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places
    assert [frame.header for frame in found] == [built.write.header for built in frames]
    assert not tier.report().rebuilt, "there was none to rebuild"
    for built, place in zip(frames, places, strict=True):
        assert_reads_back(tier, built, place)
    tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "foreign", "version"])
def test_a_damaged_index_is_put_aside_and_rebuilt(tmp_path: Path, damage: str) -> None:
    _, places = stored(tmp_path, 3, 1)
    data = tmp_path / "index" / "data.mdb"
    if damage == "cut":
        os.truncate(data, 3 * PAGE_BYTES)
    elif damage == "empty":
        data.write_bytes(b"")
    elif damage == "noise":
        overwrite(data, 0, os.urandom(2 * PAGE_BYTES))
    else:
        change_meta(tmp_path / "index", at=4 if damage == "foreign" else 0)
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places
    assert tier.report().rebuilt
    assert (tmp_path / "index.broken").is_dir()
    tier.close(deadline_seconds=WAIT_SECONDS)
    again, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places
    assert not again.report().rebuilt
    assert not (tmp_path / "index.broken").exists()
    again.close(deadline_seconds=WAIT_SECONDS)


def test_noise_in_the_pages_of_the_index_costs_a_rebuild_at_most(tmp_path: Path) -> None:
    _, places = stored(tmp_path, *range(1, 30))
    data = tmp_path / "index" / "data.mdb"
    for page in range(2, data.stat().st_size // PAGE_BYTES):
        overwrite(data, page * PAGE_BYTES, bytes(16))
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places
    tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize(("deaths", "rebuilt"), [(1, False), (2, True)])
def test_an_index_that_ends_starts_is_rebuilt(tmp_path: Path, deaths: int, rebuilt: bool) -> None:
    _, places = stored(tmp_path, 3, 1)
    for _ in range(deaths):
        dead = open_ssd(tmp_path)
        next(dead.recover())
        dead.close(deadline_seconds=WAIT_SECONDS)
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places
    assert tier.report().rebuilt == rebuilt
    tier.close(deadline_seconds=WAIT_SECONDS)


def change_meta(index: Path, *, at: int) -> None:
    with lmdb.open(str(index), max_dbs=4) as env:
        db = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            packed = bytearray(txn.get(b"meta", db=db) or b"")
            packed[at] ^= 0xFF
            txn.put(b"meta", bytes(packed), db=db)


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_row_sends_its_segment_to_the_scan_and_ends_the_trust(tmp_path: Path, damage: str) -> None:
    frames, places = stored(tmp_path, 3, 1)
    with lmdb.open(str(tmp_path / "index"), max_dbs=5) as env:
        db = env.open_db(b"frames")
        tables = env.open_db(b"tables")
        with env.begin(write=True) as txn:
            txn.drop(tables, delete=False)  # a start that finds a good table reads no rows
            cursor = txn.cursor(db=db)
            assert cursor.first()
            key, value = cursor.item()
            if damage == "missing":
                txn.delete(key, db=db)
            else:
                txn.put(key, value[:50] + b"x" + value[51:], db=db)
    tier, found = reopened(tmp_path)
    assert [frame.header for frame in found] == [built.write.header for built in frames]
    assert (tmp_path / "index.stale").exists()
    tier.close(deadline_seconds=WAIT_SECONDS)
    again, found = reopened(tmp_path)
    assert again.report().rebuilt
    assert [frame.location for frame in found] == places
    again.close(deadline_seconds=WAIT_SECONDS)


def test_a_full_index_lags_and_the_start_reads_on_from_the_segments(tmp_path: Path) -> None:
    events = Events()
    tier = recovered_ssd(tmp_path, index_bytes_max=128 << 10, events=events)
    builder = registered(tier)
    frames = [builder.frame(60) for _ in range(60)]
    places = []
    for built in frames:
        places += written(tier, [built])
        tier.sync_index().result(WAIT_SECONDS)
    assert events.total("kvstore_ssd_errors_total", operation="index") > 0
    assert "index lags" in tier.healthy().detail
    assert tier.healthy().writable
    tier.close(deadline_seconds=WAIT_SECONDS)
    again, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places
    assert_reads_back(again, frames[-1], places[-1])
    again.close(deadline_seconds=WAIT_SECONDS)


def test_a_deletion_that_the_index_could_not_take_is_obeyed_by_a_rebuild(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    builder = registered(tier)
    frames = [builder.frame(2) for _ in range(3)]
    places = written(tier, frames)
    tier.sync_index().result(WAIT_SECONDS)
    assert tier._running is not None
    env = tier._running.index._env
    env.set_mapsize(env.info()["last_pgno"] * PAGE_BYTES + PAGE_BYTES)
    tier.delete(places[1:2]).result(WAIT_SECONDS)
    assert (tmp_path / "index.stale").exists()
    tier.close(deadline_seconds=WAIT_SECONDS)
    again, found = reopened(tmp_path)
    assert [frame.location for frame in found] == [places[0], places[2]]
    assert again.report().rebuilt
    assert not (tmp_path / "index.stale").exists()
    again.close(deadline_seconds=WAIT_SECONDS)
