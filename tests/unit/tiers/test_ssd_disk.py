"""Disks that hang, are full, turn read-only, fail in one place or rot: what is told, and nothing waits."""

from __future__ import annotations

import concurrent.futures
import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import TierUnavailable
from kvstore.events import Events
from kvstore.testing.frames import BuiltFrame, FrameBuilder, read_of
from kvstore.testing.tier_suite import assert_reads_back, registered, written
from kvstore.tiers.base import FrameLocation, Loss, ReadResult, WriteResult
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.health import HANG_SECONDS, SEEN_MIN
from kvstore.types import PAGE_BYTES, MissReason
from tests.support.fault_fs import FaultFileSystem
from tests.support.ssd import MIB, open_ssd, recovered_ssd
from tests.support.ssd_directory import allocated

WAIT_SECONDS = 30.0
ALL_WRITES = "open pwritev fdatasync fsync_directory truncate punch rename unlink mkdir"


def answer(tier: SsdTier, built: BuiltFrame) -> WriteResult:
    return tier.write([built.write])[0].result(WAIT_SECONDS)


def read(tier: SsdTier, built: BuiltFrame, place: FrameLocation) -> ReadResult:
    return tier.read_into([read_of(built, place)])[0].result(WAIT_SECONDS)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


class TestHangs:
    def test_a_write_that_hangs_refuses_what_waits_and_reads_go_on(self, tmp_path: Path) -> None:
        fs, clock = FaultFileSystem(), ManualClock()
        tier = recovered_ssd(tmp_path, fs=fs, clock=clock)
        builder = registered(tier)
        first = builder.frame(2)
        (place,) = written(tier, [first])
        rule = fs.hang("pwritev", path="*/segments/*")
        stuck = tier.write([builder.frame(1).write])[0]
        assert rule.arrived.wait(WAIT_SECONDS)
        waiting = tier.write([builder.frame(1).write])[0]
        clock.advance(HANG_SECONDS + 1.0)
        for _ in range(SEEN_MIN):
            tier.refuse_if_it_hangs()
        assert "the disk hangs: write" in waiting.result(WAIT_SECONDS).refusal
        assert "hangs" in answer(tier, builder.frame(1)).refusal
        assert not stuck.done()
        health = tier.healthy()
        assert (health.readable, health.writable) == (True, False)
        assert "has not returned for 11 s (since 2023-11-14" in health.detail
        assert health.since == clock.wall() - HANG_SECONDS - 1.0
        assert_reads_back(tier, first, place)
        assert tier.usage().used_bytes > 0
        fs.heal()
        assert stuck.result(WAIT_SECONDS).location is not None
        until(lambda: tier.healthy().writable)
        assert answer(tier, builder.frame(1)).location is not None
        tier.close(deadline_seconds=WAIT_SECONDS)

    def test_reads_that_hang_answer_those_behind_them_as_tier_down(self, tmp_path: Path) -> None:
        fs, clock = FaultFileSystem(), ManualClock()
        tier = recovered_ssd(tmp_path, fs=fs, clock=clock)
        built = registered(tier).frame(2)
        (place,) = written(tier, [built])
        fs.hang("preadv", path="*.seg")
        futures = tier.read_into([read_of(built, place) for _ in range(8)])
        until(lambda: fs.faults >= 4)
        clock.advance(HANG_SECONDS + 1.0)
        for _ in range(SEEN_MIN):
            tier.refuse_if_it_hangs()
        refused = [future.result(WAIT_SECONDS) for future in futures[4:]]
        assert {result.reason for result in refused} == {MissReason.TIER_DOWN}
        assert "read has not returned" in read(tier, built, place).detail
        assert not tier.healthy().readable
        fs.heal()
        assert all(future.result(WAIT_SECONDS).good == 2 for future in futures[:4])
        assert_reads_back(tier, built, place)
        tier.close(deadline_seconds=WAIT_SECONDS)

    def test_a_disk_that_hangs_altogether_stops_no_question_and_no_shutdown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore.tiers.ssd.tier.STOP_SECONDS", 0.05)
        fs = FaultFileSystem()
        tier = recovered_ssd(tmp_path, fs=fs)
        builder = registered(tier)
        built = builder.frame(2)
        (place,) = written(tier, [built])
        fs.hang()
        futures: list[concurrent.futures.Future[Any]] = [
            tier.write([builder.frame(1).write])[0],
            tier.delete([place]),
            tier.unlink([place.segment]),
        ]
        reads = tier.read_into([read_of(built, place) for _ in range(9)])
        until(lambda: fs.faults >= 6)
        done = threading.Event()

        def ask() -> None:
            tier.annotate([])
            assert (tier.usage().used_bytes > 0, len(tier.segments()), tier.losses()) == (True, 1, [])
            assert tier.healthy().detail == ""
            tier.register(FrameBuilder(seed=5).namespace)
            tier.close(deadline_seconds=0.05)
            done.set()

        threading.Thread(target=ask, daemon=True).start()
        assert done.wait(WAIT_SECONDS), "a question or the shutdown waits for the disk"
        fs.heal()
        concurrent.futures.wait([*futures, *reads], timeout=WAIT_SECONDS)
        assert all(future.done() for future in (*futures, *reads))


