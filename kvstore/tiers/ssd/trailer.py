"""Record trailers: the 256 bytes behind a payload that say what it is. Stamped and checked many at a time.

A record is the image of a slot: payload at offset 0, trailer in the last 256 bytes of the stride.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.layout import Part
from kvstore.tiers.base import FrameHeader, PartImage
from kvstore.tiers.ssd.crypto import FrameSeal, RecordOpener, RecordSealer
from kvstore.tiers.ssd.crypto_keys import KeyState
from kvstore.tiers.ssd.format import CODEC_NONE, KEY_NONE, StoredPart
from kvstore.types import DIGEST_BYTES, HASH_BYTES, SEGMENTS_MAX, TRAILER_BYTES

TRAILER_VERSION = 1
TRAILER_MAGIC = int.from_bytes(b"KVRT", "little")
_CHECKED_BYTES = TRAILER_BYTES - 8
_FIELDS: tuple[tuple[str, Any, int], ...] = (
    ("magic", "<u4", 0),
    ("version", "<u2", 4),
    ("segments", "u1", 6),
    ("key", ("u1", HASH_BYTES), 8),
    ("length", "<u4", 40),
    ("provenance", "<u4", 44),
    ("written_at", "<f8", 48),
    ("part", "<u2", 56),
    ("codec", "<u2", 58),
    ("key_id", "<u4", 60),
    ("class", "S32", 64),
    ("digests", ("u1", DIGEST_BYTES * SEGMENTS_MAX), 96),
    ("serial", "<u4", 224),
    ("key_check", "<u4", 228),
    ("tag", ("u1", 16), 232),
    ("checksum", "<u8", _CHECKED_BYTES),
)
TRAILER = np.dtype(
    {
        "names": [name for name, _, _ in _FIELDS],
        "formats": [kind for _, kind, _ in _FIELDS],
        "offsets": [offset for _, _, offset in _FIELDS],
        "itemsize": TRAILER_BYTES,
    }
)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RecordShape:
    """How the records of one part are cut; `ranges` are (offset, end) of its segments."""

    part: int
    bytes_max: int
    stride_bytes: int
    ranges: tuple[tuple[int, int], ...]


def shape_of(part: Part | StoredPart) -> RecordShape:
    """Return the record shape of a part, from a layout or from disk."""
    if isinstance(part, StoredPart):
        ends = np.cumsum(part.segment_lengths).tolist()
        ranges = tuple(zip([0, *ends[:-1]], ends, strict=True))
        return RecordShape(part.index, part.bytes_max, part.stride_bytes, ranges)
    ranges = tuple((s.offset, s.offset + s.length) for s in part.segments)
    return RecordShape(part.index, part.bytes_max, part.stride_bytes, ranges)


def stamp(image: PartImage, header: FrameHeader) -> None:
    """Write the trailers of all records of a part into the padding of their slots."""
    trailers = _build(image, header)
    stride = image.part.stride_bytes
    done = 0
    for view in image.images:
        rows = np.frombuffer(view, np.uint8).reshape(-1, stride)
        rows[:, -TRAILER_BYTES:] = trailers[done : done + len(rows)]
        done += len(rows)


def sealed(
    image: PartImage, header: FrameHeader, seal: FrameSeal, *, buffer: memoryview
) -> Iterator[memoryview]:
    """Yield the encrypted records of a part, as many at a time as the buffer holds; the slots stay untouched.

    Shapes: buffer: at least one record.
    """
    trailers = _build(image, header, seal)
    sealer = RecordSealer(seal)
    stride = image.part.stride_bytes
    block, filled = 0, 0
    for view in image.images:
        for start in range(0, view.nbytes, stride):
            if filled + stride > buffer.nbytes:
                yield buffer[:filled]
                filled = 0
            body = view[start : start + stride - TRAILER_BYTES]
            into = buffer[filled : filled + stride]
            sealer.seal(body, trailers[block].data, into, part=image.part.index, block=block)
            block, filled = block + 1, filled + stride
    yield buffer[:filled]


def _build(image: PartImage, header: FrameHeader, seal: FrameSeal | None = None) -> Bytes:
    segments = len(image.part.segments)
    count = len(header.keys) // HASH_BYTES
    table = np.zeros(count, TRAILER)
    table["magic"] = TRAILER_MAGIC
    table["version"] = TRAILER_VERSION
    table["segments"] = segments
    table["key"] = np.frombuffer(header.keys, np.uint8).reshape(count, HASH_BYTES)
    table["length"] = np.frombuffer(image.lengths, "<u4")
    table["provenance"] = header.provenance
    table["written_at"] = header.written_at
    table["part"] = image.part.index
    table["codec"] = CODEC_NONE
    table["key_id"] = KEY_NONE
    if seal is not None:
        table["key_id"], table["key_check"] = seal.key.key_id, seal.key.check
        table["serial"] = seal.serial
    table["class"] = header.retention_class.encode()
    width = segments * DIGEST_BYTES
    table["digests"][:, :width] = np.frombuffer(image.digests, np.uint8).reshape(count, width)
    table["checksum"] = _checksums(table)
    return table.view(np.uint8).reshape(count, TRAILER_BYTES)


def _checksums(table: npt.NDArray[np.void]) -> list[int]:
    flat = memoryview(table.tobytes())
    sums = xxhash.xxh3_64_intdigest
    return [sums(flat[i : i + _CHECKED_BYTES]) for i in range(0, len(flat), TRAILER_BYTES)]


def bad_payload(image: PartImage) -> int:
    """Return the number of the first record whose payload does not have its digests, or -1."""
    shape = shape_of(image.part)
    lengths = np.frombuffer(image.lengths, "<u4").tolist()
    done = 0
    for view in image.images:
        count = view.nbytes // shape.stride_bytes
        digests = image.digests[done * _width(shape) : (done + count) * _width(shape)]
        good = _good_payloads(view, shape, lengths=lengths[done : done + count], digests=digests)
        done += good
        if good < count:
            return done
    return -1


@dataclass(frozen=True, slots=True)
class Checked:
    """How many records from the start are intact, and what they say. `fault` tells what stopped the rest.

    `key` is set where the next record cannot be decrypted here; `framed` then tells how many records from the
    start have a trailer that is right.

    Shapes: lengths u32[good]; digests 16 x segments x good, packed.
    """

    good: int
    lengths: bytes
    digests: bytes
    fault: str = ""
    key: KeyState | None = None
    framed: int = 0


def check_records(
    views: Sequence[memoryview], shape: RecordShape, *, keys: bytes, opener: RecordOpener
) -> Checked:
    """Check trailers, decrypt, check payload digests of records in memory; stops at the first bad one."""
    lengths: list[bytes] = []
    digests: list[bytes] = []
    done = 0
    fault, state, framed = "", None, 0
    for view in views:
        count = view.nbytes // shape.stride_bytes
        some = keys[done * HASH_BYTES : (done + count) * HASH_BYTES]
        found = _check_image(view, shape, keys=some, opener=opener)
        lengths.append(found.lengths)
        digests.append(found.digests)
        framed = done + found.framed
        done += found.good
        if found.good < count:
            fault, state = f"record {done} of part {shape.part}: {found.fault}", found.key
            break
    return Checked(done, b"".join(lengths), b"".join(digests), fault, state, framed)


def _check_image(view: memoryview, shape: RecordShape, *, keys: bytes, opener: RecordOpener) -> Checked:
    rows = np.frombuffer(view, np.uint8).reshape(-1, shape.stride_bytes)
    trailers = rows[:, -TRAILER_BYTES:].copy()
    table = trailers.view(TRAILER).reshape(-1)
    wanted = np.frombuffer(keys, np.uint8).reshape(-1, HASH_BYTES)
    framed, fault = _good_trailers(table, shape, wanted)
    good = framed
    opened = opener.open(rows[:good], trailers[:good], table[:good])
    if opened.good < good:
        good, fault = opened.good, opened.fault
    width = _width(shape)
    lengths = table["length"][:good]
    digests = np.ascontiguousarray(table["digests"][:good, :width]).tobytes()
    intact = _good_payloads(view, shape, lengths=lengths.tolist(), digests=digests)
    if intact < good:
        return Checked(
            intact, lengths[:intact].astype("<u4").tobytes(), digests[: intact * width],
            "payload does not match its digest",
        )  # fmt: skip
    return Checked(good, lengths.astype("<u4").tobytes(), digests, fault, opened.state, framed)


def _good_trailers(table: npt.NDArray[np.void], shape: RecordShape, keys: Bytes) -> tuple[int, str]:
    tests = (
        ("no trailer here", table["magic"] == TRAILER_MAGIC),
        ("a trailer of an unknown version", table["version"] == TRAILER_VERSION),
        ("trailer checksum does not match", table["checksum"] == np.array(_checksums(table), np.uint64)),
        ("another key", (table["key"] == keys).all(axis=1)),
        ("another part", (table["part"] == shape.part) & (table["segments"] == len(shape.ranges))),
        ("payload too long", table["length"] <= shape.bytes_max),
        ("stored with a codec that this build does not know", table["codec"] == CODEC_NONE),
    )
    good, fault = len(table), ""
    for name, passed in tests:
        # The earliest record decides; of several faults in one record the first test names it.
        first = len(table) if passed.all() else int(np.argmin(passed))
        if first < good:
            good, fault = first, name
    return good, fault


def _good_payloads(view: memoryview, shape: RecordShape, *, lengths: Sequence[int], digests: bytes) -> int:
    """Return how many payloads from the start have their digests; record by record, while in cache."""
    digest = xxhash.xxh3_128_digest
    at = 0
    for index, length in enumerate(lengths):
        base = index * shape.stride_bytes
        for offset, end in shape.ranges:
            stop = min(end, length)
            if digest(view[base + offset : base + max(stop, offset)]) != digests[at : at + DIGEST_BYTES]:
                return index
            at += DIGEST_BYTES
    return len(lengths)


def _width(shape: RecordShape) -> int:
    return len(shape.ranges) * DIGEST_BYTES
