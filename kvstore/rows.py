"""Blocks in a caller's memory: arrays whose rows are blocks of one part, and the digests of what they hold.

The digest of a segment covers what the record holds of it; a segment behind the end of a short record has the
digest of no bytes.
"""

from __future__ import annotations

import functools
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

Bytes = npt.NDArray[np.uint8]
Buffer = Bytes | Sequence[Bytes]
"""Blocks of one part: an array [blocks, bytes_max], or one [blocks, length] for each segment, or for each of
some finer layer ranges, in order; every segment must begin with an array. Rows may be strided."""
Cut = tuple[int, int]
"""Offset and length within a record."""
Block = Bytes | tuple[Bytes, ...]
Digest = Callable[[Block], bytes]

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
        longest = int(lengths.max(initial=0))
        if longest > part.bytes_max:
            raise InvalidArgument(
                f"record of part {part.index}: at most {part.bytes_max} bytes, got {longest}"
            )
        is_full = bool((lengths == part.bytes_max).all())
        return Rows(part, arrays, cuts, None if is_full else lengths)

    @property
    def are_whole(self) -> bool:
        """Whether every block is one piece; then no tuples are made, worth 5 % of a hit."""
        return self.lengths is None and len(self.cuts) == 1

    def blocks(self, start: int, stop: int) -> Iterable[Block]:
        """Yield the pieces of each block, as the arrays have them; a whole block comes as it is."""
        return self._cut(start, stop, self.cuts)

    def digested(self, start: int, stop: int) -> Iterable[Block]:
        """Yield each block as `digest` wants it."""
        return self._cut(start, stop, segment_cuts(self.part) if len(self.cuts) == 1 else self.cuts)

    def _cut(self, start: int, stop: int, cuts: tuple[Cut, ...]) -> Iterable[Block]:
        if self.are_whole and len(cuts) == 1:
            return self.arrays[0][start:stop]
        if len(self.arrays) == 1:
            pieces = columns(self.arrays[0][start:stop], cuts)
        else:
            pieces = zip(*(array[start:stop] for array in self.arrays), strict=True)
        return pieces if self.lengths is None else trimmed(pieces, cuts, self.lengths[start:stop])

    def digest(self) -> Digest:
        """Return what makes the packed digests of a block that `digested` yields."""
        segments = segment_cuts(self.part)
        is_strided = any(array.strides[1] != 1 for array in self.arrays if array.shape[1] > 1)
        if self.are_whole and len(segments) == 1:
            return cast("Digest", _digest_strided if is_strided else _digest_bytes)
        if not is_strided and len(self.cuts) in (1, len(segments)):
            return cast("Digest", digest_pieces)
        cuts = segments if len(self.cuts) == 1 else self.cuts
        return cast("Digest", functools.partial(_digest_groups, groups=_groups(cuts, segments)))


def digest_rows(part: Part, buffer: Buffer, lengths: U32Array) -> bytes:
    """Return the packed digests of the first blocks of a buffer.

    Shapes: lengths u32[n]; digests 16 x segments x n.
    Errors: as `Rows.of`.
    """
    rows = Rows.of(part, buffer, lengths=lengths)
    return b"".join(map(rows.digest(), rows.digested(0, len(lengths))))


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


def digest_pieces(pieces: tuple[Bytes, ...]) -> bytes:
    """Return the packed digests of a block's segments."""
    return b"".join(map(_digest_bytes, pieces))


def _digest_strided(piece: Bytes) -> bytes:
    return _digest_bytes(np.ascontiguousarray(piece))


def _digest_groups(pieces: tuple[Bytes, ...], groups: Sequence[slice]) -> bytes:
    """Digest segments that come in several pieces, or in strided ones."""
    found = []
    for group in groups:
        state = xxhash.xxh3_128()
        for piece in pieces[group]:
            state.update(np.ascontiguousarray(piece).data)
        found.append(state.digest())
    return b"".join(found)


def _groups(cuts: Sequence[Cut], segments: Sequence[Cut]) -> list[slice]:
    """Return which of the cuts make up each segment."""
    offsets = [offset for offset, _ in cuts]
    edges = [offsets.index(offset) for offset, _ in segments] + [len(cuts)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]