class TestRoom:
    def test_a_full_disk_says_since_when_and_recovers_by_itself(self, tmp_path: Path) -> None:
        fs, clock = FaultFileSystem(), ManualClock()
        tier = recovered_ssd(tmp_path, fs=fs, clock=clock)
        builder = registered(tier)
        first = builder.frame(2)
        (place,) = written(tier, [first])
        fs.fail("pwritev fdatasync", code=errno.ENOSPC)
        for _ in range(5):
            assert "No space left" in answer(tier, builder.frame(1)).refusal
            clock.advance(5.0)
        health = tier.healthy()
        assert (health.readable, health.writable) == (True, False)
        assert "no room: " in health.detail
        assert "(since 2023-11-14 22:13:20 UTC)" in health.detail
        assert_reads_back(tier, first, place)
        assert sum(info.bytes for info in tier.segments()) == tier.usage().used_bytes
        fs.heal()
        assert answer(tier, builder.frame(1)).location is not None
        assert tier.healthy().writable
        assert tier.healthy().detail == ""
        tier.close(deadline_seconds=WAIT_SECONDS)
        again = recovered_ssd(tmp_path)
        assert again.report().frames == 2
        again.close(deadline_seconds=WAIT_SECONDS)

    def test_room_that_comes_back_is_seen_without_a_write(self, tmp_path: Path) -> None:
        fs = FaultFileSystem()
        free = fs.free_bytes(tmp_path)
        fs.fs.free_bytes = lambda path: free  # type: ignore[method-assign]
        tier = recovered_ssd(tmp_path, fs=fs, min_free_bytes=free - MIB)
        builder = registered(tier)
        assert "free space" in answer(tier, builder.frame(100)).refusal
        assert not tier.healthy().writable
        free += 100 * MIB
        tier.sync_index().result(WAIT_SECONDS)
        until(lambda: tier.healthy().writable)
        tier.close(deadline_seconds=WAIT_SECONDS)

    def test_a_disk_that_turned_read_only_serves_what_it_has(self, tmp_path: Path) -> None:
        fs, clock = FaultFileSystem(), ManualClock()
        tier = recovered_ssd(tmp_path, fs=fs, clock=clock)
        builder = registered(tier)
        first = builder.frame(3)
        (place,) = written(tier, [first])
        fs.fail("pwritev fdatasync fsync_directory truncate punch rename unlink", code=errno.EROFS)
        for _ in range(4):
            assert answer(tier, builder.frame(1)).location is None
        assert "read-only after 3 errors" in tier.healthy().detail
        assert "Read-only file system" in tier.healthy().detail
        for refused in (tier.delete([place]), tier.unlink([place.segment])):
            with pytest.raises(TierUnavailable):
                refused.result(WAIT_SECONDS)
        assert_reads_back(tier, first, place)
        fs.heal()
        clock.advance(61.0)
        assert answer(tier, builder.frame(1)).location is not None
        tier.close(deadline_seconds=WAIT_SECONDS)

    def test_without_holes_deleted_bytes_count_until_their_segment_dies(self, tmp_path: Path) -> None:
        fs = FaultFileSystem()
        fs.fail("punch", code=errno.EOPNOTSUPP)
        tier = recovered_ssd(tmp_path, fs=fs)
        builder = registered(tier)
        places = written(tier, [builder.frame(4), builder.frame(4)])
        used = tier.usage().used_bytes
        assert tier.delete([places[0]]).result(WAIT_SECONDS) == 0
        assert tier.usage().used_bytes == used == allocated(tmp_path)
        assert "no holes here" in tier.healthy().detail
        tier.close(deadline_seconds=WAIT_SECONDS)
        again = recovered_ssd(tmp_path)
        assert again.usage().used_bytes == allocated(tmp_path)
        assert again.delete([places[1]]).result(WAIT_SECONDS) >= places[1].length_bytes
        assert again.usage().used_bytes == 0 == allocated(tmp_path)
        again.close(deadline_seconds=WAIT_SECONDS)


