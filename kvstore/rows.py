"""Blocks in a caller's memory: arrays whose rows are blocks of one part, and the digests of what they hold.

The digest of a segment covers what the record holds of it; a segment behind the end of a short record has the
digest of no bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.api import U32Array
from kvstore.errors import InvalidArgument
from kvstore.layout import Part
from kvstore.types import PAGE_BYTES

Bytes = npt.NDArray[np.uint8]
Buffer = Bytes | Sequence[Bytes]
"""Blocks of one part: an array [blocks, bytes_max], or one [blocks, length] for each segment, or for each of
some finer layer ranges, in order; every segment must begin with an array. Rows may be strided."""
Cut = tuple[int, int]
"""Offset and length within a record."""
Block = Bytes | tuple[Bytes, ...]

NEAR_BYTES = 2 << 20
"""Copied, or put together, at a time before it is digested: few calls, and still in cache."""
THIN_BYTES = 4096
"""Rows below this are too short for what `copier` avoids."""
TRAILING_BYTES = 64
"""A target that begins fewer bytes than this further into its page than its source is slow for memmove."""

Copy = Callable[[Bytes, Bytes], object]
"""Copies source to target; releases the GIL."""
_copy_in_a_loop = cast("Copy", np.conjugate)
_digest_bytes = cast("Callable[[Bytes], bytes]", xxhash.xxh3_128_digest)


@dataclass(frozen=True, slots=True)
class Rows:
    """The first blocks of a checked buffer: its `arrays` and the places of those in a record, `cuts`.

    `lengths` are None where every record is full. Shapes: lengths u32[n].
    """

    part: Part
    arrays: tuple[Bytes, ...]
    cuts: tuple[Cut, ...]
    lengths: U32Array | None

    @staticmethod
    def of(part: Part, buffer: Buffer, *, lengths: U32Array, writing: bool = False) -> Rows:
        """Check a buffer and the lengths of its records.

        Errors: InvalidArgument naming the shape or the limit that was expected.
        """
        arrays, cuts = checked_arrays(part, buffer, count=len(lengths), writing=writing)
        if bool((lengths == part.bytes_max).all()):
            return Rows(part, arrays, cuts, None)
        if (longest := int(lengths.max())) > part.bytes_max:
            raise InvalidArgument(
                f"record of part {part.index}: at most {part.bytes_max} bytes, got {longest}"
            )
        return Rows(part, arrays, cuts, lengths)

    @property
    def are_whole(self) -> bool:
        """Whether every block is one piece; then no tuples are made, worth 5 % of a hit."""
        return self.lengths is None and len(self.cuts) == 1

    @property
    def are_records(self) -> bool:
        """Whether every row is a record as it is digested: one piece without gaps. Others go over a stage."""
        return len(self.arrays) == 1 and (self.arrays[0].strides[1] == 1 or self.arrays[0].shape[1] == 1)

    def blocks(self, start: int, stop: int) -> Iterable[Block]:
        """Yield the pieces of each block, as the arrays have them; a whole block comes as it is."""
        if self.are_whole:
            return self.arrays[0][start:stop]
        pieces = zip(*(array[start:stop] for array in self.arrays), strict=True)
        return pieces if self.lengths is None else trimmed(pieces, self.cuts, self.lengths[start:stop])

    def digests(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the digest of every segment of blocks [start, stop), which are records, when asked for it."""
        lengths = None if self.lengths is None else self.lengths[start:stop]
        return digests_of(self.part, self.arrays[0][start:stop], lengths)

    def staged(self, start: int, stop: int, stage: Bytes) -> Rows:
        """Return rows of a stage [>= blocks, bytes_max] that stand for blocks [start, stop)."""
        lengths = None if self.lengths is None else self.lengths[start:stop]
        return Rows(self.part, (stage[: stop - start],), ((0, self.part.bytes_max),), lengths)

    def gather(self, start: int, stop: int, stage: Bytes) -> None:
        """Copy blocks [start, stop) to a stage."""
        for array, (offset, length) in zip(self.arrays, self.cuts, strict=True):
            copy_bytes(array[start:stop], stage[: stop - start, offset : offset + length])

    def scatter(self, start: int, stop: int, stage: Bytes) -> None:
        """Copy blocks [start, stop) from a stage; of short records only their own bytes."""
        if self.lengths is None:
            for array, (offset, length) in zip(self.arrays, self.cuts, strict=True):
                copy_bytes(stage[: stop - start, offset : offset + length], array[start:stop])
            return
        source = trimmed(columns(stage[: stop - start], self.cuts), self.cuts, self.lengths[start:stop])
        for out_of, into in zip(source, self.blocks(start, stop), strict=True):
            copy_pieces(copy_bytes, out_of, cast("tuple[Bytes, ...]", into))


def copy_bytes(source: Bytes, target: Bytes) -> None:
    """Copy bytes, or rows that may be strided. Threads: releases the GIL."""
    np.copyto(target, source)


