"""How recovered frames hang together, told from their packed keys without a Python step per block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.frames import Frame
from kvstore.types import HASH_BYTES, key_at

BATCH_BLOCKS = 1 << 15
_WORDS = HASH_BYTES // 8
_PARENT, _HEAD = 1, 2


class Links:
    """Frames of one namespace by number.

    `followers` are frames by the block they follow, `inside` the blocks among those that lie in a frame.
    `branches` are, by frame, positions of blocks that other frames follow; `overlapping` frames share blocks
    with another one: of two that do, one holds the other's first block.
    """

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.followers: dict[bytes, list[int]] = {}
        self.inside: set[bytes] = set()
        self.branches: dict[int, list[int]] = {}
        self.overlapping: set[int] = set()
        self._heads: dict[bytes, int] = {}
        for number, frame in enumerate(frames):
            self.followers.setdefault(frame.parent, []).append(number)
            head = frame.keys[:HASH_BYTES]
            if (other := self._heads.setdefault(head, number)) != number:
                self.overlapping.update((other, number))
        for number, position, key in self._candidates(frames):
            self._note(number, position, key)

    def _note(self, number: int, position: int, key: bytes) -> None:
        if key in self.followers:
            self.inside.add(key)
            self.branches.setdefault(number, []).append(position)
        if position and key in self._heads:
            self.overlapping.update((number, self._heads[key]))

    def _candidates(self, frames: Sequence[Frame]) -> Iterator[tuple[int, int, bytes]]:
        """Yield (frame, position, key) of the blocks that may be a parent or another frame's first block, in
        order: those that meet one in a table of short hashes.
        """
        table = np.zeros(1 << max(16, (32 * len(frames)).bit_length()), np.uint8)
        for some, mark in ((self.followers, _PARENT), (self._heads, _HEAD)):
            table[_places(b"".join(some), table)] |= mark
        for numbers in _batches(frames):
            keys = [frames[number].keys for number in numbers]
            packed = b"".join(keys)
            ends = np.cumsum([len(some) // HASH_BYTES for some in keys])
            found = table[_places(packed, table)]
            starts = np.concatenate(([0], ends[:-1]))
            found[starts] &= _PARENT
            hits = np.flatnonzero(found)
            owners = np.searchsorted(ends, hits, side="right")
            for hit, owner, start in zip(
                hits.tolist(), owners.tolist(), starts[owners].tolist(), strict=True
            ):
                yield numbers[owner], hit - start, key_at(packed, hit)


def _places(packed: bytes, table: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    places: npt.NDArray[np.uint64] = np.frombuffer(packed, "<u8")[::_WORDS] & np.uint64(len(table) - 1)
    return places


def _batches(frames: Sequence[Frame]) -> Iterator[range]:
    first = blocks = 0
    for number, frame in enumerate(frames):
        blocks += len(frame.keys) // HASH_BYTES
        if blocks >= BATCH_BLOCKS:
            yield range(first, number + 1)
            first, blocks = number + 1, 0
    if blocks:
        yield range(first, len(frames))
