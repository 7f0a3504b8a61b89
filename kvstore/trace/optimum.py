"""What no order of eviction can beat: hits of a cache that knows the future (Belady's MIN on single blocks).

An upper bound, and a generous one. It ignores that a block only helps when all before it are there, and it
may bypass: a block that is needed later than all others is not taken in at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.trace.requests import TraceRequest

NEVER = np.iinfo(np.int32).max
DENSE_IDS_MAX = 1 << 27
Ints = npt.NDArray[np.int64]


class Future:
    """A trace with the next use of every block reference; made once, asked at any capacity.

    Shapes: per request i64[blocks] of ids without gaps, and i32[blocks] of the next request that names each.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._requests = requests
        self._names = _sparse_names(requests)
        self._ids_max = 1 + max((first + count for r in requests for first, count in r.runs), default=0)
        if self._names is not None:
            self._ids_max = len(self._names)
        self._next: list[npt.NDArray[np.int32]] = []
        seen = np.full(self._ids_max, NEVER, np.int32)
        for index in range(len(requests) - 1, -1, -1):
            ids = self._ids(index)
            self._next.append(seen[ids])
            seen[ids] = index
        self._next.reverse()

    def _ids(self, index: int) -> Ints:
        ids = _ids_of(self._requests[index])
        return ids if self._names is None else np.searchsorted(self._names, ids)

    def hit_tokens(self, *, block_tokens: int, capacity_blocks: int) -> int:
        """Return the hit tokens of the best cache of so many blocks."""
        hits = 0
        wanted_at = np.full(self._ids_max, -1, np.int32)
        """The next use of what is kept, -1 of what is not."""
        kept = np.zeros(len(self._requests), np.int64)
        """How many kept blocks each request will find: all of them are needed at once."""
        latest: list[int] = []
        total = 0
        for index, request in enumerate(self._requests):
            ids, later = self._ids(index), self._next[index]
            there = wanted_at[ids] >= 0
            hits += block_tokens * int(there.sum())
            if len(ids) and there[-1]:
                # The last block may be a partial one.
                hits -= max(0, block_tokens * len(ids) - request.input_tokens)
            total += int((later != NEVER).sum()) - int(there.sum())
            kept[index] = 0
            wanted_at[ids] = np.where(later == NEVER, -1, later)
            for wanted, count in zip(*np.unique(later[later != NEVER], return_counts=True), strict=True):
                if not kept[wanted]:
                    heapq.heappush(latest, -int(wanted))
                kept[wanted] += count
            while total > capacity_blocks:
                total -= self._give_up(-latest[0], total - capacity_blocks, wanted_at, kept)
                if not kept[-latest[0]]:
                    heapq.heappop(latest)
        return hits

    def _give_up(self, index: int, count: int, wanted_at: npt.NDArray[np.int32], kept: Ints) -> int:
        """Drop up to so many blocks that request `index` would have found, its last ones first."""
        ids = self._ids(index)
        gone = ids[wanted_at[ids] == index][-count:]
        wanted_at[gone] = -1
        kept[index] -= len(gone)
        return len(gone)


def _ids_of(request: TraceRequest) -> Ints:
    if not request.runs:
        return np.zeros(0, np.int64)
    return np.concatenate([np.arange(first, first + count) for first, count in request.runs])


def _sparse_names(requests: Sequence[TraceRequest]) -> Ints | None:
    """Return all ids in order when they are too far apart to count through them, else None."""
    if max((first + count for r in requests for first, count in r.runs), default=0) <= DENSE_IDS_MAX:
        return None
    names = np.zeros(0, np.int64)
    for start in range(0, len(requests), 1024):
        names = np.unique(np.concatenate([names, *map(_ids_of, requests[start : start + 1024])]))
    return names
