"""Full disks, failing disks, limits: every write is answered, and what is acknowledged is there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.events import Events
from kvstore.testing.frames import BuiltFrame, FrameBuilder, read_of
from kvstore.testing.tier_suite import assert_reads_back, found_frames, registered, written
from kvstore.tiers.base import WriteResult
from kvstore.tiers.ssd import SsdTier
from kvstore.types import MissReason
from tests.support.crash_fs import CrashFileSystem
from tests.support.ssd import MIB, open_ssd, recovered_ssd

WAIT_SECONDS = 30.0


def failing(fs: CrashFileSystem, name: str, *, code: int = errno.EIO, times: int = 1, after: int = 0) -> None:
    """Let calls of one name fail, `after` so many that work."""
    seen = 0

    def before(called: str) -> None:
        nonlocal seen
        if called == name:
            seen += 1
            if after < seen <= after + times:
                raise OSError(code, os.strerror(code))

    fs.before = before


def results(tier: SsdTier, *frames: BuiltFrame) -> list[WriteResult]:
    return [future.result(WAIT_SECONDS) for future in tier.write([built.write for built in frames])]


def test_a_full_queue_cuts_the_tail(tmp_path: Path) -> None:
    builder = FrameBuilder()
    frames = [builder.frame(n) for n in (2, 2, 40, 1)]
    tier = recovered_ssd(tmp_path, queue_bytes_max=200_000)
    tier.register(builder.namespace)
    answers = results(tier, *frames)
    assert [answer.location is not None for answer in answers] == [True, True, False, False]
    assert "queue full: limit 200000 bytes" in answers[2].refusal
    assert "queue full" in answers[3].refusal
    assert tier.usage().queued_bytes == 0
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_capacity_is_a_hard_limit(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path, capacity_bytes=MIB)
    builder = registered(tier)
    answers = [results(tier, builder.frame(10))[0] for _ in range(12)]
    kept = [answer for answer in answers if answer.location is not None]
    assert 0 < len(kept) < 12
    assert f"capacity: limit {MIB} bytes, used " in answers[-1].refusal
    assert tier.usage().used_bytes <= MIB
    tier.close(deadline_seconds=WAIT_SECONDS)
    assert sum(f.stat().st_blocks * 512 for f in (tmp_path / "segments").iterdir()) <= MIB


def test_a_frame_over_the_limit_takes_its_followers_along(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path, capacity_bytes=MIB)
    builder = registered(tier)
    answers = results(tier, builder.frame(1), builder.frame(200), builder.frame(1))
    assert [answer.location is not None for answer in answers] == [True, False, False]
    assert "before it" in answers[2].refusal
    assert results(tier, builder.frame(1))[0].location is not None
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_free_space_is_left_free(tmp_path: Path) -> None:
    fs = CrashFileSystem()
    tier = recovered_ssd(tmp_path, fs=fs, min_free_bytes=fs.disk_bytes - 100_000)
    builder = registered(tier)
    assert results(tier, builder.frame(1))[0].location is not None
    (refused,) = results(tier, builder.frame(10))
    assert f"free space: limit {fs.disk_bytes - 100_000} bytes" in refused.refusal
    tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize(("call", "operation"), [("pwritev", "write"), ("fdatasync", "sync")])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_error_refuses_the_batch_and_ends_the_segment(
    tmp_path: Path, call: str, operation: str, code: int
) -> None:
    fs, events = CrashFileSystem(), Events()
    tier = recovered_ssd(tmp_path, fs=fs, events=events)
    builder = registered(tier)
    first, aside = builder.frame(3), builder.frame(1, bucket="other")
    place, beside = written(tier, [first, aside])
    failing(fs, call, code=code)
    refused = results(tier, builder.frame(1), builder.frame(2, bucket="other"), builder.frame(2))
    assert [answer.location for answer in refused] == [None] * 3
    assert all("disk error" in answer.refusal or "before it" in answer.refusal for answer in refused)
    assert events.total("kvstore_ssd_errors_total", operation=operation) == 1
    later = builder.frame(2)
    (other,) = written(tier, [later])
    assert other.segment != place.segment
    assert_reads_back(tier, first, place)
    assert_reads_back(tier, later, other)
    assert tier.usage().used_bytes == sum(info.bytes for info in tier.segments())
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = open_ssd(tmp_path, fs=fs)
    assert {frame.location for frame in found_frames(again)} == {place, beside, other}
    again.close(deadline_seconds=WAIT_SECONDS)


def test_a_failed_sync_refuses_what_came_after_it_in_other_segments_too(tmp_path: Path) -> None:
    fs = CrashFileSystem()
    tier = recovered_ssd(tmp_path, fs=fs)
    builder = registered(tier)
    written(tier, [builder.frame(1, bucket="a"), builder.frame(1, bucket="b")])
    failing(fs, "fdatasync", after=1)
    frames = [builder.frame(1, bucket="a"), builder.frame(1, bucket="b"), builder.frame(1, bucket="a")]
    answers = results(tier, *frames)
    assert [answer.location is not None for answer in answers] == [True, False, False]
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = open_ssd(tmp_path, fs=fs)
    keys = {frame.header.keys for frame in found_frames(again)}
    assert frames[0].keys in keys
    assert frames[1].keys not in keys
    assert frames[2].keys not in keys
    again.close(deadline_seconds=WAIT_SECONDS)


def test_three_errors_in_a_minute_make_it_read_only_for_a_minute(tmp_path: Path) -> None:
    fs, clock = CrashFileSystem(), ManualClock()
    tier = recovered_ssd(tmp_path, fs=fs, clock=clock)
    builder = registered(tier)
    first = builder.frame(2)
    (place,) = written(tier, [first])
    for _ in range(3):
        failing(fs, "fdatasync", after=0)
        assert results(tier, builder.frame(1))[0].location is None
    assert tier.healthy().readable
    assert not tier.healthy().writable
    assert "read-only after 3 errors" in tier.healthy().detail
    assert "read-only" in results(tier, builder.frame(1))[0].refusal
    assert_reads_back(tier, first, place)
    clock.advance(61.0)
    assert tier.healthy().writable
    assert results(tier, builder.frame(1))[0].location is not None
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_errors_far_apart_do_not_make_it_read_only(tmp_path: Path) -> None:
    fs, clock = CrashFileSystem(), ManualClock()
    tier = recovered_ssd(tmp_path, fs=fs, clock=clock)
    builder = registered(tier)
    for _ in range(4):
        failing(fs, "fdatasync")
        assert results(tier, builder.frame(1))[0].location is None
        clock.advance(31.0)
    assert tier.healthy().writable
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_a_read_error_is_a_miss(tmp_path: Path) -> None:
    fs, events = CrashFileSystem(), Events()
    tier = recovered_ssd(tmp_path, fs=fs, events=events)
    built = registered(tier).frame(2)
    (place,) = written(tier, [built])
    failing(fs, "preadv")
    (future,) = tier.read_into([read_of(built, place)])
    result = future.result(WAIT_SECONDS)
    assert (result.good, result.reason) == (0, MissReason.TIER_DOWN)
    assert "Input/output error" in result.detail
    assert events.total("kvstore_ssd_errors_total", operation="read") == 1
    assert_reads_back(tier, built, place)
    tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize("record", [0, 1, 3])
@pytest.mark.parametrize("where", ["payload", "trailer", "length"])
def test_a_flipped_bit_ends_the_read_before_it(tmp_path: Path, record: int, where: str) -> None:
    events = Events()
    tier = recovered_ssd(tmp_path, events=events)
    built = registered(tier).frame(4, full=True)
    (place,) = written(tier, [built])
    stride = built.write.header.parts[0].stride_bytes
    at = {"payload": 5500, "trailer": stride - 256 + 100, "length": stride - 256 + 41}[where]
    flip(tmp_path, place.segment, place.offset + place.header_bytes + record * stride + at)
    read = read_of(built, place)
    result = tier.read_into([read])[0].result(WAIT_SECONDS)
    assert (result.good, result.reason) == (record, MissReason.CORRUPT)
    assert f"record {record} of part 0" in result.detail
    assert len(result.lengths) == 4 * record
    assert len(result.digests) == 16 * 3 * record
    assert events.total("kvstore_corrupt_total", tier="ssd") == 1
    tier.close(deadline_seconds=WAIT_SECONDS)


def flip(directory: Path, segment: int, offset: int) -> None:
    with (directory / "segments" / f"{segment:016x}.seg").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))
        file.flush()
        os.fsync(file.fileno())


def test_a_file_cut_short_is_corrupt_not_wrong(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    built = registered(tier).frame(4)
    (place,) = written(tier, [built])
    stride = built.write.header.parts[0].stride_bytes
    os.truncate(
        tmp_path / "segments" / f"{place.segment:016x}.seg",
        place.offset + place.header_bytes + 2 * stride + 100,
    )
    result = tier.read_into([read_of(built, place)])[0].result(WAIT_SECONDS)
    assert (result.good, result.reason) == (2, MissReason.CORRUPT)
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_a_bug_in_a_reader_is_a_miss_and_shows_in_the_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    tier = recovered_ssd(tmp_path, events=events)
    built = registered(tier).frame(2)
    (place,) = written(tier, [built])
    monkeypatch.setattr("kvstore.tiers.ssd.reader.check_records", raising(ZeroDivisionError))
    result = tier.read_into([read_of(built, place)])[0].result(WAIT_SECONDS)
    assert (result.good, result.reason) == (0, MissReason.TIER_DOWN)
    assert not tier.healthy().readable
    assert events.total("kvstore_ssd_errors_total", operation="thread") == 1
    monkeypatch.undo()
    assert_reads_back(tier, built, place)
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_a_bug_in_the_writer_answers_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = recovered_ssd(tmp_path)
    builder = registered(tier)
    monkeypatch.setattr("kvstore.tiers.ssd.writer.stamp", raising(ZeroDivisionError))
    answers = results(tier, builder.frame(1), builder.frame(1))
    assert [answer.location for answer in answers] == [None, None]
    monkeypatch.undo()
    (late,) = results(tier, builder.frame(1))
    assert late.location is None
    assert tier._running is not None
    tier._running.writer_thread.join(WAIT_SECONDS)
    assert not tier.healthy().writable
    assert "kvstore-ssd-write" in tier.healthy().detail
    tier.close(deadline_seconds=WAIT_SECONDS)


def raising(error: type[Exception]) -> Callable[..., None]:
    def call(*args: object, **options: object) -> None:
        raise error("broken on purpose")

    return call
