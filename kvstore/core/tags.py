"""A multimap from the first bytes of block hashes to small numbers, in 16 bytes an entry and a half."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.types import HASH_BYTES

U64 = npt.NDArray[np.uint64]
LOAD_MAX = 0.66
SPARE = 1024
"""Places behind the last home place: probing goes on there and never starts over at the front."""
MIN_BITS = 6
_GOLDEN = 0x9E3779B97F4A7C15


def tags_of(keys: bytes) -> U64:
    """Return the first 8 bytes of packed hashes. Shapes: u64[n]."""
    tags: U64 = np.frombuffer(keys, "<u8")[:: HASH_BYTES // 8]
    return tags


def tag_of(key: bytes) -> int:
    """Return the first 8 bytes of a hash."""
    return int.from_bytes(key[:8], "little")


class TagMap:
    """Open addressing over two arrays, rebuilt in bulk; nothing is ever removed but by a rebuild.

    Whoever looks up must know which values still count: a caller forgets by no longer knowing a value, and
    says which are left when the map asks for that. Values are above 0.
    """

    def __init__(self) -> None:
        self._bits = MIN_BITS
        self._tags: U64 = np.zeros((1 << MIN_BITS) + SPARE, np.uint64)
        self._values: U64 = np.zeros((1 << MIN_BITS) + SPARE, np.uint64)
        self._used = 0

    @property
    def is_full(self) -> bool:
        """Say whether it has to be rebuilt before more comes in."""
        return self._used > LOAD_MAX * (1 << self._bits)

    def rebuild(self, tags: U64, values: U64, *, spare: float = 2.0) -> None:
        """Hold these entries and no others; `spare` times as many places as entries at least."""
        self._bits = max(MIN_BITS, int(np.ceil(np.log2(max(1, len(tags)) * spare))))
        size = (1 << self._bits) + SPARE
        homes = self._homes(tags)
        order = np.argsort(homes)
        steps = np.arange(len(order))
        # Each entry lies at its home, or right behind the one before it.
        places = steps + np.maximum.accumulate(homes[order].astype(np.int64) - steps) if len(order) else order
        size = max(size, int(places[-1]) + 2 if len(order) else 0)
        self._tags, self._values = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
        self._tags[places], self._values[places] = tags[order], values[order]
        self._used = len(order)

    def _homes(self, tags: U64) -> U64:
        # Hashes are random, but who sends them may choose them.
        with np.errstate(over="ignore"):
            return (tags * np.uint64(_GOLDEN)) >> np.uint64(64 - self._bits)

    def add(self, tag: int, value: int) -> bool:
        """Add an entry; says whether there was a place for it, else the map has to be rebuilt first."""
        place = ((tag * _GOLDEN) & 0xFFFFFFFFFFFFFFFF) >> (64 - self._bits)
        end = len(self._values) - 1
        while place < end and self._values[place]:
            place += 1
        if place >= end or self.is_full:
            return False
        self._tags[place], self._values[place] = tag, value
        self._used += 1
        return True

    def get(self, tag: int) -> Iterator[int]:
        """Yield the values under a tag."""
        place = ((tag * _GOLDEN) & 0xFFFFFFFFFFFFFFFF) >> (64 - self._bits)
        while value := int(self._values[place]):
            if int(self._tags[place]) == tag:
                yield value
            place += 1

    def find(self, tags: U64) -> list[tuple[int, int]]:
        """Return (position, value) of all values under any of these tags, by position."""
        found: list[tuple[int, int]] = []
        positions = np.arange(len(tags))
        places = self._homes(tags).astype(np.int64)
        while len(positions):
            values = self._values[places]
            hits = np.flatnonzero((self._tags[places] == tags) & (values != 0))
            found += zip(positions[hits].tolist(), values[hits].tolist(), strict=True)
            going = np.flatnonzero(values)
            positions, tags, places = positions[going], tags[going], places[going] + 1
        return sorted(found)
