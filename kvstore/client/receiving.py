"""Receives the payload of a fetch: which blocks were announced, where their pieces belong, whether they are
right. Knows nothing of how they come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.api import Progress
from kvstore.client.buffers import pieces_of, rows_of
from kvstore.client.delivery import Delivery
from kvstore.errors import TierUnavailable
from kvstore.layout import Layout
from kvstore.rows import Buffer, Bytes, digest_rows
from kvstore.types import DIGEST_BYTES, MissReason


@dataclass(slots=True)
class _Awaited:
    """A block announced by a progress event, and how much of it has come."""

    length: int
    digests: bytes
    received: int = 0


class Receiver:
    """Says where chunks belong and checks each block when it is whole.

    Threads: one.
    """

    def __init__(
        self, layout: Layout, into: Mapping[int, Buffer], delivery: Delivery, *, verify: bool
    ) -> None:
        self._layout = layout
        self._into = into
        self._delivery = delivery
        self._verify = verify
        self._awaited: OrderedDict[tuple[int, int], _Awaited] = OrderedDict()
        self._last: Progress | None = None

    @property
    def done(self) -> bool:
        """Say whether the last news said done and all that was announced has come."""
        return self._last is not None and self._last.done and not self._awaited

    @property
    def has_enough(self) -> bool:
        """Say whether nothing of what may still come is wanted."""
        return self.done or (not self._delivery.has_side_parts and self._delivery.complete())

    def is_followed(self, blocks: int) -> bool:
        """Say whether more is on its way behind so many awaited blocks, be it the end."""
        return (self._last is not None and self._last.done) or len(self._awaited) > blocks

    def next_blocks(self, part: int, block: int, *, bytes_max: int, views_max: int) -> list[list[Bytes]]:
        """Return where whole blocks of a part belong, in pieces: from the one on that comes first of all
        awaited, as many as follow it in their order within so many bytes and views, headers included. None
        where it does not come first, or is not wanted.
        """
        found: list[list[Bytes]] = []
        size = 0
        for (its_part, its_block), awaited in self._awaited.items():
            size += awaited.length
            if (
                (its_part, its_block) != (part, block + len(found))
                or awaited.received
                or not self._delivery.first <= its_block < self._delivery.limit
                or (found and (size > bytes_max or len(found) * (len(found[0]) + 1) >= views_max))
            ):
                break
            found.append(pieces_of(self._into[part], its_block - self._delivery.first, awaited.length))
        return found

    def progress(self, progress: Progress) -> None:
        """Take note of the blocks whose chunks follow."""
        for extent in progress.extents:
            if extent.part not in self._into:
                continue
            width = DIGEST_BYTES * len(self._layout.parts[extent.part].segments)
            for index in np.flatnonzero(extent.slots).tolist():
                digests = extent.digests[index * width : (index + 1) * width]
                awaited = _Awaited(int(extent.lengths[index]), digests)
                if awaited.length:
                    self._awaited[extent.part, extent.first + index] = awaited
                else:
                    self._finish(extent.part, extent.first + index, [awaited])  # no chunk follows
        self._last = progress
        self._delivery.cut(progress.blocks, progress.reason)

    def room(self, part: int, block: int, *, offset: int, size: int) -> list[Bytes]:
        """Return where a chunk is to be put, as views in order, none where it is not wanted. `arrived` must
        follow.

        Errors: TierUnavailable when it belongs to no announced block, leaves a gap or is too long.
        """
        awaited = self._awaited.get((part, block))
        if awaited is None or offset != awaited.received:
            raise TierUnavailable(f"fetch: chunk of part {part}, block {block} was not announced so")
        if offset + size > awaited.length:
            raise TierUnavailable(f"fetch: block {block} is longer than the {awaited.length} bytes announced")
        # Outside of the buffers' rows nothing was asked for; the lease may be longer than the fetch.
        if not self._delivery.first <= block < self._delivery.limit:
            return []
        row = block - self._delivery.first
        return _cut(pieces_of(self._into[part], row, awaited.length), offset, size)

    def arrived(self, part: int, block: int, *, size: int) -> None:
        """Take note of a chunk and check its block when it is whole."""
        awaited = self._awaited[part, block]
        awaited.received += size
        if awaited.received == awaited.length:
            self.arrived_whole(part, block, 1)

    def arrived_whole(self, part: int, block: int, count: int) -> None:
        """Check consecutive blocks, which `next_blocks` named, or whose last chunks have come."""
        self._finish(part, block, [self._awaited.pop((part, block + index)) for index in range(count)])

    def _finish(self, index: int, block: int, blocks: Sequence[_Awaited]) -> None:
        if not self._delivery.first <= block < self._delivery.limit:
            return
        good = self._good(index, block, blocks) if self._verify else len(blocks)
        self._delivery.arrive(index, block, block + good)
        if good < len(blocks):
            self._delivery.cut(block + good, MissReason.CORRUPT)

    def _good(self, index: int, block: int, blocks: Sequence[_Awaited]) -> int:
        """Return how many of consecutive blocks are right, up to the first that is not."""
        row, part = block - self._delivery.first, self._layout.parts[index]
        lengths = np.array([awaited.length for awaited in blocks], np.uint32)
        found = digest_rows(part, rows_of(self._into[index], row, row + len(blocks)), lengths)
        width = DIGEST_BYTES * len(part.segments)
        for position, awaited in enumerate(blocks):
            if found[position * width : (position + 1) * width] != awaited.digests:
                return position
        return len(blocks)


def _cut(pieces: list[Bytes], offset: int, size: int) -> list[Bytes]:
    """Return bytes [offset, offset + size) of what lies in pieces."""
    views: list[Bytes] = []
    for piece in pieces:
        if offset < len(piece) and size:
            view = piece[offset : offset + size]
            views.append(view)
            size -= len(view)
        offset = max(0, offset - len(piece))
    return views
