"""The conformance suite of the tier seam: a tier passes it or it is not a tier.

Subclass TierSuite in a test module, return a fresh or reopened tier from `open_tier`, and run pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.testing.frames import BuiltFrame, FrameBuilder, payloads_of, read_of
from kvstore.tiers.base import (
    FrameLocation,
    FrameTable,
    RecoveredFrame,
    SliceTouch,
    Tier,
    TouchNote,
    marks_of,
)
from kvstore.types import HASH_BYTES, PAGE_BYTES, MissReason, key_count

WAIT_SECONDS = 30.0
TOUCHES = (SliceTouch(0, 2, "chat", 1_700_000_500.0), SliceTouch(2, 1, "batch", 1_700_000_400.0))
"""Of a frame of three blocks: a head that outlives its tail."""


class TierSuite:
    """What every tier promises. `keeps_frames` is False for a tier that forgets them when it is closed."""

    keeps_frames = True

    def open_tier(self, directory: Path) -> Tier:
        """Return a tier over a directory, not yet recovered."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """Lend an empty, recovered tier."""
        tier = self.open_tier(tmp_path)
        assert list(tier.recover()) == []
        yield tier
        tier.close(deadline_seconds=WAIT_SECONDS)

    def test_what_was_written_is_read_back(self, tier: Tier) -> None:
        frames = [builder.frame(n) for builder in [registered(tier)] for n in (1, 5, 2)]
        for built, location in zip(frames, written(tier, frames), strict=True):
            assert_reads_back(tier, built, location)

    def test_what_is_well_is_no_loss(self, tier: Tier) -> None:
        written(tier, [registered(tier).frame(3)])
        assert tier.losses() == []
        assert tier.healthy().writable

    def test_a_part_of_a_frame_can_be_read(self, tier: Tier) -> None:
        built = registered(tier).frame(7)
        (location,) = written(tier, [built])
        read = read_of(built, location, part=1, first=2, count=3)
        (future,) = tier.read_into([read])
        result = future.result(WAIT_SECONDS)
        assert (result.good, result.reason) == (3, None)
        assert payloads_of(read, result.lengths) == [b.payload for b in built.blocks[1][2:5]]
        assert result.digests == b"".join(b.digests for b in built.blocks[1][2:5])

    def test_another_key_is_never_a_hit(self, tier: Tier) -> None:
        built = registered(tier).frame(4)
        (location,) = written(tier, [built])
        read = read_of(built, location)
        wrong = bytes(HASH_BYTES)
        keys = read.keys[: 2 * HASH_BYTES] + wrong + read.keys[3 * HASH_BYTES :]
        asked = type(read)(read.location, read.block_count, read.parts, 0, 0, keys, read.into)
        (future,) = tier.read_into([asked])
        result = future.result(WAIT_SECONDS)
        assert (result.good, result.reason) == (2, MissReason.CORRUPT)
        assert payloads_of(read, result.lengths) == [b.payload for b in built.blocks[0][:2]]

    def test_corrupt_memory_is_not_written(self, tier: Tier) -> None:
        built = registered(tier).frame(3)
        image = built.write.parts[0].images[-1]
        image[10] ^= 1
        (future,) = tier.write([built.write])
        result = future.result(WAIT_SECONDS)
        assert result.location is None
        assert "corrupt" in result.refusal

    def test_a_frame_that_does_not_fit_together_is_refused(self, tier: Tier) -> None:
        built = registered(tier).frame(3)
        header = built.write.header
        short = type(header)(
            header.namespace,
            header.kind,
            header.parent,
            header.keys[:-1],
            header.parts,
            "agent",
            header.written_at,
        )
        with pytest.raises(KVStoreError):
            tier.write([type(built.write)(short, built.write.parts, "agent-0")])

    def test_a_namespace_comes_first(self, tier: Tier) -> None:
        with pytest.raises(KVStoreError):
            tier.write([FrameBuilder().frame(1).write])

    def test_what_was_deleted_is_gone(self, tier: Tier) -> None:
        builder = registered(tier)
        frames = [builder.frame(4) for _ in range(3)]
        places = written(tier, frames)
        tier.delete([places[1]]).result(WAIT_SECONDS)
        (future,) = tier.read_into([read_of(frames[1], places[1])])
        assert future.result(WAIT_SECONDS).good == 0
        assert_reads_back(tier, frames[0], places[0])
        assert_reads_back(tier, frames[2], places[2])
        assert tier.delete([places[1]]).result(WAIT_SECONDS) == 0

    def test_headers_say_what_was_written(self, tier: Tier) -> None:
        builder = registered(tier)
        frames = [builder.frame(n, bucket=f"b{n % 2}") for n in (3, 1, 4)]
        places = written(tier, frames)
        asked = [places[2], places[0], places[1], places[0]]
        told = tier.headers(asked).result(WAIT_SECONDS)
        assert [frame.location for frame in told if frame is not None] == asked
        headers = [frames[n].write.header for n in (2, 0, 1, 0)]
        assert [frame.header for frame in told if frame is not None] == headers
        assert tier.headers([]).result(WAIT_SECONDS) == []

    def test_what_is_gone_has_no_header(self, tier: Tier) -> None:
        builder = registered(tier)
        frames = [builder.frame(n, bucket=bucket) for n, bucket in ((2, "a"), (3, "a"), (1, "b"))]
        places = written(tier, frames)
        tier.delete([places[1]]).result(WAIT_SECONDS)
        assert [frame is not None for frame in tier.headers(places).result(WAIT_SECONDS)] == [
            True,
            False,
            True,
        ]
        tier.unlink([places[2].segment]).result(WAIT_SECONDS)
        absent = FrameLocation(places[0].segment + 1000, places[0].offset, PAGE_BYTES, PAGE_BYTES)
        told = tier.headers([*places, absent]).result(WAIT_SECONDS)
        assert [frame is not None for frame in told] == [True, False, False, False]

    def test_an_unlinked_segment_is_gone(self, tier: Tier) -> None:
        builder = registered(tier)
        first, second = builder.frame(4, bucket="a"), builder.frame(4, bucket="b")
        places = written(tier, [first, second])
        assert places[0].segment != places[1].segment
        used = tier.usage().used_bytes
        freed = tier.unlink([places[0].segment]).result(WAIT_SECONDS)
        assert freed >= places[0].length_bytes
        assert tier.usage().used_bytes == used - freed
        (future,) = tier.read_into([read_of(first, places[0])])
        assert future.result(WAIT_SECONDS).good == 0
        assert [info.segment for info in tier.segments()] == [places[1].segment]

    def test_an_unlink_that_is_not_urgent_comes_about_with_what_is(self, tier: Tier) -> None:
        builder = registered(tier)
        places = written(tier, [builder.frame(4, bucket=bucket) for bucket in "abc"])
        unlinks = [tier.unlink([place.segment], is_urgent=False) for place in places[:2]]
        tier.delete([]).result(WAIT_SECONDS)
        for unlink, place in zip(unlinks, places, strict=False):
            assert unlink.result(0) >= place.length_bytes
        alone = tier.unlink([places[2].segment], is_urgent=False)
        assert alone.result(WAIT_SECONDS) >= places[2].length_bytes
        assert tier.segments() == []

    def test_usage_counts_what_was_written(self, tier: Tier) -> None:
        frames = [registered(tier).frame(6)]
        (location,) = written(tier, frames)
        usage = tier.usage()
        assert usage.queued_bytes == 0
        assert usage.written_bytes == location.length_bytes
        assert usage.used_bytes >= location.length_bytes
        assert usage.used_bytes == sum(info.bytes for info in tier.segments())
        assert usage.segments == len(tier.segments()) == 1
        assert tier.sealed_bytes() == {info.segment: info.bytes for info in tier.segments() if info.sealed}

    def test_frames_are_found_again(self, tmp_path: Path) -> None:
        if not self.keeps_frames:
            pytest.skip("this tier promises nothing after it was closed")
        tier = self.open_tier(tmp_path)
        list(tier.recover())
        builder = registered(tier)
        frames = [builder.frame(n, bucket=f"b{n % 2}") for n in (3, 1, 4)]
        places = written(tier, frames)
        whole = SliceTouch.whole("chat", 1_700_000_500.0)
        tier.annotate([TouchNote(places[0], TOUCHES), TouchNote(places[1], (whole,))])
        tier.delete([places[2]]).result(WAIT_SECONDS)
        tier.close(deadline_seconds=WAIT_SECONDS)
        again = self.open_tier(tmp_path)
        found = found_frames(again)
        assert {frame.location for frame in found} == set(places[:2])
        self._check_found(found, frames[0], places[0], TOUCHES)
        self._check_found(found, frames[1], places[1], (SliceTouch(0, 1, "chat", 1_700_000_500.0),))
        assert again.headers([frame.location for frame in found]).result(WAIT_SECONDS) == found
        assert again.headers(places[2:]).result(WAIT_SECONDS) == [None]
        assert again.report().frames == 2
        assert again.report().blocks == 4
        assert [n.fingerprint for n in again.report().namespaces] == [builder.namespace.fingerprint]
        assert_reads_back(again, frames[0], places[0])
        assert_reads_back(again, frames[1], places[1])
        again.close(deadline_seconds=WAIT_SECONDS)

    def _check_found(
        self,
        found: list[RecoveredFrame],
        built: BuiltFrame,
        place: FrameLocation,
        touches: tuple[SliceTouch, ...],
    ) -> None:
        (frame,) = [frame for frame in found if frame.location == place]
        assert frame.header == built.write.header
        assert frame.touches == touches

    def test_close_is_idempotent_and_ends_the_writing(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path)
        list(tier.recover())
        builder = registered(tier)
        places = written(tier, [builder.frame(1)])
        tier.close(deadline_seconds=WAIT_SECONDS)
        tier.close(deadline_seconds=WAIT_SECONDS)
        (future,) = tier.write([builder.frame(1).write])
        assert future.result(WAIT_SECONDS).location is None
        assert tier.headers(places).result(WAIT_SECONDS) == [None]


def registered(tier: Tier, *, seed: int = 0) -> FrameBuilder:
    """Return a builder whose namespace the tier knows."""
    builder = FrameBuilder(seed=seed)
    tier.register(builder.namespace)
    tier.register(builder.namespace)
    return builder


def found_frames(tier: Tier) -> list[RecoveredFrame]:
    """Recover a tier; of frames in tables the headers are asked, and both must say the same."""
    found: list[RecoveredFrame] = []
    tables: list[tuple[int, FrameTable]] = []
    for item in tier.recover():
        if isinstance(item, FrameTable):
            tables.append((len(found), item))
        else:
            found.append(item)
    # From the last on, so that a table's frames can be put in its place.
    for at, table in reversed(tables):
        found[at:at] = frames_of_table(tier, table)
    return found


def frames_of_table(tier: Tier, table: FrameTable) -> list[RecoveredFrame]:
    """Return the frames of a table as the tier tells them one by one; a row must say what its frame does."""
    rows = [dict(zip(table.rows.dtype.names or (), row, strict=True)) for row in table.rows.tolist()]
    places = [
        FrameLocation(table.segment, row["offset"], row["header_bytes"], row["length_bytes"]) for row in rows
    ]
    told = tier.headers(places).result(WAIT_SECONDS)
    frames = [frame for frame in told if frame is not None]
    assert [frame.location for frame in frames] == places
    for number, (row, frame) in enumerate(zip(rows, frames, strict=True)):
        header, shape = frame.header, table.shapes[row["shape"]]
        starts = (header.keys, header.keys[-HASH_BYTES:], header.parent)
        assert [row["head"], row["tail"], row["parent"]] == [int.from_bytes(s[:8], "little") for s in starts]
        assert (row["count"], row["written_at"]) == (key_count(header.keys), header.written_at)
        assert (shape.namespace, shape.kind, shape.parts) == (header.namespace, header.kind, header.parts)
        assert (shape.retention_class, shape.provenance) == (header.retention_class, header.provenance)
        assert table.touches.get(number, ()) == frame.touches
    assert table.marks.tolist() == marks_of(b"".join(frame.header.keys for frame in frames)).tolist()
    return frames


def written(tier: Tier, frames: list[BuiltFrame]) -> list[FrameLocation]:
    """Write frames and return where they are, once all are durable."""
    results = [future.result(WAIT_SECONDS) for future in tier.write([built.write for built in frames])]
    places = [result.location for result in results if result.location is not None]
    assert len(places) == len(frames), [result.refusal for result in results]
    return places


def assert_reads_back(tier: Tier, built: BuiltFrame, location: FrameLocation) -> None:
    """Read a whole frame and compare every byte, length and digest."""
    reads = [read_of(built, location, part=part) for part in range(len(built.blocks))]
    for read, future, blocks in zip(reads, tier.read_into(reads), built.blocks, strict=True):
        result = future.result(WAIT_SECONDS)
        assert (result.good, result.reason, result.detail) == (built.count, None, "")
        assert payloads_of(read, result.lengths) == [block.payload for block in blocks]
        assert result.digests == b"".join(block.digests for block in blocks)
