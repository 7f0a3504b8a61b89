"""Reads a segment from its own bytes alone: what lies where, and whether it is intact. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvstore.tiers.fs import FileSystem, aligned_buffer, read_up_to
from kvstore.tiers.ssd.crypto import FramePlace, RecordOpener
from kvstore.tiers.ssd.crypto_keys import KeyRing
from kvstore.tiers.ssd.format import (
    FRAME_MAGIC,
    SEAL_MAGIC,
    TOMBSTONE_MAGIC,
    FormatError,
    Prefix,
    SegmentHeader,
    StoredFrame,
    decode_frame,
    decode_prefix,
    decode_segment,
    is_seal,
    is_tombstone,
)
from kvstore.tiers.ssd.trailer import Checked, check_records, shape_of
from kvstore.types import HASH_BYTES, PAGE_BYTES, round_up

READ_BYTES = 1 << 20
HEADER_BYTES_MAX = 64 << 20


class Found(StrEnum):
    """What a scan meets in a segment."""

    FRAME = "frame"
    TOMBSTONE = "tombstone"
    SEAL = "seal"
    UNKNOWN = "unknown"
    """A frame of a version that this build does not know; left alone."""
    DAMAGE = "damage"
    """Bytes that are none of these, up to the next header or the end of the file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a segment; `frame` is set for FRAME, `detail` says why it is DAMAGE or UNKNOWN."""

    found: Found
    offset: int
    length_bytes: int
    frame: StoredFrame | None = None
    detail: str = ""


class Scanner:
    """Walks the segments of one file system, with buffers that are used again.

    Without the keys of encrypted records only their trailers can be checked.

    Threads: one user at a time.
    """

    def __init__(self, fs: FileSystem, keys: KeyRing | None = None) -> None:
        self._fs, self._keys = fs, keys
        self._page = aligned_buffer(PAGE_BYTES)
        self._header = aligned_buffer(16 * PAGE_BYTES)
        self._records = aligned_buffer(READ_BYTES)

    def header(self, handle: int) -> SegmentHeader:
        """Return the segment's header.

        Errors: FormatError, OSError.
        """
        came = read_up_to(self._fs, handle, [self._page], offset=0)
        return decode_segment(self._page[:came])

    def is_sealed(self, handle: int, *, segment_id: bytes, size_bytes: int) -> bool:
        """Say whether the file ends with the page which says that everything before it was synced."""
        end = size_bytes - PAGE_BYTES
        if end < PAGE_BYTES or size_bytes % PAGE_BYTES:
            return False
        came = read_up_to(self._fs, handle, [self._page], offset=end)
        return came == PAGE_BYTES and is_seal(self._page, segment_id=segment_id, end=end)

    def is_deleted(self, handle: int, *, offset: int) -> bool:
        """Say whether a frame's header has become a tombstone, or cannot be read: what may have been deleted
        must not return.
        """
        try:
            came = read_up_to(self._fs, handle, [self._page], offset=offset)
        except OSError:
            return True
        return came == PAGE_BYTES and is_tombstone(self._page)

    def frame(self, handle: int, *, segment_id: bytes, offset: int) -> StoredFrame:
        """Return the frame that begins at an offset.

        Errors: FormatError when none of this segment does, or one of an unknown version; OSError.
        """
        return self._frame(handle, self._prefix(handle, segment_id, offset), offset)

    def pieces(self, handle: int, *, segment_id: bytes, start: int, size_bytes: int) -> Iterator[Piece]:
        """Yield what lies from `start` to the end of the file, in order and without gaps."""
        offset = start
        while offset < size_bytes:
            piece = self._piece(handle, segment_id, offset, size_bytes)
            yield piece
            offset += piece.length_bytes

    def _piece(self, handle: int, segment_id: bytes, offset: int, size_bytes: int) -> Piece:
        try:
            prefix = self._prefix(handle, segment_id, offset)
        except FormatError as error:
            return self._damage(handle, segment_id, offset, size_bytes, str(error))
        if offset + prefix.length_bytes > size_bytes:
            # A torn tail, or a length that rotted: then more of the segment follows.
            return self._damage(handle, segment_id, offset, size_bytes, "cut off by the end of the file")
        if prefix.magic == TOMBSTONE_MAGIC and is_tombstone(self._page):
            return Piece(Found.TOMBSTONE, offset, prefix.length_bytes)
        if prefix.magic == SEAL_MAGIC and is_seal(self._page, segment_id=segment_id, end=offset):
            return Piece(Found.SEAL, offset, prefix.length_bytes)
        try:
            frame = self._frame(handle, prefix, offset)
        except FormatError as error:
            if error.version:
                return Piece(Found.UNKNOWN, offset, prefix.length_bytes, detail=str(error))
            return self._damage(handle, segment_id, offset, size_bytes, str(error))
        return Piece(Found.FRAME, offset, frame.length_bytes, frame)

    def _prefix(self, handle: int, segment_id: bytes, offset: int) -> Prefix:
        came = read_up_to(self._fs, handle, [self._page], offset=offset)
        if came < PAGE_BYTES:
            raise FormatError("cut off by the end of the file")
        prefix = decode_prefix(self._page)
        if prefix.segment_id != segment_id:
            raise FormatError("a header of another segment")
        return prefix

    def _frame(self, handle: int, prefix: Prefix, offset: int) -> StoredFrame:
        if prefix.magic != FRAME_MAGIC:
            raise FormatError("a tombstone or seal that does not match its checksum")
        if prefix.header_bytes == PAGE_BYTES:
            return decode_frame(self._page)
        if prefix.header_bytes > HEADER_BYTES_MAX:
            raise FormatError(f"header of {prefix.header_bytes} bytes, at most {HEADER_BYTES_MAX} allowed")
        if self._header.nbytes < prefix.header_bytes:
            self._header = aligned_buffer(prefix.header_bytes)
        header = self._header[: prefix.header_bytes]
        came = read_up_to(self._fs, handle, [header], offset=offset)
        return decode_frame(header[:came])

    def _damage(self, handle: int, segment_id: bytes, offset: int, size_bytes: int, detail: str) -> Piece:
        """Find the next header of this segment: one damaged page must not hide all that lies behind it."""
        at = offset + PAGE_BYTES
        while at < size_bytes:
            came = read_up_to(self._fs, handle, [self._records], offset=at)
            if came <= 0:
                break
            for start in range(0, came - came % PAGE_BYTES, PAGE_BYTES):
                if _starts_header(self._records[start : start + PAGE_BYTES], segment_id):
                    return Piece(Found.DAMAGE, offset, at + start - offset, detail=detail)
            at += round_up(came, PAGE_BYTES)
        return Piece(Found.DAMAGE, offset, size_bytes - offset, detail=detail)

    def faults(self, handle: int, frame: StoredFrame, *, offset: int) -> Iterator[Fault]:
        """Read every record of a frame and yield those that are not intact, or cannot be judged.

        Errors: OSError.
        """
        base = offset + frame.header_bytes
        place = FramePlace(frame.segment_id, offset)
        for part in frame.parts:
            shape = shape_of(part)
            if shape.stride_bytes > self._records.nbytes:
                self._records = aligned_buffer(shape.stride_bytes)
            step = self._records.nbytes // shape.stride_bytes
            first = 0
            while first < frame.block_count:
                count = min(step, frame.block_count - first)
                buffer = self._records[: count * shape.stride_bytes]
                came = read_up_to(self._fs, handle, [buffer], offset=base + first * shape.stride_bytes)
                whole = came // shape.stride_bytes
                keys = frame.keys[first * HASH_BYTES : (first + whole) * HASH_BYTES]
                opener = RecordOpener(self._keys, place, first=first)
                checked = check_records(
                    [buffer[: whole * shape.stride_bytes]], shape, keys=keys, opener=opener
                )
                fault, passed = _judged(checked, count)
                first += passed
                if fault is not None:
                    at = first * HASH_BYTES
                    yield replace(fault, part=part.index, block=first, key=frame.keys[at : at + HASH_BYTES])
                    first += fault.blocks
            base += frame.block_count * shape.stride_bytes

    def is_intact(self, handle: int, frame: StoredFrame, *, offset: int) -> bool:
        """Say whether every record of a frame is intact, as far as the keys at hand allow to judge."""
        return all(fault.is_unreadable for fault in self.faults(handle, frame, offset=offset))


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that is not what it should be, or `blocks` of them whose key is not at hand."""

    part: int
    block: int
    key: bytes
    reason: str = field(compare=False)
    is_unreadable: bool = False
    blocks: int = 1


def _judged(checked: Checked, count: int) -> tuple[Fault | None, int]:
    """Return what stopped a check, still without its place, and how many records come before it."""
    if checked.good == count:
        return None, count
    if checked.key is None:
        return Fault(0, 0, b"", checked.fault or "cut off by the end of the file"), checked.good
    if checked.framed < count:
        return Fault(0, 0, b"", "encrypted, and its trailer is damaged"), checked.framed
    blocks = count - checked.good
    return Fault(0, 0, b"", checked.fault, is_unreadable=True, blocks=blocks), checked.good


def _starts_header(page: memoryview, segment_id: bytes) -> bool:
    try:
        return decode_prefix(page).segment_id == segment_id
    except FormatError:
        return False