class TestReadErrors:
    def test_three_in_a_minute_put_the_segment_into_quarantine(self, tmp_path: Path) -> None:
        fs, clock, events = FaultFileSystem(), ManualClock(), Events()
        tier = recovered_ssd(tmp_path, fs=fs, clock=clock, events=events)
        builder = registered(tier)
        bad, good = builder.frame(2, bucket="bad"), builder.frame(2, bucket="good")
        bad_place, good_place = written(tier, [bad, good])
        fs.fail("preadv", path=f"*{bad_place.segment:016x}.seg")
        for _ in range(3):
            assert tier.losses() == []
            assert read(tier, bad, bad_place).reason is MissReason.TIER_DOWN
        assert tier.losses() == [Loss(bad_place.segment)]
        assert tier.losses() == []
        fs.heal()
        reads = len(fs.reads)
        result = read(tier, bad, bad_place)
        assert (result.reason, len(fs.reads)) == (MissReason.TIER_DOWN, reads)
        assert "quarantine" in result.detail
        assert_reads_back(tier, good, good_place)
        assert "read-only after 3 errors" in answer(tier, builder.frame(1)).refusal
        assert events.total("kvstore_ssd_errors_total", operation="read") == 3
        assert tier.unlink([bad_place.segment]).result(WAIT_SECONDS) > 0
        clock.advance(61.0)
        assert answer(tier, builder.frame(1)).location is not None
        tier.close(deadline_seconds=WAIT_SECONDS)

    def test_errors_far_apart_or_of_many_segments_do_not(self, tmp_path: Path) -> None:
        fs, clock = FaultFileSystem(), ManualClock()
        tier = recovered_ssd(tmp_path, fs=fs, clock=clock)
        builder = registered(tier)
        frames = [builder.frame(1, bucket=bucket) for bucket in "abc"]
        places = written(tier, frames)
        fs.fail("preadv")
        for built, place in zip(frames, places, strict=True):
            assert read(tier, built, place).reason is MissReason.TIER_DOWN
        for _ in range(3):
            clock.advance(31.0)
            assert read(tier, frames[0], places[0]).reason is MissReason.TIER_DOWN
        assert tier.losses() == []
        fs.heal()
        for built, place in zip(frames, places, strict=True):
            assert_reads_back(tier, built, place)
        tier.close(deadline_seconds=WAIT_SECONDS)

    @pytest.mark.parametrize("limit", [PAGE_BYTES, PAGE_BYTES + 512, 3 * PAGE_BYTES])
    def test_short_reads_and_writes_are_gone_on_with(self, tmp_path: Path, limit: int) -> None:
        fs = FaultFileSystem()
        tier = recovered_ssd(tmp_path, fs=fs)
        tier._table.direct_flag = 0
        builder = registered(tier)
        built = builder.frame(5)
        fs.shorten("pwritev", limit, times=40)
        (place,) = written(tier, [built])
        fs.shorten("preadv", limit, times=3)
        assert_reads_back(tier, built, place)
        assert fs.faults > 3
        tier.close(deadline_seconds=WAIT_SECONDS)
        fs.shorten("preadv", limit, times=5)
        again = open_ssd(tmp_path, fs=fs)
        assert len(list(again.recover())) == 1
        again.close(deadline_seconds=WAIT_SECONDS)


