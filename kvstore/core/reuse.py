"""What is known of reuse: how likely blocks are to be read again, by how long nobody has read them.

Each retention class learns of its own traffic. How likely is a product: of what holds for all sessions at
an age, and of a factor for each thing that is known of a session when it was last used. Factors are learned
from few sessions, where a table of all combinations would need many. The worth of a block is the best that
can be had by keeping it a while: the hits expected until then, per time kept (a Gittins index; as in Beckmann
et al., "LHD: improving cache hit rate by maximizing hit density", NSDI 2018, which counts them per size).
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from enum import IntEnum
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

AGES = 36
FIRST_AGE_SECONDS = 2.0
AGE_STARTS: list[float] = [0.0, *(FIRST_AGE_SECONDS * 2 ** (step / 2) for step in range(AGES))]
"""Ages from AGE_STARTS[i] on to the next are alike: half octaves, to six days. Units: seconds."""
BANDS = 8
BAND_OF_AGE = [min(BANDS - 1, max(0, age - 3) // 2) for age in range(AGES)]
"""Factors may differ between ages: an octave each from 8 s to 9 min, and what is below and above."""

DECAY = 0.9975
PRIOR = 20.0
"""Of what is believed before anything was seen: as much as so many blocks or sessions."""
FACTOR_PRIOR, BAND_PRIOR = 60.0, 120.0
DAMPING = 0.15
"""Factors of the same sessions answer the same surprise, so each goes a part of the way."""
HAZARD_MAX = 0.95
BIRTHS_MAX = 1 << 16

PAUSE_BOUNDS = (0.0, *(float(1 << step) for step in range(2, 14)))
SPELL_BOUNDS = (1, 2, 3, 5, 8, 12, 20, 40)
BINS = 64
Signature = tuple[int, ...]
"""What is known of a session, in bins: its last pause and its usual one, its length, its news, and how many
requests came one upon the other.
"""


class Kind(IntEnum):
    """What blocks are: the end of a session; what many continue; the last block of a request; a branch from
    whose root its session went on elsewhere.
    """

    SESSION = 0
    SHARED = 1
    TAIL = 2
    LEFT_BEHIND = 3


def age_of(seconds: float) -> int:
    """Return the age, 0..AGES-1, of what was read or written so long ago."""
    return min(AGES, bisect.bisect_right(AGE_STARTS, max(0.0, seconds))) - 1


def signature_of(
    *, pause_seconds: float, usual_pause: float, spell: int, blocks: int, new_blocks: int
) -> Signature:
    """Return what is known of a session; negative pauses: it has just begun. Units: `usual_pause` in octaves
    of seconds.
    """
    return (
        bisect.bisect_right(PAUSE_BOUNDS, pause_seconds),
        min(BINS - 1, int(2 * max(0.0, usual_pause + 0.5))),
        min(BINS - 1, int(4 * math.log2(max(1, blocks)))),
        min(BINS - 1, max(0, new_blocks).bit_length()),
        bisect.bisect_right(SPELL_BOUNDS, spell),
    )


FRESH = signature_of(pause_seconds=-1.0, usual_pause=-1.0, spell=0, blocks=1, new_blocks=1)
FEATURES = len(FRESH)


class Birth:
    """Blocks that were read or written together: when, of which kind, and how many were not read since.

    A session counts as one, however long it is: `size` is what it had in all. `age` lags until time passes.
    """

    __slots__ = ("age", "at", "blocks", "kind", "signature", "size", "table")

    def __init__(self, table: ReuseTable[Any], at: float, kind: Kind) -> None:
        self.table = table
        self.at = at
        self.kind = kind
        self.signature = FRESH
        self.blocks = self.size = self.age = 0

    def grow(self, blocks: int) -> None:
        """So many blocks more belong to it."""
        self.blocks += blocks
        self.size = max(self.size, self.blocks)

    def read(self, now: float, blocks: int) -> None:
        """Note that so many of them were read again: from here on they belong to another birth."""
        self.table.note_read(self, age_of(now - self.at), blocks)
        self.blocks -= blocks

    def weight(self, blocks: int) -> float:
        """Return for how much so many of its blocks count."""
        return blocks / max(1, self.size) if self.kind is Kind.SESSION else blocks

    @property
    def worth(self) -> float:
        """Hits to be expected per block and second of keeping it."""
        return self.table.worth(self)


AnyBirth = TypeVar("AnyBirth", bound=Birth)


class Factors:
    """How much likelier reuse is where something is known of a session: by feature, bin and band of age.

    Shapes: [features][bins][1 + bands], the first of them for all ages.
    """

    def __init__(self) -> None:
        self._factor: Floats = np.ones((FEATURES, BINS, 1 + BANDS))
        self._seen = _zeros()
        self._expected = _zeros()
        self._set_bands()

    def of(self, signature: Signature, band: int) -> float:
        """Return the factor of a session in a band of ages."""
        found = 1.0
        for bins, place in zip(self._in_band, signature, strict=True):
            found *= bins[place][band]
        return found

    def by_age(self, signature: Signature) -> Floats:
        """Return the factors of a session. Shapes: f64[ages]."""
        bands: Floats = self._bands[_EVERY_FEATURE, signature].prod(axis=0)
        return bands[BAND_OF_AGE]

    def expect(self, signature: Signature, band: int, amount: float) -> None:
        """So much was expected to be read."""
        _add(self._expected, signature, band, amount)

    def see(self, signature: Signature, band: int, amount: float) -> None:
        """So much was read."""
        _add(self._seen, signature, band, amount)

    def learn(self) -> None:
        """Move each factor towards what was seen against what was expected."""
        seen, expected = np.array(self._seen), np.array(self._expected)
        ratio = ((seen + _PRIORS) / (expected + _PRIORS)) ** DAMPING
        self._factor *= ratio
        self._seen = (DECAY * seen).tolist()
        self._expected = (DECAY * ratio * expected).tolist()
        self._set_bands()

    def _set_bands(self) -> None:
        self._bands: Floats = self._factor[:, :, :1] * self._factor[:, :, 1:]
        self._in_band: list[list[list[float]]] = self._bands.tolist()


_EVERY_FEATURE = range(FEATURES)
_PRIORS = np.array([FACTOR_PRIOR] + [BAND_PRIOR] * BANDS)


def _zeros() -> list[list[list[float]]]:
    return [[[0.0] * (1 + BANDS) for _ in range(BINS)] for _ in range(FEATURES)]


def _add(table: list[list[list[float]]], signature: Signature, band: int, amount: float) -> None:
    for bins, place in zip(table, signature, strict=True):
        row = bins[place]
        row[0] += amount
        row[1 + band] += amount


class ReuseTable(Generic[AnyBirth]):
    """Reads by kind and age against what reached that age: hazards, and what they make a block worth."""

    def __init__(self) -> None:
        self._reads: Floats = np.zeros((len(Kind), AGES))
        self._reached: Floats = np.zeros((len(Kind), AGES))
        self._waiting: list[deque[AnyBirth]] = [deque() for _ in range(AGES)]
        self._births = 0
        self._factors = Factors()
        self._worths: dict[Signature, list[float]] = {}
        self._set_hazards()

    def follow(self, birth: AnyBirth) -> None:
        """Begin to follow blocks."""
        self._waiting[0].append(birth)
        self._births += 1

    def note_read(self, birth: Birth, age: int, blocks: int) -> None:
        """Count blocks that were read again at an age."""
        amount = birth.weight(blocks)
        self._reads[birth.kind, age] += amount
        if birth.kind is Kind.SESSION:
            self._factors.see(birth.signature, BAND_OF_AGE[age], amount)

    def pass_time(self, now: float) -> list[AnyBirth]:
        """Let births grow older: what of them nobody read until an age may be read at that age. Returns those
        that are of another age now.
        """
        older: list[AnyBirth] = []
        for age, start in enumerate(AGE_STARTS[:-1]):
            queue = self._waiting[age]
            while queue and now - queue[0].at >= start:
                birth = queue.popleft()
                if birth.blocks > 0:
                    self._reach(birth, age)
                    birth.age = age
                    if age:
                        older.append(birth)
                if birth.blocks > 0 and age + 1 < AGES:
                    self._waiting[age + 1].append(birth)
                else:
                    self._births -= 1
        for queue in reversed(self._waiting):
            while queue and self._births > BIRTHS_MAX:
                lost = queue.popleft()
                lost.age = AGES - 1
                older.append(lost)
                self._births -= 1
        return older

    def _reach(self, birth: Birth, age: int) -> None:
        amount = birth.weight(birth.blocks)
        self._reached[birth.kind, age] += amount
        if birth.kind is Kind.SESSION:
            band = BAND_OF_AGE[age]
            hazard = min(HAZARD_MAX, self._base[age] * self._factors.of(birth.signature, band))
            self._factors.expect(birth.signature, band, amount * hazard)

    def worth(self, birth: Birth) -> float:
        """Return what keeping one more block of a birth is worth at its age."""
        if birth.kind is not Kind.SESSION:
            return self._plain[birth.kind][birth.age]
        worths = self._worths.get(birth.signature)
        if worths is None:
            hazards = self._hazards[Kind.SESSION] * self._factors.by_age(birth.signature)
            worths = _worth(np.minimum(HAZARD_MAX, hazards)[None, :])[0].tolist()
            self._worths[birth.signature] = worths
        return worths[birth.age]

    def learn(self) -> None:
        """Work the worth out anew from what was seen; the past counts a little less each time."""
        self._set_hazards()
        self._factors.learn()
        self._reads *= DECAY
        self._reached *= DECAY

    def _set_hazards(self) -> None:
        believed = _prior()
        hazards = (self._reads + PRIOR * believed) / (self._reached + PRIOR)
        self._hazards: Floats = np.minimum(HAZARD_MAX, hazards)
        self._base: list[float] = self._hazards[Kind.SESSION].tolist()
        self._plain: list[list[float]] = _worth(self._hazards).tolist()
        self._worths.clear()


def _prior() -> Floats:
    """What is believed before anything was seen: the longer nobody read a block, the less it will be read."""
    starts = np.array(AGE_STARTS)
    width = np.diff(starts)
    return np.minimum(0.5, 0.3 * width / (starts[:-1] + 1.5 * width))


def _worth(hazards: Floats) -> Floats:
    """Return per row and age the best ratio of hits to time kept, over all ages to which it may be kept.

    Shapes: f64[rows, ages] to f64[rows, ages]. Units: hits per block and second.
    """
    width = np.diff(np.array(AGE_STARTS))
    alive = np.cumprod(np.hstack((np.ones((len(hazards), 1)), 1 - hazards[:, :-1])), axis=1)
    hits = np.cumsum(alive * hazards, axis=1)
    kept = np.cumsum(alive * width * (1 - hazards / 2), axis=1)
    before_hits = np.hstack((np.zeros((len(hazards), 1)), hits[:, :-1]))
    before_kept = np.hstack((np.zeros((len(hazards), 1)), kept[:, :-1]))
    gained = hits[:, None, :] - before_hits[:, :, None]
    spent = kept[:, None, :] - before_kept[:, :, None]
    ratios = np.where(_LATER, gained / np.where(spent > 0, spent, np.inf), 0)
    best: Floats = ratios.max(axis=2)
    return best


_LATER = np.triu(np.ones((AGES, AGES), np.bool_))
