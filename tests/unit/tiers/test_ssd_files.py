"""Memory, file systems and segments of all kinds: what the tier makes of them while it runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from kvstore.clock import ManualClock
from kvstore.testing.frames import payloads_of, read_of
from kvstore.testing.tier_suite import assert_reads_back, found_frames, registered, written
from kvstore.tiers.base import PartImage
from kvstore.tiers.fs import OsFileSystem
from tests.support.crash_fs import CrashFileSystem
from tests.support.ssd import MIB, open_ssd, recovered_ssd

WAIT_SECONDS = 30.0


def test_a_namespace_is_durable_with_its_first_frame_and_known_without_the_disk(tmp_path: Path) -> None:
    fs = CrashFileSystem()
    tier = recovered_ssd(tmp_path, fs=fs)
    calls = fs.calls
    builder = registered(tier)
    assert fs.calls - calls <= 1, "only the keeper looks at the free space"
    written(tier, [builder.frame(1)])
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = open_ssd(tmp_path, fs=fs.reboot())
    assert len(list(again.recover())) == 1
    assert again.report().namespaces == (builder.namespace,)
    again.close(deadline_seconds=WAIT_SECONDS)


def test_memory_that_is_not_aligned_is_written_and_read_all_the_same(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    built = registered(tier).frame(5)
    shifted = replace(built.write, parts=tuple(misaligned(image) for image in built.write.parts))
    place = tier.write([shifted])[0].result(WAIT_SECONDS).location
    assert place is not None
    assert_reads_back(tier, built, place)
    read = read_of(built, place)
    room = memoryview(bytearray(5 * built.write.header.parts[0].stride_bytes + 1))[1:]
    unaligned = replace(read, into=(room,))
    result = tier.read_into([unaligned])[0].result(WAIT_SECONDS)
    assert result.good == 5
    assert payloads_of(unaligned, result.lengths) == [block.payload for block in built.blocks[0]]
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_more_slots_than_one_call_takes(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path, segment_bytes_max=64 * MIB)
    built = registered(tier).frame(1300)
    scattered = replace(built.write, parts=tuple(slot_by_slot(image) for image in built.write.parts))
    place = tier.write([scattered])[0].result(WAIT_SECONDS).location
    assert place is not None
    assert_reads_back(tier, built, place)
    tier.close(deadline_seconds=WAIT_SECONDS)


def slot_by_slot(image: PartImage) -> PartImage:
    stride = image.part.stride_bytes
    views = (view[i : i + stride] for view in image.images for i in range(0, view.nbytes, stride))
    return replace(image, images=tuple(views))


def misaligned(image: PartImage) -> PartImage:
    moved = []
    for view in image.images:
        room = memoryview(bytearray(view.nbytes + 3))[3:]
        room[:] = view
        moved.append(room)
    return replace(image, images=tuple(moved))


class BufferedFileSystem(OsFileSystem):
    """A file system that knows no direct I/O and makes no holes, as some do."""

    def open(self, path: Path, *, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return super().open(path, flags=flags)

    def punch(self, handle: int, offset: int, *, length_bytes: int) -> bool:
        return False


def test_a_file_system_without_direct_io_and_holes_will_do(tmp_path: Path) -> None:
    fs = BufferedFileSystem()
    tier = recovered_ssd(tmp_path, fs=fs)
    assert "buffered" in tier.healthy().detail
    builder = registered(tier)
    frames = [builder.frame(3), builder.frame(20)]
    places = written(tier, frames)
    assert_reads_back(tier, frames[1], places[1])
    assert tier.delete(places[:1]).result(WAIT_SECONDS) == 0
    assert "no holes" in tier.healthy().detail
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = open_ssd(tmp_path, fs=fs)
    assert [frame.location for frame in found_frames(again)] == places[1:]
    again.close(deadline_seconds=WAIT_SECONDS)


def test_segments_are_sealed_when_full_and_too_large_a_frame_gets_its_own(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path, segment_bytes_max=MIB)
    builder = registered(tier)
    frames = [builder.frame(n) for n in (30, 30, 30, 200, 1)]
    places = written(tier, frames)
    assert [place.segment for place in places] == [1, 1, 2, 3, 4]
    infos = tier.segments()
    assert [(info.segment, info.frames, info.sealed) for info in infos] == [
        (1, 2, True), (2, 1, True), (3, 1, True), (4, 1, False),
    ]  # fmt: skip
    for built, place in zip(frames, places, strict=True):
        assert_reads_back(tier, built, place)
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_a_segment_that_nobody_appends_to_is_sealed(tmp_path: Path) -> None:
    clock = ManualClock()
    tier = recovered_ssd(tmp_path, clock=clock)
    builder = registered(tier)
    written(tier, [builder.frame(1, bucket="idle")])
    clock.advance(601.0)
    for _ in range(2):
        # Idle segments are sealed behind a batch, so the second one finds it done.
        written(tier, [builder.frame(1, bucket="busy")])
    assert [(info.bucket, info.sealed) for info in tier.segments()] == [("idle", True), ("busy", False)]
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_writing_goes_on_in_a_new_segment_when_the_open_one_is_unlinked(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    builder = registered(tier)
    (first,) = written(tier, [builder.frame(1)])
    tier.unlink([first.segment, 12345]).result(WAIT_SECONDS)
    built = builder.frame(2)
    (second,) = written(tier, [built])
    assert second.segment != first.segment
    assert_reads_back(tier, built, second)
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = open_ssd(tmp_path)
    assert [frame.location for frame in found_frames(again)] == [second]
    again.close(deadline_seconds=WAIT_SECONDS)


def test_an_open_segment_emptied_by_deletions_is_removed_once_it_is_sealed(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    places = written(tier, [registered(tier).frame(2)])
    tier.delete(places).result(WAIT_SECONDS)
    assert len(tier.segments()) == 1
    tier.close(deadline_seconds=WAIT_SECONDS)
    assert list((tmp_path / "segments").iterdir()) == []


def test_open_segments_are_limited(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    builder = registered(tier)
    frames = [builder.frame(1, bucket=f"bucket-{i}") for i in range(40)]
    places = written(tier, frames)
    assert len({place.segment for place in places}) == 40
    assert sum(not info.sealed for info in tier.segments()) == 16
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = open_ssd(tmp_path)
    assert [frame.location for frame in found_frames(again)] == places
    again.close(deadline_seconds=WAIT_SECONDS)
