"""What is known of reuse: how likely blocks of a kind are to be read again, by how long nobody has read them.

Age counts in blocks that were read or written meanwhile: it needs no clock and means the same at any load.
The worth of a block is the best that can be had by keeping it a while: the hits expected until then, per
time kept (a Gittins index; as in Beckmann et al., "LHD: improving cache hit rate by maximizing hit
density", NSDI 2018, which counts them per size).
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

AGES = 36
FIRST_AGE_BLOCKS = 256.0
AGE_STARTS: list[float] = [0.0, *(FIRST_AGE_BLOCKS * 2 ** (step / 2) for step in range(AGES))]
"""Ages from AGE_STARTS[i] on to the next are alike: half octaves. Units: blocks read or written since."""

DEPTHS, GAPS = 5, 8
BODIES = DEPTHS * GAPS
"""Kinds of what may continue a session: by how many requests built it, and by how long its last pause was."""
SHARED, TAIL, LEFT_BEHIND = BODIES, BODIES + 1, BODIES + 2
"""What many continue; the last block of a request; a branch from whose root the session went on elsewhere."""
KINDS = BODIES + 3

DECAY = 0.99
PRIOR_BLOCKS = 20.0
SHRINK_BLOCKS = 30_000.0
SCALE_BLOCKS = 200.0
HAZARD_MAX = 0.95
BIRTHS_MAX = 1 << 16


def age_of(blocks: float) -> int:
    """Return the age, 0..AGES-1, of what was read or written so many blocks ago."""
    return min(AGES, bisect.bisect_right(AGE_STARTS, blocks)) - 1


def body_kind(depth: int, gap_blocks: float) -> int:
    """Return the kind of what `depth` requests built, the last after a pause; a negative one: no pause."""
    gap = 0
    if gap_blocks >= 0:
        gap = 1 + bisect.bisect_right(_GAP_BOUNDS, gap_blocks)
    return min(depth, DEPTHS - 1) * GAPS + gap


_GAP_BOUNDS = (1024.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)


@dataclass(slots=True, eq=False)
class Birth:
    """Blocks that were read or written together: when, of which kind, and how many were not read since."""

    table: ReuseTable
    at: float
    kind: int
    blocks: int = 0

    def read(self, now: float, blocks: int) -> None:
        """Note that so many of them were read again: from here on they belong to another birth."""
        self.table.note_read(self.kind, age_of(now - self.at), blocks)
        self.blocks -= blocks


class ReuseTable:
    """Reads by kind and age against what reached that age: hazards, and what they make a block worth."""

    def __init__(self) -> None:
        self._reads: Floats = np.zeros((KINDS, AGES))
        self._reached: Floats = np.zeros((KINDS, AGES))
        self._waiting: list[deque[Birth]] = [deque() for _ in range(AGES)]
        self._births = 0
        self.worth: Floats = _worth(_prior() + np.zeros((KINDS, AGES)))

    def born(self, now: float, kind: int) -> Birth:
        """Begin to follow blocks from now on."""
        birth = Birth(self, now, kind)
        self._waiting[0].append(birth)
        self._births += 1
        return birth

    def note_read(self, kind: int, age: int, blocks: int) -> None:
        """Count blocks that were read again at an age."""
        self._reads[kind, age] += blocks

    def pass_time(self, now: float) -> None:
        """Let births grow older: what of them nobody read until an age may be read at that age."""
        for age, start in enumerate(AGE_STARTS[:-1]):
            queue = self._waiting[age]
            while queue and now - queue[0].at >= start:
                birth = queue.popleft()
                self._reached[birth.kind, age] += birth.blocks
                if age + 1 < AGES and birth.blocks:
                    self._waiting[age + 1].append(birth)
                else:
                    self._births -= 1
        for queue in reversed(self._waiting):
            while queue and self._births > BIRTHS_MAX:
                queue.popleft()
                self._births -= 1

    def learn(self) -> None:
        """Work the worth out anew from what was seen; the past counts a little less each time."""
        body_reads, body_reached = self._reads[:BODIES], self._reached[:BODIES]
        common = _shrunk(body_reads.sum(0), body_reached.sum(0), _prior(), PRIOR_BLOCKS)
        shape = (DEPTHS, GAPS, AGES)
        by_depth = _estimate(
            body_reads.reshape(shape).sum(1), body_reached.reshape(shape).sum(1), np.tile(common, (DEPTHS, 1))
        )
        bodies = _estimate(body_reads, body_reached, np.repeat(by_depth, GAPS, axis=0))
        others = _shrunk(self._reads[BODIES:], self._reached[BODIES:], _prior(), PRIOR_BLOCKS)
        self.worth = _worth(np.vstack((bodies, others)))
        self._reads *= DECAY
        self._reached *= DECAY


def _prior() -> Floats:
    """What is believed before anything was seen: the longer nobody read a block, the less it will be read."""
    starts = np.array(AGE_STARTS)
    width = np.diff(starts)
    return np.minimum(0.5, 0.3 * width / (starts[:-1] + 1.5 * width))


def _shrunk(reads: Floats, reached: Floats, believed: Floats, weight: float) -> Floats:
    return np.minimum(HAZARD_MAX, (reads + weight * believed) / (reached + weight))


def _estimate(reads: Floats, reached: Floats, believed: Floats) -> Floats:
    """Hazards of kinds of which little may be known: what was seen, as far as it goes, and else what is
    believed, to the scale of what was seen of each.
    """
    expected = (reached * believed).sum(1, keepdims=True)
    scale = (reads.sum(1, keepdims=True) + SCALE_BLOCKS) / (expected + SCALE_BLOCKS)
    return _shrunk(reads, reached, np.minimum(HAZARD_MAX, believed * scale), SHRINK_BLOCKS)


def _worth(hazards: Floats) -> Floats:
    """Return per kind and age the best ratio of hits to time kept, over all ages to which it may be kept.

    Shapes: f64[kinds, ages] to f64[kinds, ages]. Units: hits per block and block of time.
    """
    width = np.diff(np.array(AGE_STARTS))
    alive = np.cumprod(np.hstack((np.ones((len(hazards), 1)), 1 - hazards[:, :-1])), axis=1)
    hits = np.cumsum(alive * hazards, axis=1)
    kept = np.cumsum(alive * width * (1 - hazards / 2), axis=1)
    before_hits = np.hstack((np.zeros((len(hazards), 1)), hits[:, :-1]))
    before_kept = np.hstack((np.zeros((len(hazards), 1)), kept[:, :-1]))
    gained = hits[:, None, :] - before_hits[:, :, None]
    spent = kept[:, None, :] - before_kept[:, :, None]
    ratios = np.where(
        np.triu(np.ones((AGES, AGES), np.bool_)), gained / np.where(spent > 0, spent, np.inf), 0
    )
    best: Floats = ratios.max(axis=2)
    return best
