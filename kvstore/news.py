"""News of a lease put together: who comes late to them reads one message and copies one stretch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from kvstore.api import Extent, Progress


def joined(news: Sequence[Progress]) -> Progress:
    """Return news of one lease, oldest first and at least one, as one; neighbouring extents become one."""
    if len(news) == 1:
        return news[0]
    last = news[-1]
    extents = joined_extents(extent for progress in news for extent in progress.extents)
    return Progress(last.lease, extents, last.done, last.blocks, last.reason)


def within(progress: Progress, first: int, blocks: int) -> Progress:
    """Return news with the extents of blocks [first, first + blocks) alone, of all from `first` on for 0."""
    if not first and not blocks:
        return progress
    cut = (_cut(extent, first, first + blocks if blocks else None) for extent in progress.extents)
    return replace(progress, extents=tuple(extent for extent in cut if extent.count))


def _cut(extent: Extent, first: int, end: int | None) -> Extent:
    start = min(max(0, first - extent.first), extent.count)
    stop = extent.count if end is None else min(max(start, end - extent.first), extent.count)
    if stop - start == extent.count:
        return extent
    width = len(extent.digests) // extent.count
    return Extent(
        extent.part,
        extent.first + start,
        extent.slots[start:stop],
        extent.generations[start:stop],
        extent.lengths[start:stop],
        extent.digests[start * width : stop * width],
    )


def joined_extents(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Return extents by part and place; those that follow one another become one."""
    stretches: list[list[Extent]] = []
    for extent in sorted(extents, key=operator.attrgetter("part", "first")):
        before = stretches[-1][-1] if stretches else None
        if before is not None and (before.part, before.first + before.count) == (extent.part, extent.first):
            stretches[-1].append(extent)
        else:
            stretches.append([extent])
    return tuple(_one(stretch) for stretch in stretches)


def _one(stretch: Sequence[Extent]) -> Extent:
    if len(stretch) == 1:
        return stretch[0]
    return Extent(
        stretch[0].part,
        stretch[0].first,
        np.concatenate([extent.slots for extent in stretch]),
        np.concatenate([extent.generations for extent in stretch]),
        np.concatenate([extent.lengths for extent in stretch]),
        b"".join(extent.digests for extent in stretch),
    )
