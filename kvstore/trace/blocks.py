"""A request of a trace, and its blocks as keys that the store's own index can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.types import HASH_BYTES

IDS_MAX = 1 << 20
"""Blocks of one request, at most."""
Runs = tuple[tuple[int, int], ...]
_STEP, _FOLD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_ODD = np.uint64(1)
_MIX, _SHIFT = np.uint64(0x94D049BB133111EB), np.uint64(31)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Units: timestamp in milliseconds; `runs` are (first id, count) in prefix order.

    An id names a block's content; the block is that content behind the ids before it. The last block may be
    a partial one. `weights` are the tokens of each block where a trace says them.
    """

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    runs: Runs
    retention_class: str = ""
    weights: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        """How many blocks the prompt has."""
        return sum(count for _, count in self.runs)

    def hit_tokens(self, blocks: int, *, block_tokens: int) -> int:
        """Return how many of the prompt's tokens its first `blocks` blocks hold."""
        held = sum(self.weights[:blocks]) if self.weights else blocks * block_tokens
        return min(held, self.input_tokens)

    def keys(self) -> bytes:
        """Return a packed key for each block. It follows from the ids up to there: what turns up behind
        another prefix is another block. Sums over mixed ids tell prefixes apart as a hash would, but fast.
        """
        words = np.zeros((self.blocks, HASH_BYTES // 8), np.uint64)
        if self.runs:
            ids = np.concatenate([np.arange(a, a + n, dtype=np.uint64) for a, n in self.runs])
            places = np.arange(1, len(ids) + 1, dtype=np.uint64)
            mixed = _mixed(ids + places * _STEP)
            np.cumsum(mixed, out=words[:, 0])
            np.cumsum(mixed * (places + places + _ODD), out=words[:, 1])
            words[:, 2], words[:, 3] = places, ids
        return words.tobytes()


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread words over 64 bits. Source: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    words = (words ^ (words >> _SHIFT)) * _FOLD
    words = (words ^ (words >> _SHIFT)) * _MIX
    return words ^ (words >> _SHIFT)


def runs_of(ids: npt.NDArray[np.int64]) -> Runs:
    """Return ids as runs of consecutive numbers. Shapes: i64[blocks]."""
    if not len(ids):
        return ()
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = [0, *cuts.tolist()]
    ends = [*cuts.tolist(), len(ids)]
    return tuple((int(ids[a]), b - a) for a, b in zip(starts, ends, strict=True))


def checked_runs(pairs: Sequence[Sequence[int]]) -> Runs:
    """Return (first id, count) pairs as runs.

    Errors: ValueError on pairs that are no runs, and beyond IDS_MAX blocks.
    """
    runs = tuple((int(first), int(count)) for first, count in pairs)
    if any(first < 0 or count < 1 for first, count in runs) or sum(count for _, count in runs) > IDS_MAX:
        raise ValueError(f"ids must be >= 0, runs not empty, and at most {IDS_MAX} in all")
    return runs
