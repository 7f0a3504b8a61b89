"""Encrypted records: what was written comes back, nothing else does, and what lies on disk tells nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.events import Events
from kvstore.testing.frames import BuiltFrame, FrameBuilder, read_of, slots, two_part_namespace
from kvstore.testing.tier_suite import assert_reads_back
from kvstore.tiers.base import FrameLocation, ReadResult
from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.ssd import SsdTier, crypto
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyTable, TenantKey, tenant_key
from kvstore.tiers.ssd.scan import Found, Scanner
from kvstore.tiers.ssd.trailer import check_records, sealed, shape_of
from kvstore.types import PAGE_BYTES, MissReason
from tests.support.ssd import recovered_ssd

WAIT_SECONDS = 30.0
FIRST, SECOND = tenant_key(1, b"\x11" * 32), tenant_key(2, b"\x22" * 32)


class Keys:
    """A key table that a test changes, and the ring over it."""

    def __init__(self, *keys: TenantKey, tenant: str = "", **options: bool) -> None:
        self.table = KeyTable({tenant: keys} if keys else {})
        self.ring = KeyRing(lambda: self.table, **options)

    def set(self, *keys: TenantKey, tenant: str = "") -> None:
        self.table = KeyTable({tenant: keys})
        self.ring.reload()


def store(tier: SsdTier, *frames: BuiltFrame) -> list[FrameLocation]:
    """Write frames and return where they are."""
    results = [future.result(WAIT_SECONDS) for future in tier.write([built.write for built in frames])]
    assert all(result.location for result in results), results
    return [result.location for result in results if result.location is not None]


def read(tier: SsdTier, built: BuiltFrame, location: FrameLocation, *, part: int = 0) -> ReadResult:
    (future,) = tier.read_into([read_of(built, location, part=part)])
    return future.result(WAIT_SECONDS)


def segment_file(directory: Path) -> Path:
    (path,) = (directory / "segments").glob("*.seg")
    return path


@pytest.fixture
def builder() -> FrameBuilder:
    return FrameBuilder()


def closed_store(
    directory: Path, builder: FrameBuilder, keys: Keys, *sizes: int
) -> list[tuple[BuiltFrame, FrameLocation]]:
    """Write frames of these sizes into one segment and close the tier."""
    tier = recovered_ssd(directory, keys=keys.ring)
    tier.register(builder.namespace)
    frames = [builder.frame(size) for size in sizes]
    places = store(tier, *frames)
    tier.close(deadline_seconds=WAIT_SECONDS)
    return list(zip(frames, places, strict=True))


def test_it_comes_back_and_the_disk_shows_nothing(tmp_path: Path, builder: FrameBuilder) -> None:
    keys = Keys(FIRST)
    tier = recovered_ssd(tmp_path, keys=keys.ring)
    tier.register(builder.namespace)
    built = builder.frame(7)
    slots_before = [bytes(view) for image in built.write.parts for view in image.images]
    (place,) = store(tier, built)
    assert [bytes(view) for image in built.write.parts for view in image.images] == slots_before
    assert_reads_back(tier, built, place)
    tier.close(deadline_seconds=WAIT_SECONDS)
    stored = segment_file(tmp_path).read_bytes()
    for block in itertools.chain.from_iterable(built.blocks):
        assert len(block.payload) < 16 or block.payload[:16] not in stored
        assert block.digests[:16] not in stored
    assert b"\xaa" * 16 not in stored, "what the slots held behind the payload"
    again = recovered_ssd(tmp_path, keys=keys.ring)
    assert_reads_back(again, built, place)
    again.close(deadline_seconds=WAIT_SECONDS)


def test_part_of_a_frame_can_be_read(tmp_path: Path, builder: FrameBuilder) -> None:
    keys = Keys(FIRST)
    ((built, place),) = closed_store(tmp_path, builder, keys, 9)
    tier = recovered_ssd(tmp_path, keys=keys.ring)
    (future,) = tier.read_into([read_of(built, place, part=1, first=4, count=3)])
    result = future.result(WAIT_SECONDS)
    assert (result.good, result.reason) == (3, None)
    assert result.digests == b"".join(block.digests for block in built.blocks[1][4:7])
    tier.close(deadline_seconds=WAIT_SECONDS)


def _swap(path: Path, one: int, other: int, size: int) -> None:
    content = bytearray(path.read_bytes())
    content[one : one + size], content[other : other + size] = (
        content[other : other + size],
        content[one : one + size],
    )
    path.write_bytes(content)


def test_two_whole_frames_that_change_places_are_refused(tmp_path: Path, builder: FrameBuilder) -> None:
    """The tag covers where a frame lies: bytes that were moved are not taken for what lies there."""
    keys = Keys(FIRST)
    (one, here), (two, there) = closed_store(tmp_path, builder, keys, 3, 3)
    assert here.length_bytes == there.length_bytes
    _swap(segment_file(tmp_path), here.offset, there.offset, here.length_bytes)
    tier = recovered_ssd(tmp_path, keys=keys.ring)
    for built, place in ((one, there), (two, here)):
        result = read(tier, built, place)
        assert (result.good, result.reason) == (0, MissReason.CORRUPT)
        assert "authenticate" in result.detail
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_two_records_with_the_same_key_that_change_places_are_refused(
    tmp_path: Path, builder: FrameBuilder
) -> None:
    keys = Keys(FIRST)
    built = builder.frame(2)
    same = replace(built.write.header, keys=built.keys[:32] * 2)
    tier = recovered_ssd(tmp_path, keys=keys.ring)
    tier.register(builder.namespace)
    twice = replace(built, write=replace(built.write, header=same))
    (place,) = store(tier, twice)
    tier.close(deadline_seconds=WAIT_SECONDS)
    stride = same.parts[0].stride_bytes
    start = place.offset + place.header_bytes
    _swap(segment_file(tmp_path), start, start + stride, stride)
    tier = recovered_ssd(tmp_path, keys=keys.ring)
    assert read(tier, twice, place).reason is MissReason.CORRUPT
    tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize("at", ["payload", "padding", "digests", "length", "serial", "check", "tag", "class"])
def test_a_flipped_bit_is_refused(tmp_path: Path, builder: FrameBuilder, at: str) -> None:
    """Also when the trailer's checksum, which anybody can compute, is put right."""
    keys = Keys(FIRST)
    ((built, place),) = closed_store(tmp_path, builder, keys, 1)
    stride = built.write.header.parts[0].stride_bytes
    start = place.offset + place.header_bytes
    trailer = stride - 256
    offsets = {"payload": 17, "padding": trailer - 1, "digests": trailer + 100, "length": trailer + 40,
               "serial": trailer + 224, "check": trailer + 228, "tag": trailer + 235,
               "class": trailer + 70}  # fmt: skip
    path = segment_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[start + offsets[at]] ^= 4
    end = start + stride
    content[end - 8 : end] = xxhash.xxh3_64_intdigest(content[end - 256 : end - 8]).to_bytes(8, "little")
    path.write_bytes(content)
    events = Events()
    tier = recovered_ssd(tmp_path, keys=keys.ring, events=events)
    result = read(tier, built, place)
    wanted = MissReason.TIER_DOWN if at == "check" else MissReason.CORRUPT
    assert (result.good, result.reason) == (0, wanted)
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_no_nonce_is_used_twice_with_one_key(
    tmp_path: Path, builder: FrameBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither over frames, parts and segments, nor when a frame is taken back and another takes its place."""
    seen: set[tuple[bytes, bytes]] = set()
    derive = crypto._frame_cipher

    def watched(
        secret: bytes, place: crypto.FramePlace, serial: int
    ) -> Callable[[bytes, bytes | None], object]:
        made = derive(secret, place, serial)

        def cipher(nonce: bytes, tag: bytes | None) -> object:
            if tag is None:
                use = (secret + place.segment_id + serial.to_bytes(4, "little"), nonce)
                assert use not in seen
                seen.add(use)
            return made(nonce, tag)

        return cipher

    monkeypatch.setattr(crypto, "_frame_cipher", watched)
    keys = Keys(FIRST)
    fs = FailingSync()
    tier = recovered_ssd(tmp_path, keys=keys.ring, fs=fs, segment_bytes_max=1 << 18)
    tier.register(builder.namespace)
    records = 0
    for turn in range(12):
        fs.fails = turn % 3 == 2
        frames = [builder.frame(3, bucket=bucket) for bucket in "abab"]
        for future in tier.write([built.write for built in frames]):
            future.result(WAIT_SECONDS)
        records += 4 * 3 * 2
    fs.fails = False
    tier.close(deadline_seconds=WAIT_SECONDS)
    assert records * 0.5 < len(seen) <= records
    assert fs.failures > 1


class FailingSync(OsFileSystem):
    """A disk that refuses every other sync when told so: of two files in one batch the first one lives on."""

    fails = False
    failures = 0

    def fdatasync(self, handle: int) -> None:
        """Fail on demand."""
        self.failures += self.fails
        if self.fails and self.failures % 2 == 0:
            raise OSError(5, "input/output error")
        super().fdatasync(handle)


def test_a_frame_taken_back_gets_another_serial(tmp_path: Path, builder: FrameBuilder) -> None:
    """A second frame at the same place of the same segment has another key, and so other bytes."""
    seal = crypto.FrameSeal(FIRST, crypto.FramePlace(b"s" * 16, PAGE_BYTES), 1)
    one, two = (bytearray(PAGE_BYTES) for _ in range(2))
    for serial, into in ((1, one), (2, two)):
        sealer = crypto.RecordSealer(replace(seal, serial=serial))
        sealer.seal(
            memoryview(bytes(PAGE_BYTES - 256)), memoryview(bytes(256)), memoryview(into), part=0, block=0
        )
    assert one[:3000] != two[:3000]


@settings(deadline=None)
@given(st.integers(0, 2), st.integers(0, 8191), st.integers(0, 7), st.booleans())
def test_any_flipped_bit_of_a_frame_is_noticed(
    block: int, at: int, bit: int, puts_checksum_right: bool
) -> None:
    """Whatever is flipped, and whoever puts the checksum right: the record is not taken for good."""
    built = FrameBuilder(seed=3).frame(3, full=True)
    image, header = built.write.parts[0], built.write.header
    place = crypto.FramePlace(b"s" * 16, PAGE_BYTES)
    stride = image.part.stride_bytes
    (piece,) = sealed(image, header, crypto.FrameSeal(FIRST, place, 1), buffer=slots(image.part, 3))
    assert stride == 8192
    record = piece[block * stride : (block + 1) * stride]
    record[at] ^= 1 << bit
    if puts_checksum_right:
        record[-8:] = xxhash.xxh3_64_intdigest(record[-256:-8]).to_bytes(8, "little")
    opener = crypto.RecordOpener(Keys(FIRST).ring, place, first=0)
    checked = check_records([piece], shape_of(image.part), keys=header.keys, opener=opener)
    # A flipped checksum that was put right again is none.
    assert checked.good == (3 if puts_checksum_right and at >= stride - 8 else block)
    assert checked.digests == b"".join(block.digests for block in built.blocks[0][: checked.good])


def test_rotation(tmp_path: Path, builder: FrameBuilder) -> None:
    """New frames use the newest key, old ones are read while theirs is there."""
    keys = Keys(FIRST)
    tier = recovered_ssd(tmp_path, keys=keys.ring)
    tier.register(builder.namespace)
    old, new = builder.frame(2), builder.frame(2)
    (there,) = store(tier, old)
    keys.set(SECOND, FIRST)
    (here,) = store(tier, new)
    assert_reads_back(tier, old, there)
    assert_reads_back(tier, new, here)
    assert key_ids(segment_file(tmp_path)) == [1, 2]
    keys.set(SECOND)
    assert read(tier, old, there).reason is MissReason.TIER_DOWN
    assert_reads_back(tier, new, here)
    keys.set(SECOND, FIRST)
    assert_reads_back(tier, old, there)
    tier.close(deadline_seconds=WAIT_SECONDS)


def key_ids(path: Path) -> list[int]:
    """Return the key id of every frame of a segment, as its header tells it."""
    fs = OsFileSystem()
    handle = fs.open(path, flags=0)
    scanner = Scanner(fs)
    pieces = list(
        scanner.pieces(
            handle,
            segment_id=scanner.header(handle).identity,
            start=PAGE_BYTES,
            size_bytes=path.stat().st_size,
        )
    )
    fs.close(handle)
    return [piece.frame.key_id for piece in pieces if piece.found is Found.FRAME and piece.frame is not None]


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("kept", ["none", "wrong"])
def test_frames_whose_key_is_not_at_hand_are_left_alone(
    tmp_path: Path, builder: FrameBuilder, kept: str, has_index: bool, is_sealed: bool
) -> None:
    keys = Keys(FIRST)
    ((built, place),) = closed_store(tmp_path, builder, keys, 3)
    path = segment_file(tmp_path)
    if not is_sealed:
        path.write_bytes(path.read_bytes()[:-PAGE_BYTES])
    if not has_index or not is_sealed:
        for file in (tmp_path / "index").iterdir():
            file.unlink()
    wrong = Keys(tenant_key(1, b"other" * 6 + b"xx")) if kept == "wrong" else None
    tier = recovered_ssd(tmp_path, keys=wrong.ring if wrong else None)
    report = tier.report()
    assert (report.frames, report.frames_dropped) == (0, 0)
    state = "wrong" if wrong else "missing"
    assert report.unknown_files == (f"segments/{path.name}: frames encrypted with key 1, which is {state}",)
    assert tier.usage().used_bytes == tier.segments()[0].bytes > built.write.header.parts[0].bytes_max
    assert read(tier, built, place).reason is MissReason.TIER_DOWN
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = recovered_ssd(tmp_path, keys=keys.ring)
    assert again.report().frames == 1
    assert_reads_back(again, built, place)
    again.close(deadline_seconds=WAIT_SECONDS)


def test_a_torn_tail_is_cut_without_the_keys_as_well(tmp_path: Path, builder: FrameBuilder) -> None:
    keys = Keys(FIRST)
    (one, here), (_, there) = closed_store(tmp_path, builder, keys, 3, 3)
    path = segment_file(tmp_path)
    path.write_bytes(
        path.read_bytes()[: there.offset + there.length_bytes - 2 * PAGE_BYTES] + bytes(2 * PAGE_BYTES)
    )
    for file in (tmp_path / "index").iterdir():
        file.unlink()
    recovered_ssd(tmp_path).close(deadline_seconds=WAIT_SECONDS)
    tier = recovered_ssd(tmp_path, keys=keys.ring)
    assert tier.report().frames == 1
    assert_reads_back(tier, one, here)
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_shredding_makes_frames_misses_at_once_and_the_next_start_deletes_them(
    tmp_path: Path, builder: FrameBuilder
) -> None:
    keys, events = Keys(FIRST), Events()
    tier = recovered_ssd(tmp_path, keys=keys.ring, events=events)
    tier.register(builder.namespace)
    built, fresh = builder.frame(3), builder.frame(3)
    (place,) = store(tier, built)
    keys.set(TenantKey(1))
    assert read(tier, built, place).reason is MissReason.DELETED
    refused = tier.write([fresh.write])[0].result(WAIT_SECONDS)
    assert refused.location is None
    assert "no living key" in refused.refusal
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = recovered_ssd(tmp_path, keys=keys.ring)
    assert (again.report().frames, again.report().frames_dropped) == (0, 1)
    again.sync_index().result(WAIT_SECONDS)
    assert again.segments() == []
    again.close(deadline_seconds=WAIT_SECONDS)
    # The key coming back changes nothing: the frames are gone.
    last = recovered_ssd(tmp_path, keys=Keys(FIRST).ring)
    assert (last.report().frames, last.report().unknown_files) == (0, ())
    last.close(deadline_seconds=WAIT_SECONDS)


def test_a_tenant_without_a_key_is_not_stored(tmp_path: Path) -> None:
    keys = Keys(FIRST, tenant="acme")
    acme, other = (
        FrameBuilder(namespace=replace(two_part_namespace(), tenant=tenant)) for tenant in ("acme", "other")
    )
    tier = recovered_ssd(tmp_path, keys=keys.ring)
    tier.register(acme.namespace)
    tier.register(other.namespace)
    frames = [other.frame(1), acme.frame(1)]
    one, two = (future.result(WAIT_SECONDS) for future in tier.write([built.write for built in frames]))
    assert (one.location, one.refusal) == (None, "encryption: tenant 'other' has no key")
    assert two.location is not None, "the next tenant's frame does not suffer"
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_tenants_may_share_the_default_key(tmp_path: Path, builder: FrameBuilder) -> None:
    table = KeyTable({}, default=(FIRST,))
    ring = KeyRing(lambda: table, shares_default=True)
    tier = recovered_ssd(tmp_path, keys=ring)
    tier.register(builder.namespace)
    built = builder.frame(2)
    (place,) = store(tier, built)
    assert_reads_back(tier, built, place)
    assert key_ids(segment_file(tmp_path)) == [1]
    tier.close(deadline_seconds=WAIT_SECONDS)


def test_plain_and_encrypted_frames_live_side_by_side(tmp_path: Path, builder: FrameBuilder) -> None:
    """Encryption may be turned on for a store that has plain frames, and off again while its keys stay."""
    plain = recovered_ssd(tmp_path)
    plain.register(builder.namespace)
    built = [builder.frame(2) for _ in range(3)]
    places = store(plain, built[0])
    plain.close(deadline_seconds=WAIT_SECONDS)
    tier = recovered_ssd(tmp_path, keys=Keys(FIRST).ring)
    places += store(tier, built[1])
    tier.close(deadline_seconds=WAIT_SECONDS)
    tier = recovered_ssd(tmp_path, keys=Keys(FIRST, encrypts=False).ring)
    places += store(tier, built[2])
    for frame, place in zip(built, places, strict=True):
        assert_reads_back(tier, frame, place)
    tier.close(deadline_seconds=WAIT_SECONDS)
    found = [key_ids(path) for path in sorted((tmp_path / "segments").glob("*.seg"))]
    assert found == [[0], [1], [0]]
