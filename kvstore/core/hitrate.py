"""Hit rates of the recent past: what was asked for, what was delivered from where, and what stopped the rest.

Counted in buckets of a minute for two hours and of a quarter of an hour for a day; a bucket tells a bounded
number of (namespace, class) apart and puts the rest together.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MINUTE, QUARTER = 60.0, 900.0
MINUTES_KEPT, QUARTERS_KEPT = 120, 100
CELLS_MAX = 64
OTHER = (b"", "")
"""Where the traffic of namespaces and classes beyond CELLS_MAX is counted."""
LIFE_EDGES = tuple(
    minutes * MINUTE
    for minutes in (1, 2, 5, 10, 20, 30, 60, 120, 240, 480, 720, 1440, 2160, 2880, 4320, 5760, 7200, 10080,
                    14400, 20160, 43200, 86400)
)  # fmt: skip
"""Lives that advice can name. Units: seconds."""
ROOM_EDGES = tuple(float(1 << shift) for shift in range(26, 47))
"""Additional room that advice can name: 64 MiB to 64 TiB. Units: bytes."""
Key = tuple[bytes, str]


@dataclass(slots=True)
class Cell:
    """One (namespace, class) in one stretch of time. Units: tokens, and matches as `requests`.

    `lost_*[i]` are tokens that were missed because their blocks had left, and that it would have taken the
    i-th edge of LIFE_EDGES or ROOM_EDGES to keep; behind the last edge: more than any of them.
    """

    requests: int = 0
    full_hits: int = 0
    asked: int = 0
    hits: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    missed: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    misses: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    lost_to_expiry: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    lost_to_eviction: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, other: Cell) -> None:
        """Add another stretch or group."""
        self.requests += other.requests
        self.full_hits += other.full_hits
        self.asked += other.asked
        for mine, theirs in (
            (self.hits, other.hits),
            (self.missed, other.missed),
            (self.misses, other.misses),
        ):
            for name, count in theirs.items():
                mine[name] += count
        for lost, more in (
            (self.lost_to_expiry, other.lost_to_expiry),
            (self.lost_to_eviction, other.lost_to_eviction),
        ):
            for edge, count in more.items():
                lost[edge] += count


class _Bucket:
    __slots__ = ("cells", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.cells: dict[Key, Cell] = {}

    def cell(self, key: Key) -> Cell:
        found = self.cells.get(key)
        if found is None:
            if len(self.cells) >= CELLS_MAX:
                key = OTHER
            found = self.cells.setdefault(key, Cell())
        return found


class HitRates:
    """The recent past of one store. Guarded by the ladder's lock; costs a dictionary access a match."""

    def __init__(self) -> None:
        self._minutes: deque[_Bucket] = deque(maxlen=MINUTES_KEPT)
        self._quarters: deque[_Bucket] = deque(maxlen=QUARTERS_KEPT)

    def cell(self, space: bytes, name: str, *, monotonic: float) -> Cell:
        """Return where a namespace and a class are counted now."""
        now = self._minutes[-1] if self._minutes else None
        if now is None or monotonic >= now.start + MINUTE:
            now = self._turn(monotonic)
        return now.cell((space, name))

    def _turn(self, monotonic: float) -> _Bucket:
        """Begin a minute; the one that is over is added to its quarter of an hour."""
        if self._minutes:
            done = self._minutes[-1]
            quarter = self._quarters[-1] if self._quarters else None
            if quarter is None or done.start >= quarter.start + QUARTER:
                quarter = _Bucket(done.start // QUARTER * QUARTER)
                self._quarters.append(quarter)
            for key, cell in done.cells.items():
                quarter.cell(key).add(cell)
        fresh = _Bucket(monotonic // MINUTE * MINUTE)
        self._minutes.append(fresh)
        return fresh

    def within(self, seconds: float, *, monotonic: float) -> list[dict[Key, Cell]]:
        """Return what was counted in the last so many seconds, to the minute up to two hours, above that to
        the quarter of an hour. What is returned changes no more: to be summed without the lock.
        """
        since = monotonic - seconds
        live = {id(bucket) for kept in (self._minutes, self._quarters) for bucket in list(kept)[-1:]}
        return [
            summed([bucket.cells]) if id(bucket) in live else bucket.cells
            for bucket in self._buckets(since, seconds)
        ]

    def _buckets(self, since: float, seconds: float) -> Iterator[_Bucket]:
        if seconds <= MINUTES_KEPT * MINUTE:
            yield from (bucket for bucket in self._minutes if bucket.start + MINUTE > since)
            return
        yield from (bucket for bucket in self._quarters if bucket.start + QUARTER > since)
        if self._minutes:
            yield self._minutes[-1]


def summed(stretches: Iterable[Mapping[Key, Cell]]) -> dict[Key, Cell]:
    """Add stretches of time up."""
    sums: defaultdict[Key, Cell] = defaultdict(Cell)
    for cells in stretches:
        for key, cell in cells.items():
            sums[key].add(cell)
    return dict(sums)


def by_edge(
    needs: npt.NDArray[np.float64], edges: Sequence[float], *, tokens: int, into: defaultdict[int, int]
) -> None:
    """Add `tokens` for each block to the first edge that covers what it needs.

    A block is of use only with all before it, so it needs what the neediest of those needs.
    """
    covered = np.searchsorted(np.asarray(edges), np.maximum.accumulate(needs), side="left")
    for index, count in zip(*np.unique(covered, return_counts=True), strict=True):
        into[int(index)] += int(count) * tokens
