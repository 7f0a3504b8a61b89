"""Headers of single frames: from the index, from the segment while there is no row, and what has none."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kvstore.clock import ManualClock
from kvstore.errors import TierUnavailable
from kvstore.events import Events
from kvstore.testing.tier_suite import TOUCHES, registered, written
from kvstore.tiers.base import FrameLocation, FrameWrite, RecoveredFrame, SliceTouch, TouchNote
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyTable, tenant_key
from kvstore.tiers.ssd.health import HANG_SECONDS, SEEN_MIN
from kvstore.tiers.ssd.look import FRAMES_AT_ONCE
from kvstore.types import PAGE_BYTES
from tests.support.fault_fs import FaultFileSystem
from tests.support.ssd import open_ssd, recovered_ssd

WAIT_SECONDS = 30.0


def look(tier: SsdTier, *places: FrameLocation) -> list[RecoveredFrame | None]:
    return tier.headers(places).result(WAIT_SECONDS)


def close(tier: SsdTier) -> None:
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_a_frame_is_read_from_its_segment_until_it_has_a_row(tmp_path: Path) -> None:
    fs = FaultFileSystem()
    tier = recovered_ssd(tmp_path, fs=fs)
    assert tier._running is not None
    builder = registered(tier)
    built = builder.frame(3)
    touched = replace(built.write.header, touched_at=1_700_000_900.0)
    (place,) = written(tier, [replace(built, write=FrameWrite(touched, built.write.parts, "a"))])
    (fresh,) = look(tier, place)
    assert fresh == RecoveredFrame(touched, place, ())
    tier.sync_index().result(WAIT_SECONDS)
    fs.fail("preadv", path="*.seg")
    whole = SliceTouch(0, 3, touched.retention_class, 1_700_000_900.0)
    assert look(tier, place) == [RecoveredFrame(built.write.header, place, (whole,))], "told as a touch now"
    tier.annotate([TouchNote(place, TOUCHES)])
    tier.sync_index().result(WAIT_SECONDS)
    assert look(tier, place) == [RecoveredFrame(built.write.header, place, TOUCHES)]
    fs.heal()
    close(tier)


def test_a_header_of_many_pages_is_read_from_the_segment(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    built = registered(tier).frame(300)
    (place,) = written(tier, [built])
    assert place.header_bytes > 2 * PAGE_BYTES
    assert look(tier, place) == [RecoveredFrame(built.write.header, place, ())]
    close(tier)


def test_only_a_whole_answer_to_the_very_place_counts(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    built = registered(tier).frame(3)
    (place,) = written(tier, [built])
    for _ in range(2):
        wrong = [
            replace(place, offset=place.offset + PAGE_BYTES),
            replace(place, offset=place.offset + place.length_bytes),
            replace(place, length_bytes=place.length_bytes + PAGE_BYTES),
            replace(place, header_bytes=place.header_bytes + PAGE_BYTES),
            replace(place, segment=place.segment + 1),
        ]
        assert look(tier, *wrong) == [None] * 5
        tier.sync_index().result(WAIT_SECONDS)
    close(tier)


def test_a_frame_of_another_segment_under_the_same_number_is_none(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    (place,) = written(tier, [registered(tier).frame(2)])
    tier.sync_index().result(WAIT_SECONDS)
    state = tier._table.get(place.segment)
    assert state is not None
    state.header = replace(state.header, identity=bytes(16))
    assert look(tier, place) == [None]
    close(tier)


def test_a_moved_frame_is_found_where_it_is_now(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    built = registered(tier).frame(2)
    (old,) = written(tier, [built])
    moved = replace(built, write=FrameWrite(built.write.header, built.write.parts, "copies"))
    (new,) = written(tier, [moved])
    tier.unlink([old.segment]).result(WAIT_SECONDS)
    assert look(tier, old, new) == [None, RecoveredFrame(built.write.header, new, ())]
    close(tier)


def test_a_deletion_that_the_index_could_not_take_hides_the_row(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    builder = registered(tier)
    places = written(tier, [builder.frame(2), builder.frame(2)])
    tier.sync_index().result(WAIT_SECONDS)
    assert tier._running is not None
    env = tier._running.index._env
    env.set_mapsize(env.info()["last_pgno"] * PAGE_BYTES + PAGE_BYTES)
    tier.delete(places[:1]).result(WAIT_SECONDS)
    assert tier._running.index.has_row(places[0].segment, places[0].offset)
    assert [frame is not None for frame in look(tier, *places)] == [False, True]
    close(tier)


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_what_is_wrong_with_a_row_is_read_from_the_segment_and_ends_the_trust(
    tmp_path: Path, damage: str
) -> None:
    tier = recovered_ssd(tmp_path)
    built = registered(tier).frame(3)
    (place,) = written(tier, [built])
    close(tier)
    with lmdb.open(str(tmp_path / "index"), max_dbs=5) as env:
        db = env.open_db(b"frames")
        with env.begin(write=True) as txn:
            cursor = txn.cursor(db=db)
            assert cursor.first()
            key, value = cursor.item()
            if damage == "missing":
                txn.delete(key, db=db)
            else:
                txn.put(key, value[:50] + b"x" + value[51:], db=db)
    again = recovered_ssd(tmp_path)
    assert look(again, place) == [RecoveredFrame(built.write.header, place, ())]
    assert (tmp_path / "index.stale").exists() is (damage == "changed")
    close(again)


def test_the_order_is_that_of_the_question_however_many(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    builder = registered(tier)
    places = written(tier, [builder.frame(1) for _ in range(5)])
    asked = [places[n * 3 % 5] for n in range(2 * FRAMES_AT_ONCE + 7)]
    told = look(tier, *asked)
    assert [frame.location if frame else None for frame in told] == asked
    close(tier)


def test_a_header_is_told_without_the_key(tmp_path: Path) -> None:
    table = [KeyTable({"": (tenant_key(1, b"\x11" * 32),)})]
    keys = KeyRing(lambda: table[0])
    tier = recovered_ssd(tmp_path, keys=keys)
    (place,) = written(tier, [registered(tier).frame(2)])
    assert look(tier, place) != [None]
    table[0] = KeyTable({})
    keys.reload()
    assert look(tier, place) != [None], "keys are hashes under the tenant's secret: they are not encrypted"
    close(tier)


def test_unreadable_segments_have_none_and_go_into_quarantine(tmp_path: Path) -> None:
    fs, events = FaultFileSystem(), Events()
    tier = recovered_ssd(tmp_path, fs=fs, events=events)
    (place,) = written(tier, [registered(tier).frame(2)])
    fs.fail("preadv", path="*.seg")
    assert [look(tier, place) for _ in range(3)] == [[None]] * 3
    assert [loss.segment for loss in tier.losses()] == [place.segment]
    assert events.total("kvstore_ssd_errors_total", operation="read") == 3
    fs.heal()
    tier.sync_index().result(WAIT_SECONDS)
    assert look(tier, place) == [None], "in quarantine"
    close(tier)


def test_a_disk_that_hangs_is_waited_for_by_nobody(tmp_path: Path) -> None:
    fs, clock = FaultFileSystem(), ManualClock()
    tier = recovered_ssd(tmp_path, fs=fs, clock=clock)
    builder = registered(tier)
    places = written(tier, [builder.frame(2), builder.frame(2)])
    rule = fs.hang("preadv", path="*.seg")
    at_hand = tier.headers(places)
    assert rule.arrived.wait(WAIT_SECONDS)
    behind = tier.headers(places[1:])
    clock.advance(HANG_SECONDS + 1.0)
    assert not at_hand.done()
    for _ in range(SEEN_MIN):
        tier.refuse_if_it_hangs()
    assert at_hand.result(WAIT_SECONDS) == [None, None]
    assert behind.result(WAIT_SECONDS) == [None]
    assert tier.headers(places).result(0) == [None, None], "at once"
    assert not tier.healthy().readable
    fs.heal()
    close(tier)


def test_a_hang_in_the_index_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, release, arrived = ManualClock(), threading.Event(), threading.Event()
    tier = recovered_ssd(tmp_path, clock=clock)
    (place,) = written(tier, [registered(tier).frame(2)])
    assert tier._running is not None
    look_up = tier._running.index.look

    def hanging(*args: object, **options: object) -> object:
        arrived.set()
        release.wait(WAIT_SECONDS)
        return look_up(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tier._running.index, "look", hanging)
    asked = tier.headers([place])
    assert arrived.wait(WAIT_SECONDS)
    clock.advance(HANG_SECONDS + 1.0)
    for _ in range(SEEN_MIN):
        tier.refuse_if_it_hangs()
    assert asked.result(WAIT_SECONDS) == [None]
    release.set()
    close(tier)


def test_nothing_is_asked_before_the_start_and_nothing_found_after_the_end(tmp_path: Path) -> None:
    tier = open_ssd(tmp_path)
    with pytest.raises(TierUnavailable):
        tier.headers([])
    list(tier.recover())
    (place,) = written(tier, [registered(tier).frame(2)])
    close(tier)
    assert look(tier, place) == [None]


def test_a_bug_answers_and_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = recovered_ssd(tmp_path)
    (place,) = written(tier, [registered(tier).frame(2)])
    assert tier._running is not None
    monkeypatch.setattr(tier._running.index, "look", None)
    assert look(tier, place) == [None]
    assert "kvstore-ssd-look" in tier.healthy().detail
    monkeypatch.undo()
    assert look(tier, place) != [None]
    close(tier)


def test_too_many_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.ssd.look.FRAMES_QUEUED_MAX", 3)
    tier = recovered_ssd(tmp_path)
    (place,) = written(tier, [registered(tier).frame(2)])
    assert look(tier, *[place] * 4) == [None] * 4
    for _ in range(3):
        assert None not in look(tier, place, place)
    close(tier)


def test_headers_while_frames_come_and_go(tmp_path: Path) -> None:
    """Rows are committed and dropped meanwhile: a living frame is never missed, a dead one never found."""
    tier = recovered_ssd(tmp_path)
    builder = registered(tier)
    for _ in range(20):
        places = written(tier, [builder.frame(1) for _ in range(4)])
        asked: list[Future[list[RecoveredFrame | None]]] = []
        flushed = tier.sync_index()
        asked += [tier.headers(places) for _ in range(10)]
        flushed.result(WAIT_SECONDS)
        assert all(None not in future.result(WAIT_SECONDS) for future in asked)
        tier.delete(places[:2]).result(WAIT_SECONDS)
        assert [frame is not None for frame in look(tier, *places)] == [False, False, True, True]
    close(tier)
    assert os.listdir(tmp_path / "segments")