def copier(source: Bytes, target: Bytes) -> Copy:
    """Return what copies these rows, or a part of them, soonest.

    np.copyto ends in memmove, which is best but for one trap: on x86 `rep movsb` loses 15 % and more where
    every row starts 1 to 63 bytes further into its page than where it comes from, as do arrays of numpy's own
    (16 bytes into a page) beside slots (at its beginning). The loop of a ufunc does not care; integers are
    their own conjugates.
    Source: glibc bug 30994.
    """
    drift = (target.strides[0] - source.strides[0]) % PAGE_BYTES
    if drift or source.shape[1] < THIN_BYTES:
        return copy_bytes
    lag = (target.ctypes.data - source.ctypes.data) % PAGE_BYTES
    return _copy_in_a_loop if 0 < lag < TRAILING_BYTES else copy_bytes


def copy_pieces(copy: Copy, source: tuple[Bytes, ...], target: tuple[Bytes, ...]) -> None:
    """Copy a block piece by piece."""
    for out_of, into in zip(source, target, strict=True):
        copy(out_of, into)


def new_stage(part: Part, blocks: int) -> Bytes:
    """Return a stage for some blocks, few enough to stay near, that begins with a page as slots do.

    Shapes: [<= blocks, bytes_max].
    """
    rows, width = max(1, min(blocks, near_blocks(part))), part.bytes_max
    memory = np.empty(rows * width + PAGE_BYTES, np.uint8)
    begin = -memory.ctypes.data % PAGE_BYTES
    return memory[begin : begin + rows * width].reshape(rows, width)


def near_blocks(part: Part) -> int:
    """Return how many blocks are few enough to stay near."""
    return max(1, NEAR_BYTES // part.bytes_max)


def digest_rows(part: Part, buffer: Buffer, lengths: U32Array) -> bytes:
    """Return the packed digests of the first blocks of a buffer.

    Shapes: lengths u32[n]; digests 16 x segments x n.
    Errors: as `Rows.of`.
    """
    rows, count = Rows.of(part, buffer, lengths=lengths), len(lengths)
    if rows.are_records:
        return b"".join(rows.digests(0, count))
    stage = new_stage(part, count)
    found: list[bytes] = []
    for start in range(0, count, len(stage)):
        stop = min(start + len(stage), count)
        rows.gather(start, stop, stage)
        found += rows.staged(start, stop, stage).digests(0, stop - start)
    return b"".join(found)


def checked_arrays(
    part: Part, buffer: Buffer, *, count: int, writing: bool
) -> tuple[tuple[Bytes, ...], tuple[Cut, ...]]:
    """Return the arrays of a buffer of at least `count` blocks, and where each lies in a record.

    Errors: InvalidArgument naming the shape that was expected.
    """
    arrays = (buffer,) if isinstance(buffer, np.ndarray) else tuple(buffer)
    for array in arrays:
        if array.dtype != np.uint8 or array.ndim != 2 or len(array) < count:
            raise InvalidArgument(
                f"buffer of part {part.index}: expected uint8 [>= {count}, bytes], "
                f"got {array.dtype} {list(array.shape)}"
            )
        if writing and not array.flags.writeable:
            raise InvalidArgument(f"buffer of part {part.index}: the destination is read-only")
    widths = [array.shape[1] for array in arrays]
    offsets = [0, *itertools.accumulate(widths)]
    is_whole = widths == [part.bytes_max]
    if offsets[-1] != part.bytes_max or not (
        is_whole or {segment.offset for segment in part.segments} <= set(offsets)
    ):
        raise InvalidArgument(
            f"buffer of part {part.index}: arrays are {widths} bytes wide, expected one of {part.bytes_max}, "
            f"or one per segment (or finer): {[segment.length for segment in part.segments]}"
        )
    return arrays, tuple(zip(offsets[:-1], widths, strict=True))


def segment_cuts(part: Part) -> tuple[Cut, ...]:
    """Return where the segments of a part lie."""
    return tuple((segment.offset, segment.length) for segment in part.segments)


def columns(rows: Bytes, cuts: Sequence[Cut]) -> Iterator[tuple[Bytes, ...]]:
    """Yield each row of an array in pieces."""
    return zip(*(rows[:, offset : offset + length] for offset, length in cuts), strict=True)


def trimmed(
    pieces: Iterator[tuple[Bytes, ...]], cuts: Sequence[Cut], lengths: U32Array
) -> Iterator[tuple[Bytes, ...]]:
    """Cut the pieces of each block at the end of its record."""
    offsets = [offset for offset, _ in cuts]
    for block, length in zip(pieces, lengths.tolist(), strict=True):
        yield tuple([piece[: max(0, length - offset)] for piece, offset in zip(block, offsets, strict=True)])


def digests_of(part: Part, records: Bytes, lengths: U32Array | None) -> Iterator[bytes]:
    """Yield the digest of every segment of some records, each when it is asked for, and without a step of
    Python: threads would queue for it.

    Shapes: records [n, >= bytes_max]; lengths u32[n], None when all are full.
    """
    cuts = segment_cuts(part)
    blocks = columns(records, cuts)
    if lengths is not None:
        blocks = trimmed(blocks, cuts, lengths)
    return map(_digest_bytes, itertools.chain.from_iterable(blocks))