class TestScrub:
    @pytest.mark.parametrize("where", ["payload", "trailer", "header"])
    def test_it_finds_what_rots_tells_it_once_and_counts(self, tmp_path: Path, where: str) -> None:
        fs, events = FaultFileSystem(), Events()
        tier = recovered_ssd(tmp_path, fs=fs, events=events)
        builder = registered(tier)
        frames = [builder.frame(4) for _ in range(3)]
        places = written(tier, frames)
        tier.close(deadline_seconds=WAIT_SECONDS)
        tier = recovered_ssd(tmp_path, fs=fs, events=events)
        scrubber = tier._running.scrubber if tier._running is not None else None
        assert scrubber is not None
        assert scrubber.scrub_pass() == 1
        assert tier.losses() == []
        stride = frames[1].write.header.parts[0].stride_bytes
        at = {"payload": stride + 9, "trailer": 2 * stride - 200, "header": -1}[where]
        path = tmp_path / "segments" / f"{places[1].segment:016x}.seg"
        fs.flip(path, places[1].offset + (places[1].header_bytes + at if at >= 0 else 90))
        for _ in range(2):
            scrubber.scrub_pass()
        (loss,) = tier.losses()
        assert (loss.segment, loss.offset, loss.block) == (places[1].segment, places[1].offset, int(at >= 0))
        assert loss.offset + loss.length_bytes == places[2].offset
        assert events.total("kvstore_corrupt_total", tier="ssd") == 1
        assert events.total("kvstore_scrubbed_bytes_total") >= 2 * sum(p.length_bytes for p in places)
        assert scrubber.progress() == "off"
        tier.close(deadline_seconds=WAIT_SECONDS)

    def test_it_leaves_alone_what_was_deleted_and_goes_on_where_it_was(self, tmp_path: Path) -> None:
        tier = recovered_ssd(tmp_path, segment_bytes_max=MIB)
        builder = registered(tier)
        places = written(tier, [builder.frame(20, bucket=str(i)) for i in range(3)] + [builder.frame(1)])
        tier.delete(places[:1]).result(WAIT_SECONDS)
        tier.close(deadline_seconds=WAIT_SECONDS)
        tier = recovered_ssd(tmp_path)
        assert tier._running is not None
        scrubber = tier._running.scrubber
        scrubber._next = places[2].segment
        scrubber._remember()
        tier.close(deadline_seconds=WAIT_SECONDS)
        tier = recovered_ssd(tmp_path)
        assert tier.report().unknown_files == ()
        assert tier._running is not None
        scrubber = tier._running.scrubber
        scrubber._resume()
        assert scrubber._next == places[2].segment
        assert scrubber.scrub_pass() == 2
        assert scrubber.scrub_pass() == 3
        assert tier.losses() == []
        tier.close(deadline_seconds=WAIT_SECONDS)

    def test_it_runs_at_its_rate_and_ends_with_the_tier(self, tmp_path: Path) -> None:
        events = Events()
        tier = recovered_ssd(tmp_path)
        written(tier, [registered(tier).frame(64)])
        tier.close(deadline_seconds=WAIT_SECONDS)
        tier = recovered_ssd(tmp_path, events=events, scrub_bytes_per_second=PAGE_BYTES)
        until(lambda: events.total("kvstore_scrubbed_bytes_total") > 0)
        assert tier.healthy().scrub.startswith("pass 1, next segment ")
        tier.close(deadline_seconds=WAIT_SECONDS)
        assert events.total("kvstore_scrubbed_bytes_total") < MIB
