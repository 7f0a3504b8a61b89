"""Payload through the arena: copies out of leased slots and into reserved ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvstore.api import Extent, PartBlocks, PartDigests, Progress, U32Array
from kvstore.arena import Arena
from kvstore.client.buffers import Source, rows_of
from kvstore.client.deadline import Deadline
from kvstore.client.delivery import Delivery
from kvstore.client.link import Link
from kvstore.client.loading import lost
from kvstore.client.results import Match
from kvstore.copying import copy_in, copy_out
from kvstore.errors import DeadlineExceeded, InvalidArgument, TierUnavailable
from kvstore.layout import Layout, Part
from kvstore.rows import Buffer

STEP_BYTES = 256 << 20
"""Between two steps of a copy the deadline is looked at."""


def fetch_mapped(
    link: Link,
    layout: Layout,
    match: Match,
    into: Mapping[int, Buffer],
    *,
    delivery: Delivery,
    deadline: Deadline,
    verify: bool,
    news: Iterator[Progress],
) -> None:
    """Copy a match's blocks as they become resident, and write `delivery`'s book.

    Errors: TierUnavailable when the link is over, or an extent points outside the arena; DeadlineExceeded.
    """
    with link.use():
        reader = _Reader(link.arena(), layout, into, delivery, deadline, verify, link.copy_threads)
        for extent in match.extents:
            reader.read(extent)
        if match.ready:
            return
        for progress in news:
            for extent in progress.extents:
                reader.read(extent)
            if lost(progress):
                raise TierUnavailable("fetch: the session ended while blocks were loading")
            delivery.cut(progress.blocks, progress.reason)
            if progress.done or (delivery.complete() and not delivery.has_side_parts):
                return


class _Reader:
    """Copies extents into the caller's buffers, a step at a time."""

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        into: Mapping[int, Buffer],
        delivery: Delivery,
        deadline: Deadline,
        verify: bool,
        threads: int,
    ) -> None:
        self._arena = arena
        self._layout = layout
        self._into = into
        self._delivery = delivery
        self._deadline = deadline
        self._verify = verify
        self._threads = threads

    def read(self, extent: Extent) -> None:
        """Copy what of an extent is wanted and resident.

        Errors: DeadlineExceeded between two steps; TierUnavailable on an extent that cannot be.
        """
        if extent.part not in self._into:
            return
        part = self._layout.parts[extent.part]
        skipped = max(0, self._delivery.first - extent.first)
        count = min(extent.count, self._delivery.limit - extent.first)
        for start, stop in _resident(extent.slots[skipped : max(0, count)], step=_step(part)):
            if self._deadline.passed():
                raise DeadlineExceeded("fetch: the deadline passed between two copies")
            if not self._copy(part, extent, skipped + start, skipped + stop):
                return

    def _copy(self, part: Part, extent: Extent, start: int, stop: int) -> bool:
        first, width = extent.first + start, 16 * len(part.segments)
        row = first - self._delivery.first
        try:
            copied = copy_out(
                self._arena,
                part,
                slots=extent.slots[start:stop],
                lengths=extent.lengths[start:stop],
                digests=extent.digests[start * width : stop * width],
                generations=extent.generations[start:stop],
                into=rows_of(self._into[part.index], row, row + stop - start),
                verify=self._verify,
                threads=self._threads,
            )
        except InvalidArgument as error:
            # The buffers were checked before: it is the extent that is wrong.
            raise TierUnavailable(f"fetch: the daemon's extent cannot be: {error}") from error
        self._delivery.arrive(part.index, first, first + copied.good)
        if copied.reason is not None:
            self._delivery.cut(first + copied.good, copied.reason)
        return copied.reason is None


def fill(
    link: Link,
    layout: Layout,
    extents: Sequence[Extent],
    sources: Mapping[int, Source],
    *,
    deadline: Deadline,
) -> tuple[PartDigests, ...]:
    """Copy the caller's blocks into reserved slots; return what a commit says of them.

    Errors: TierUnavailable when the link is over; DeadlineExceeded between two steps.
    """
    written: list[PartDigests] = []
    with link.use():
        arena = link.writable_arena()
        for extent in extents:
            source = sources.get(extent.part)
            if source is None or not _covers(source.blocks, extent):
                raise TierUnavailable(
                    f"put: the daemon reserved blocks of part {extent.part} that nobody brings"
                )
            part, row = layout.parts[extent.part], extent.first - source.blocks.first
            for start, stop in _resident(extent.slots, step=_step(part)):
                if deadline.passed():
                    raise DeadlineExceeded("put: the deadline passed between two copies")
                written.append(_write(arena, part, extent, source, row, start, stop, link.copy_threads))
    return tuple(written)


def _write(
    arena: Arena,
    part: Part,
    extent: Extent,
    source: Source,
    row: int,
    start: int,
    stop: int,
    threads: int,
) -> PartDigests:
    copied = copy_in(
        arena,
        part,
        slots=extent.slots[start:stop],
        source=rows_of(source.buffer, row + start, row + stop),
        lengths=source.lengths[row + start : row + stop],
        threads=threads,
    )
    return PartDigests(part.index, extent.first + start, copied.lengths, copied.digests)


def _covers(blocks: PartBlocks, extent: Extent) -> bool:
    return blocks.first <= extent.first and extent.first + extent.count <= blocks.first + blocks.count


def _step(part: Part) -> int:
    return max(1, STEP_BYTES // part.bytes_max)


def _resident(slots: U32Array, *, step: int) -> Iterator[tuple[int, int]]:
    """Yield stretches of slots that exist (0 means none), each of at most `step`."""
    edges = np.array([0, len(slots)])
    if not slots.all():
        edges = np.flatnonzero(np.diff(np.concatenate(([False], slots != 0, [False])).astype(np.int8)))
    for begin, end in edges.reshape(-1, 2).tolist():
        for start in range(begin, end, step):
            yield start, min(start + step, end)
