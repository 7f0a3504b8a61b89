"""What a start makes of a data directory: rows, tails, damage, foreign files and lost indexes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import lmdb
import pytest

from kvstore.clock import ManualClock
from kvstore.errors import TierUnavailable
from kvstore.events import Events
from kvstore.testing.frames import BuiltFrame, FrameBuilder
from kvstore.testing.tier_suite import assert_reads_back, found_frames, registered, written
from kvstore.tiers.base import FrameLocation, RecoveredFrame, SliceTouch, TouchNote, WrittenBytes
from kvstore.tiers.ssd import DirectoryLock, SsdTier
from kvstore.tiers.ssd.format import FORMAT_VERSION
from kvstore.types import PAGE_BYTES
from tests.support.ssd import open_ssd, recovered_ssd

WAIT_SECONDS = 30.0


def stored(directory: Path, *sizes: int, **options: object) -> tuple[list[BuiltFrame], list[FrameLocation]]:
    """Write frames and close."""
    tier = recovered_ssd(directory, **options)
    builder = registered(tier)
    frames = [builder.frame(n) for n in sizes]
    places = written(tier, frames)
    tier.close(deadline_seconds=WAIT_SECONDS)
    return frames, places


def reopened(directory: Path) -> tuple[SsdTier, list[RecoveredFrame]]:
    tier = open_ssd(directory)
    return tier, found_frames(tier)


def segment_file(directory: Path, number: int) -> Path:
    return directory / "segments" / f"{number:016x}.seg"


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def allocated(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (directory / "segments").iterdir())


def test_usage_is_right_before_the_first_write(tmp_path: Path) -> None:
    stored(tmp_path, 3, 20, 7)
    stored(tmp_path, 5)
    tier, found = reopened(tmp_path)
    assert len(found) == 4
    assert abs(tier.usage().used_bytes - allocated(tmp_path)) <= PAGE_BYTES
    assert tier.usage().segments == 2
    tier.close(deadline_seconds=WAIT_SECONDS)


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


def test_a_rebuild_obeys_deletions(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    builder = registered(tier)
    frames = [builder.frame(n) for n in (2, 30, 2)]
    places = written(tier, frames)
    before = tier.usage().used_bytes
    freed = tier.delete(places[1:2]).result(WAIT_SECONDS)
    assert freed >= places[1].length_bytes - 2 * PAGE_BYTES
    assert tier.usage().used_bytes == before - freed
    tier.close(deadline_seconds=WAIT_SECONDS)
    content = segment_file(tmp_path, places[1].segment).read_bytes()
    assert frames[1].blocks[0][0].payload not in content
    shutil.rmtree(tmp_path / "index")
    again, found = reopened(tmp_path)
    assert [frame.location for frame in found] == [places[0], places[2]]
    assert again.report().frames_dropped == 0
    again.close(deadline_seconds=WAIT_SECONDS)


def test_a_sealed_segment_is_removed_with_its_last_frame(tmp_path: Path) -> None:
    _, places = stored(tmp_path, 2, 3)
    tier, _ = reopened(tmp_path)
    path = segment_file(tmp_path, places[0].segment)
    tier.delete(places[:1]).result(WAIT_SECONDS)
    assert path.exists()
    tier.delete(places[1:]).result(WAIT_SECONDS)
    assert not path.exists()
    assert tier.usage().used_bytes == 0
    assert tier.segments() == []
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_segment_numbers_are_never_given_twice(tmp_path: Path) -> None:
    _, places = stored(tmp_path, 2)
    tier, _ = reopened(tmp_path)
    tier.unlink([places[0].segment]).result(WAIT_SECONDS)
    tier.close(deadline_seconds=WAIT_SECONDS)
    _, later = stored(tmp_path, 2)
    assert later[0].segment > places[0].segment


def test_touches_survive_a_rebuild_of_one_segment_but_not_the_loss_of_the_index(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    (place,) = written(tier, [registered(tier).frame(2)])
    late, early = (SliceTouch(0, 2, "chat", 1_700_000_100.0),), (SliceTouch(0, 2, "agent", 1_700_000_050.0),)
    tier.annotate([TouchNote(place, late), TouchNote(place, early)])
    tier.close(deadline_seconds=WAIT_SECONDS)
    again, (found,) = reopened(tmp_path)
    assert found.touches == late
    again.close(deadline_seconds=WAIT_SECONDS)
    shutil.rmtree(tmp_path / "index")
    last, (found,) = reopened(tmp_path)
    assert found.touches == ()
    last.close(deadline_seconds=WAIT_SECONDS)


def test_bytes_written_are_counted_by_day_and_class_and_kept(tmp_path: Path) -> None:
    clock = ManualClock()
    today = int(clock.wall() // 86400)
    lengths = []
    for days in (0, 0, 3):
        clock.advance(days * 86400.0)
        tier = recovered_ssd(tmp_path, clock=clock)
        builder = registered(tier)
        (place,) = written(tier, [builder.frame(2)])
        lengths.append(place.length_bytes)
        tier.close(deadline_seconds=WAIT_SECONDS)
    tier = recovered_ssd(tmp_path, clock=clock)
    first = WrittenBytes(today, "agent", lengths[0] + lengths[1])
    assert tier.written() == [first, WrittenBytes(today + 3, "agent", lengths[2])]
    tier.close(deadline_seconds=WAIT_SECONDS)


def unsealed_tail(directory: Path, *sizes: int) -> tuple[list[BuiltFrame], list[FrameLocation]]:
    """Write frames, then let the file look as if the process had died: no seal, no index."""
    frames, places = stored(directory, *sizes)
    shutil.rmtree(directory / "index")
    end = places[-1].offset + places[-1].length_bytes
    os.truncate(segment_file(directory, places[0].segment), end)
    return frames, places


@pytest.mark.parametrize("cut", [1, PAGE_BYTES, 3 * PAGE_BYTES + 7])
def test_a_torn_tail_is_cut_off_and_reported(tmp_path: Path, cut: int) -> None:
    _, places = unsealed_tail(tmp_path, 3, 4)
    path = segment_file(tmp_path, places[0].segment)
    os.truncate(path, path.stat().st_size - cut)
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places[:1]
    assert tier.report().bytes_dropped == places[1].length_bytes - cut
    assert path.stat().st_size == places[1].offset + PAGE_BYTES, "the seal follows the last good frame"
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_a_torn_frame_in_the_middle_does_not_hide_what_follows(tmp_path: Path) -> None:
    frames, places = unsealed_tail(tmp_path, 3, 4, 2)
    path = segment_file(tmp_path, places[0].segment)
    overwrite(path, places[1].offset + places[1].header_bytes + 20, b"torn")
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == [places[0], places[2]]
    assert tier.report().frames_dropped == 1
    assert_reads_back(tier, frames[2], places[2])
    tier.close(deadline_seconds=WAIT_SECONDS)
    shutil.rmtree(tmp_path / "index")
    again, found = reopened(tmp_path)
    assert [frame.location for frame in found] == [places[0], places[2]], "it was buried, not forgotten"
    again.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_damaged_header_in_the_middle_does_not_hide_what_follows(tmp_path: Path, sealed: bool) -> None:
    if sealed:
        _, places = stored(tmp_path, 3, 4, 2)
        shutil.rmtree(tmp_path / "index")
    else:
        _, places = unsealed_tail(tmp_path, 3, 4, 2)
    overwrite(segment_file(tmp_path, places[0].segment), places[1].offset, bytes(100))
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == [places[0], places[2]]
    assert tier.report().frames_dropped == 1
    assert tier.report().bytes_dropped == places[1].length_bytes
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_what_is_not_ours_is_left_alone_and_reported(tmp_path: Path) -> None:
    _, places = stored(tmp_path, 3)
    other = tmp_path / "other"
    stored(other, 2, seed=7)
    foreign = segment_file(tmp_path, 77)
    shutil.copy(next((other / "segments").iterdir()), foreign)
    renamed = segment_file(tmp_path, 78)
    shutil.copy(segment_file(tmp_path, places[0].segment), renamed)
    newer = segment_file(tmp_path, 79)
    shutil.copy(segment_file(tmp_path, places[0].segment), newer)
    overwrite(newer, 8, (FORMAT_VERSION + 1).to_bytes(2, "little"))
    noise = segment_file(tmp_path, 80)
    noise.write_bytes(os.urandom(3 * PAGE_BYTES))
    (tmp_path / "segments" / "notes.txt").write_text("mine")
    (tmp_path / "namespaces" / "readme").write_text("mine too")
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places
    names = {f"segments/{path.name}" for path in (foreign, renamed, newer, noise)}
    assert set(tier.report().unknown_files) == names | {"segments/notes.txt", "namespaces/readme", "other"}
    assert abs(tier.usage().used_bytes + PAGE_BYTES - allocated(tmp_path)) <= 2 * PAGE_BYTES
    (later,) = written(tier, [registered(tier, seed=5).frame(1)])
    assert later.segment == 81
    tier.close(deadline_seconds=WAIT_SECONDS)
    assert all(path.exists() for path in (foreign, renamed, newer, noise))


def test_a_creation_cut_short_leaves_nothing(tmp_path: Path) -> None:
    stored(tmp_path, 1)
    for number, content in ((90, b""), (91, os.urandom(512)), (92, bytes(PAGE_BYTES))):
        segment_file(tmp_path, number).write_bytes(content)
    tier, found = reopened(tmp_path)
    assert len(found) == 1
    assert tier.report().unknown_files == ()
    assert len(list((tmp_path / "segments").iterdir())) == 1
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_a_frame_of_an_unknown_version_is_stepped_over_and_kept(tmp_path: Path) -> None:
    _, places = unsealed_tail(tmp_path, 3, 4, 2)
    path = segment_file(tmp_path, places[0].segment)
    overwrite(path, places[1].offset + 8, (FORMAT_VERSION + 1).to_bytes(2, "little"))
    size = path.stat().st_size
    for _ in range(2):
        tier, found = reopened(tmp_path)
        assert [frame.location for frame in found] == [places[0], places[2]]
        assert any("version 2 is unknown" in line for line in tier.report().unknown_files)
        tier.close(deadline_seconds=WAIT_SECONDS)
        assert path.stat().st_size == size, "neither cut nor sealed"
    overwrite(path, places[1].offset + 8, FORMAT_VERSION.to_bytes(2, "little"))
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places, "the build that knows it finds it"
    tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize("with_index", [True, False])
def test_frames_without_their_namespace_are_kept_and_not_yielded(tmp_path: Path, with_index: bool) -> None:
    _, places = stored(tmp_path, 3)
    (name,) = (tmp_path / "namespaces").iterdir()
    name.rename(tmp_path / "aside")
    if not with_index:
        shutil.rmtree(tmp_path / "index")
    tier, found = reopened(tmp_path)
    assert found == []
    assert any("namespace" in line for line in tier.report().unknown_files)
    tier.close(deadline_seconds=WAIT_SECONDS)
    (tmp_path / "aside").rename(name)
    again, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places
    again.close(deadline_seconds=WAIT_SECONDS)


def test_a_lost_store_id_is_taken_from_the_segments(tmp_path: Path) -> None:
    _, places = stored(tmp_path, 3)
    before = (tmp_path / "STORE").read_bytes()
    (tmp_path / "STORE").unlink()
    tier, found = reopened(tmp_path)
    assert [frame.location for frame in found] == places
    assert (tmp_path / "STORE").read_bytes() == before
    tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize(
    "content", ["", '{"format": 2, "store": "00"}', '{"format": 1, "store": "00"}', "[]"]
)
def test_an_unreadable_store_file_stops_the_start(tmp_path: Path, content: str) -> None:
    stored(tmp_path, 1)
    (tmp_path / "STORE").write_text(content)
    with pytest.raises(TierUnavailable, match="STORE"):
        open_ssd(tmp_path)
    assert (tmp_path / "STORE").read_text() == content


def test_segments_of_two_stores_and_no_store_file_stop_the_start(tmp_path: Path) -> None:
    stored(tmp_path / "a", 1)
    stored(tmp_path / "b", 1, seed=7)
    shutil.copy(segment_file(tmp_path / "b", 1), segment_file(tmp_path / "a", 2))
    (tmp_path / "a" / "STORE").unlink()
    with pytest.raises(TierUnavailable, match="several stores"):
        open_ssd(tmp_path / "a")


def test_an_index_that_cannot_be_created_stops_the_start(tmp_path: Path) -> None:
    stored(tmp_path, 1)
    shutil.rmtree(tmp_path / "index")
    tier = open_ssd(tmp_path, index_bytes_max=PAGE_BYTES)
    with pytest.raises(TierUnavailable, match="disk full"):
        list(tier.recover())
    tier.close(deadline_seconds=WAIT_SECONDS)
    again, found = reopened(tmp_path)
    assert len(found) == 1
    again.close(deadline_seconds=WAIT_SECONDS)


def test_a_directory_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnavailable, match="cannot be written"):
        open_ssd(tmp_path / "file" / "store")


def test_a_second_daemon_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path / "store"), pytest.raises(TierUnavailable, match=f"pid {os.getpid()}"):
        DirectoryLock(tmp_path / "store")
    DirectoryLock(tmp_path / "store").release()


def test_verbs_wait_for_the_recovery(tmp_path: Path) -> None:
    tier = open_ssd(tmp_path)
    builder = FrameBuilder()
    tier.register(builder.namespace)
    with pytest.raises(TierUnavailable, match="recovered"):
        tier.write([builder.frame(1).write])
    list(tier.recover())
    with pytest.raises(TierUnavailable, match="already"):
        list(tier.recover())
    written(tier, [builder.frame(1)])
    tier.close(deadline_seconds=WAIT_SECONDS)
