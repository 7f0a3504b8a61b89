"""The caller's memory: which buffer serves which part, and the rows and pieces of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.api import PartBlocks, U32Array
from kvstore.errors import InvalidArgument
from kvstore.layout import Layout, Part
from kvstore.rows import Buffer, Bytes, checked_arrays

Buffers = Buffer | Mapping[int, Buffer]
"""One part's buffer, or a mapping of part index -> buffer."""
Lengths = Sequence[int] | U32Array | Mapping[int, Sequence[int] | U32Array]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a put brings of one part: row 0 of the buffer is block `blocks.first`.

    Shapes: lengths u32[count].
    """

    blocks: PartBlocks
    buffer: Buffer
    lengths: U32Array


def by_part(layout: Layout, buffers: Buffers, parts: Sequence[int]) -> dict[int, Buffer]:
    """Return part index -> buffer; a bare buffer belongs to the only part in question.

    Errors: InvalidArgument when that is not clear, or a part is not in the layout.
    """
    if isinstance(buffers, Mapping):
        named = dict(buffers)
    else:
        candidates = tuple(parts) or layout.required_parts
        if len(candidates) != 1:
            raise InvalidArgument(f"buffers: parts {candidates} are meant; hand in a mapping part -> buffer")
        named = {candidates[0]: buffers}
    unknown = [index for index in named if not 0 <= index < len(layout.parts)]
    if unknown:
        raise InvalidArgument(f"buffers: the layout has {len(layout.parts)} parts, got part {unknown[0]}")
    return named


def arrays_of(buffer: Buffer) -> list[Bytes]:
    """Return the arrays a buffer consists of."""
    return [buffer] if isinstance(buffer, np.ndarray) else list(buffer)


def rows_in(buffer: Buffer) -> int:
    """Return how many blocks a buffer has room for."""
    return min((len(array) for array in arrays_of(buffer)), default=0)


def rows_of(buffer: Buffer, start: int, stop: int) -> Buffer:
    """Return the rows [start, stop) of a buffer, as views."""
    if isinstance(buffer, np.ndarray):
        return buffer[start:stop]
    return [array[start:stop] for array in buffer]


def pieces_of(buffer: Buffer, row: int, length: int) -> list[Bytes]:
    """Return a block's record of so many bytes as views in order, one for each array that it reaches into."""
    views: list[Bytes] = []
    for array in arrays_of(buffer):
        if length <= 0:
            break
        views.append(array[row, :length])
        length -= array.shape[1]
    return views


def chunks_of(views: Sequence[Bytes], limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield a block's record as (offset, bytes) pieces of at most `limit` bytes."""
    offset = 0
    for view in views:
        for start in range(0, len(view), limit):
            piece = view[start : start + limit]
            yield offset, piece.tobytes()
            offset += len(piece)


def sources_of(
    layout: Layout, parts: Sequence[PartBlocks], source: Buffers, lengths: Lengths | None
) -> dict[int, Source]:
    """Return part index -> what a put brings of it; without lengths every record is bytes_max long.

    Errors: InvalidArgument on parts without a buffer, buffers of the wrong shape, lengths beyond bytes_max.
    """
    buffers = by_part(layout, source, [blocks.part for blocks in parts])
    if lengths is not None and not isinstance(lengths, Mapping) and len(parts) != 1:
        raise InvalidArgument(f"lengths: {len(parts)} parts are put; hand in a mapping part -> lengths")
    found: dict[int, Source] = {}
    for blocks in parts:
        if not 0 <= blocks.part < len(layout.parts) or blocks.part not in buffers:
            raise InvalidArgument(f"put: part {blocks.part} has no buffer, or is not in the layout")
        if blocks.part in found:
            raise InvalidArgument(f"put: part {blocks.part} is named twice; one stretch of a part per put")
        part = layout.parts[blocks.part]
        checked_arrays(part, buffers[blocks.part], count=blocks.count, writing=False)
        given = lengths.get(blocks.part) if isinstance(lengths, Mapping) else lengths
        found[blocks.part] = Source(blocks, buffers[blocks.part], _lengths_of(part, blocks.count, given))
    return found


def _lengths_of(part: Part, count: int, given: Sequence[int] | U32Array | None) -> U32Array:
    if given is None:
        return np.full(count, part.bytes_max, dtype=np.uint32)
    wide = np.asarray(given, dtype=np.int64)
    if wide.shape != (count,) or (wide.size and not 0 <= wide.min() <= wide.max() <= part.bytes_max):
        raise InvalidArgument(
            f"lengths of part {part.index}: expected {count} numbers in 0..{part.bytes_max}, "
            f"got shape {list(wide.shape)}"
        )
    return wide.astype(np.uint32)
