"""The bytes of the disk format, version 1: pages at the ends of segments and headers of frames.

FORMAT.md has the tables. Little-endian throughout. Nothing here does I/O. Record trailers are in `trailer`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvstore.errors import InvalidArgument
from kvstore.layout import Part
from kvstore.tiers.base import FrameHeader, FrameKind, FrameWrite
from kvstore.types import HASH_BYTES, PAGE_BYTES, SEGMENTS_MAX, BlockHash, Fingerprint, round_up

FORMAT_VERSION = 1
CLASS_BYTES = 32
BUCKET_BYTES = 64
ID_BYTES = 16
CHECKSUM_BYTES = 16
TOMBSTONE_BYTES = 512
"""A tombstone lies in one disk sector, so that a torn write leaves either the frame or the tombstone."""
CODEC_NONE = 0
KEY_NONE = 0

SEGMENT_MAGIC = b"KVSEGMNT"
FRAME_MAGIC = b"KVFRAME\0"
TOMBSTONE_MAGIC = b"KVTOMBST"
SEAL_MAGIC = b"KVSEALED"

# magic, version, kind, reserved, header_bytes, length_bytes, segment id, sequence: the same in every version
# of frames, tombstones and seals, so that a build can step over what it does not know.
_PREFIX = struct.Struct("<8sHBBIQ16sQ")
# namespace, parent, blocks, parts, -, written_at, provenance, codec, -, key id, -, class, bucket, check,
# touched_at, -
_FRAME = struct.Struct("<32s32sIHHdIHHII32s64sId4x")
_PART = struct.Struct("<HBBII8I")
_SEGMENT = struct.Struct("<8sHHI16s16sdQ64s")
_SEAL = struct.Struct("<QQd")
_TOMBSTONE = struct.Struct("<d")


class FormatError(Exception):
    """These bytes are not what should be here; `version` is set when it is one this build does not know."""

    def __init__(self, message: str, *, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First page of a segment file. Units: created_at is wall time in seconds."""

    number: int
    identity: bytes
    store: bytes
    bucket: str
    created_at: float


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part as a frame header tells it: enough to find and check every record without the namespace."""

    index: int
    bytes_max: int
    stride_bytes: int
    segment_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """A frame header as it lies on disk."""

    segment_id: bytes
    sequence: int
    header_bytes: int
    length_bytes: int
    kind: FrameKind
    namespace: Fingerprint
    parent: BlockHash
    keys: bytes
    parts: tuple[StoredPart, ...]
    retention_class: str
    bucket: str
    written_at: float
    provenance: int
    codec: int = CODEC_NONE
    key_id: int = KEY_NONE
    key_check: int = 0
    touched_at: float = 0.0

    @property
    def block_count(self) -> int:
        """How many blocks the frame holds."""
        return len(self.keys) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Prefix:
    """What every header in a segment starts with, in every version."""

    magic: bytes
    version: int
    kind: int
    header_bytes: int
    length_bytes: int
    segment_id: bytes
    sequence: int


def stored_part(part: Part) -> StoredPart:
    """Return what a frame header says of a part."""
    return StoredPart(part.index, part.bytes_max, part.stride_bytes, tuple(s.length for s in part.segments))


def header_bytes(blocks: int, *, parts: int) -> int:
    """Return the size of a frame header: whole pages."""
    content = _PREFIX.size + _FRAME.size + parts * _PART.size + blocks * HASH_BYTES + CHECKSUM_BYTES
    return round_up(content, PAGE_BYTES)


def frame_bytes(header: FrameHeader) -> int:
    """Return the size of a whole frame on disk."""
    blocks = len(header.keys) // HASH_BYTES
    payload = blocks * sum(part.stride_bytes for part in header.parts)
    return header_bytes(blocks, parts=len(header.parts)) + payload


def check_frame(frame: FrameWrite) -> None:
    """Refuse a frame whose parts do not fit together.

    Errors: InvalidArgument naming the field, what it should be and what it is.
    """
    header = frame.header
    blocks = len(header.keys) // HASH_BYTES
    if not blocks or len(header.keys) % HASH_BYTES:
        raise InvalidArgument(
            f"frame: keys of {len(header.keys)} bytes, a multiple of {HASH_BYTES} above 0 expected"
        )
    if not header.parts or tuple(image.part for image in frame.parts) != header.parts:
        raise InvalidArgument("frame: the images' parts differ from the header's")
    for name, limit in ((header.retention_class, CLASS_BYTES), (frame.bucket, BUCKET_BYTES)):
        if len(name.encode()) > limit or "\0" in name:
            raise InvalidArgument(
                f"frame: name {name!r} has {len(name.encode())} bytes, at most {limit} allowed"
            )
    for image in frame.parts:
        got = sum(view.nbytes for view in image.images)
        segments = len(image.part.segments)
        sizes = (got, len(image.lengths), len(image.digests))
        wanted = (blocks * image.part.stride_bytes, 4 * blocks, CHECKSUM_BYTES * segments * blocks)
        if sizes != wanted or any(view.nbytes % image.part.stride_bytes for view in image.images):
            raise InvalidArgument(
                f"frame: part {image.part.index} (images, lengths, digests) {sizes}, expected {wanted}"
            )


def encode_frame(
    frame: FrameWrite, *, segment_id: bytes, sequence: int, key_id: int = KEY_NONE, key_check: int = 0
) -> bytes:
    """Return the header pages of a frame."""
    header = frame.header
    blocks = len(header.keys) // HASH_BYTES
    size = header_bytes(blocks, parts=len(header.parts))
    length = frame_bytes(header)
    pieces = [
        _PREFIX.pack(FRAME_MAGIC, FORMAT_VERSION, header.kind, 0, size, length, segment_id, sequence),
        _FRAME.pack(
            header.namespace,
            header.parent,
            blocks,
            len(header.parts),
            0,
            header.written_at,
            header.provenance,
            CODEC_NONE,
            0,
            key_id,
            0,
            header.retention_class.encode(),
            frame.bucket.encode(),
            key_check,
            header.touched_at,
        ),
    ]
    for part in map(stored_part, header.parts):
        lengths = part.segment_lengths + (0,) * (SEGMENTS_MAX - len(part.segment_lengths))
        pieces.append(
            _PART.pack(part.index, len(part.segment_lengths), 0, part.bytes_max, part.stride_bytes, *lengths)
        )
    pieces.append(header.keys)
    return _closed(b"".join(pieces), size)


def decode_prefix(data: bytes | memoryview) -> Prefix:
    """Return the version-independent start of a frame, tombstone or seal.

    Errors: FormatError when the magic is none of ours or a length makes no sense.
    """
    magic, version, kind, _, size, length, segment_id, sequence = _PREFIX.unpack_from(data)
    if magic not in (FRAME_MAGIC, TOMBSTONE_MAGIC, SEAL_MAGIC):
        raise FormatError("no header here")
    if size % PAGE_BYTES or length % PAGE_BYTES or not PAGE_BYTES <= size <= length:
        raise FormatError(f"header of {size} bytes in a frame of {length}")
    return Prefix(magic, version, kind, size, length, segment_id, sequence)


def decode_frame(data: bytes | memoryview) -> StoredFrame:
    """Return the frame that header pages describe.

    Errors: FormatError on a wrong checksum or an unknown version.
    """
    prefix = decode_prefix(data)
    if prefix.magic != FRAME_MAGIC:
        raise FormatError("not a frame")
    if prefix.version != FORMAT_VERSION:
        raise FormatError(f"frame version {prefix.version} is unknown", version=prefix.version)
    if len(data) < prefix.header_bytes:
        raise FormatError(f"{len(data)} bytes of a header of {prefix.header_bytes}")
    _check_closed(data[: prefix.header_bytes], "frame header")
    (
        namespace, parent, blocks, part_count, _, written_at, provenance, codec, _, key_id, _, name, bucket,
        key_check, touched_at,
    ) = _FRAME.unpack_from(data, _PREFIX.size)  # fmt: skip
    offset = _PREFIX.size + _FRAME.size
    parts = tuple(_decode_part(data, offset + i * _PART.size) for i in range(part_count))
    offset += part_count * _PART.size
    keys = bytes(data[offset : offset + blocks * HASH_BYTES])
    if codec != CODEC_NONE:
        raise FormatError(f"codec {codec} is unknown", version=prefix.version)
    if prefix.kind not in tuple(FrameKind):
        raise FormatError(f"frame kind {prefix.kind} is unknown", version=prefix.version)
    body = blocks * sum(part.stride_bytes for part in parts)
    if prefix.header_bytes + body != prefix.length_bytes or len(keys) != blocks * HASH_BYTES:
        raise FormatError(f"frame of {prefix.length_bytes} bytes holds {blocks} blocks in {body}")
    return StoredFrame(
        prefix.segment_id,
        prefix.sequence,
        prefix.header_bytes,
        prefix.length_bytes,
        FrameKind(prefix.kind),
        Fingerprint(namespace),
        BlockHash(parent),
        keys,
        parts,
        _text(name),
        _text(bucket),
        written_at,
        provenance,
        codec,
        key_id,
        key_check,
        touched_at,
    )


def _decode_part(data: bytes | memoryview, offset: int) -> StoredPart:
    index, count, _, bytes_max, stride, *lengths = _PART.unpack_from(data, offset)
    return StoredPart(index, bytes_max, stride, tuple(lengths[:count]))


def encode_segment(header: SegmentHeader) -> bytes:
    """Return the first page of a segment file."""
    content = _SEGMENT.pack(
        SEGMENT_MAGIC, FORMAT_VERSION, 0, 0, header.identity, header.store, header.created_at, header.number,
        header.bucket.encode(),
    )  # fmt: skip
    return _closed(content, PAGE_BYTES)


def decode_segment(page: bytes | memoryview) -> SegmentHeader:
    """Return the header of a segment file.

    Errors: FormatError on foreign or torn bytes and on an unknown version.
    """
    if len(page) < PAGE_BYTES or bytes(page[: len(SEGMENT_MAGIC)]) != SEGMENT_MAGIC:
        raise FormatError("not a segment file")
    _, version, _, _, identity, store, created_at, number, bucket = _SEGMENT.unpack_from(page)
    if version != FORMAT_VERSION:
        raise FormatError(f"segment version {version} is unknown", version=version)
    _check_closed(page[:PAGE_BYTES], "segment header")
    return SegmentHeader(number, identity, store, _text(bucket), created_at)


def encode_seal(*, segment_id: bytes, frames: int, end: int, sealed_at: float) -> bytes:
    """Return the page behind the last frame which says that all before it was synced."""
    prefix = _PREFIX.pack(SEAL_MAGIC, FORMAT_VERSION, 0, 0, PAGE_BYTES, PAGE_BYTES, segment_id, frames)
    return _closed(prefix + _SEAL.pack(frames, end, sealed_at), PAGE_BYTES)


def is_seal(page: bytes | memoryview, *, segment_id: bytes, end: int) -> bool:
    """Say whether a page seals this segment at this offset."""
    try:
        prefix = decode_prefix(page)
        _check_closed(page[:PAGE_BYTES], "seal")
    except FormatError:
        return False
    _, sealed_end, _ = _SEAL.unpack_from(page, _PREFIX.size)
    return prefix.magic == SEAL_MAGIC and prefix.segment_id == segment_id and int(sealed_end) == end


def encode_tombstone(frame: Prefix, *, deleted_at: float) -> bytes:
    """Return the sector that replaces the first sector of a deleted frame's header."""
    prefix = _PREFIX.pack(
        TOMBSTONE_MAGIC,
        FORMAT_VERSION,
        frame.kind,
        0,
        frame.header_bytes,
        frame.length_bytes,
        frame.segment_id,
        frame.sequence,
    )
    return _closed(prefix + _TOMBSTONE.pack(deleted_at), TOMBSTONE_BYTES)


def is_tombstone(page: bytes | memoryview) -> bool:
    """Say whether a page starts with an intact tombstone."""
    if bytes(page[: len(TOMBSTONE_MAGIC)]) != TOMBSTONE_MAGIC:
        return False
    try:
        _check_closed(page[:TOMBSTONE_BYTES], "tombstone")
    except FormatError:
        return False
    return True


def _closed(content: bytes, size: int) -> bytes:
    """Pad content with zeros and end it with the checksum of all that comes before."""
    body = content.ljust(size - CHECKSUM_BYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def _check_closed(data: bytes | memoryview, what: str) -> None:
    if xxhash.xxh3_128_digest(data[:-CHECKSUM_BYTES]) != bytes(data[-CHECKSUM_BYTES:]):
        raise FormatError(f"{what}: checksum does not match")


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
