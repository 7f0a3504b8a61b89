"""The part of kvstore.rpc.wire that maps extents and the news that carry them. Import wire instead."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstore.api import Extent, Progress
from kvstore.errors import InvalidArgument
from kvstore.layout import PARTS_MAX, Layout
from kvstore.rpc.enums import MISS_REASON
from kvstore.rpc.packing import count_of, digests_of, u32_from_wire, u32_to_wire
from kvstore.rpc.v1 import data_pb2 as pb


def extent_to_wire(extent: Extent, *, layout: Layout | None = None) -> pb.Extent:
    """Return an extent; with the layout at hand, lengths that all equal the part's bytes_max are left out."""
    full = layout is not None and bool(np.all(extent.lengths == layout.parts[extent.part].bytes_max))
    return pb.Extent(
        part=extent.part,
        first=extent.first,
        slots=u32_to_wire(extent.slots),
        generations=u32_to_wire(extent.generations),
        lengths=b"" if full else u32_to_wire(extent.lengths),
        digests=extent.digests,
    )


def extent_from_wire(message: pb.Extent, layout: Layout) -> Extent:
    """Return an extent whose arrays are read-only views of the message's bytes.

    Errors: InvalidArgument on an unknown part, arrays of different lengths, payloads beyond bytes_max, or
    digests that do not cover exactly the part's segments.
    """
    if message.part >= len(layout.parts):
        raise InvalidArgument(f"extent.part: the layout has {len(layout.parts)} parts, got {message.part}")
    part = layout.parts[message.part]
    slots = u32_from_wire(message.slots, "extent.slots")
    count = len(slots)
    if message.lengths:
        lengths = u32_from_wire(message.lengths, "extent.lengths", count=count)
        if lengths.size and int(lengths.max()) > part.bytes_max:
            longest = int(lengths.max())
            raise InvalidArgument(
                f"extent.lengths: part {part.index} holds {part.bytes_max} bytes, got {longest}"
            )
    else:
        lengths = np.full(count, part.bytes_max, dtype=np.uint32)
    digests = digests_of(message.digests, "extent.digests", blocks=count)
    if digests and len(digests) != 16 * count * len(part.segments):
        needed = f"{count} blocks x {len(part.segments)} segments x 16"
        raise InvalidArgument(f"extent.digests: part {part.index} needs {needed} bytes, got {len(digests)}")
    return Extent(
        part=message.part,
        first=message.first,
        slots=slots,
        generations=u32_from_wire(message.generations, "extent.generations", count=count),
        lengths=lengths,
        digests=digests,
    )


def progress_to_wire(progress: Progress, *, layout: Layout | None = None) -> pb.ProgressEvent:
    """Return a progress event."""
    return pb.ProgressEvent(
        lease=progress.lease,
        extents=[extent_to_wire(extent, layout=layout) for extent in progress.extents],
        done=progress.done,
        blocks=progress.blocks,
        reason=MISS_REASON.to_wire_optional(progress.reason),
    )


def progress_from_wire(message: pb.ProgressEvent, layout: Layout) -> Progress:
    """Return news of a lease."""
    return Progress(
        lease=message.lease,
        extents=tuple(extent_from_wire(extent, layout) for extent in message.extents),
        done=message.done,
        blocks=message.blocks,
        reason=MISS_REASON.from_wire_optional(message.reason, "progress.reason"),
    )


def parts_from_wire(parts: Iterable[int], field: str) -> tuple[int, ...]:
    """Return part indexes; refuses those that no layout can have."""
    indexes = tuple(parts)
    count_of(indexes, field, limit=PARTS_MAX)
    wrong = next((index for index in indexes if index >= PARTS_MAX), None)
    if wrong is not None:
        raise InvalidArgument(f"{field}: a part index is below {PARTS_MAX}, got {wrong}")
    return indexes
