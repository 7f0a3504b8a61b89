"""Searches through all that sleeps, and all that does not, for administrators: a stretch under the lock at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from kvstore.core.beds import Marks
from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.frames import Node
from kvstore.core.segments import Segment
from kvstore.core.sleepers import Sleeper
from kvstore.core.sweep import stretches
from kvstore.core.tags import U64, tags_of
from kvstore.tiers.base import FrameHeader, Tier, marks_of
from kvstore.types import Fingerprint, split_keys

ADMIN_SECONDS = 60.0
HEADERS_AT_ONCE = 128
SEGMENTS_AT_ONCE = 16
_FILTER_BITS = 16
Described = tuple[Sleeper, FrameHeader]


class Search:
    """Looks through rows, and where those do not tell, through headers.

    Threads: any, without the lock. Traffic goes on meanwhile: what falls asleep or wakes may be missed.
    """

    def __init__(self, catalog: Catalog, tier: Tier | None, lock: AbstractContextManager[object]) -> None:
        self._catalog = catalog
        self._tier = tier
        self._lock = lock

    def _beds(self, space: Fingerprint) -> Iterator[Segment]:
        """Yield the segments in which frames sleep, under the lock; it is let go of now and then."""
        with self._lock:
            if self._catalog.sleepers.is_empty(space):
                return
            segments = list(self._catalog.segments)
        for start in range(0, len(segments), SEGMENTS_AT_ONCE):
            with self._lock:
                yield from (s for s in segments[start : start + SEGMENTS_AT_ONCE] if s.bed.count)

    def _column(self, space: Fingerprint, name: str) -> tuple[U64, list[tuple[int, npt.NDArray[np.intp]]]]:
        """Return a column of all rows of a namespace; by segment, which rows it comes from."""
        parts, places = [np.zeros(0, np.uint64)], []
        for segment in self._beds(space):
            rows = segment.bed.rows
            codes = self._catalog.sleepers.names.codes([space])
            here = np.flatnonzero((rows["count"] > 0) & np.isin(rows["shape"], codes))
            parts.append(rows[name][here])
            places.append((segment.number, here))
        return np.concatenate(parts), places

    def after(self, space: Fingerprint, place: bytes, *, limit: int) -> list[Sleeper]:
        """Return the frames whose first key may come after a place in the order of keys, the next `limit` of
        them and those that only their row does not tell from it.
        """
        heads, places = self._column(space, "head")
        heads = heads.byteswap()
        start = int.from_bytes(place[:8].ljust(8, b"\0"), "big")
        near = np.flatnonzero(heads >= start)
        count = limit + int(np.count_nonzero(heads[near] == start))
        chosen = near[np.argsort(heads[near], kind="stable")[:count]]
        return _sleepers(chosen, places)

    def holding(self, space: Fingerprint, keys: bytes) -> list[Sleeper]:
        """Return the frames that may hold any of these blocks."""
        marks, found = marks_of(keys), list[Sleeper]()
        table = np.zeros(1 << _FILTER_BITS, np.bool_)
        table[_short(marks)] = True
        for segment in self._beds(space):
            some = np.flatnonzero(table[_short(segment.bed.marks)])
            for row in segment.bed.holding(marks, among=some) if len(some) else ():
                sleeper = Sleeper(segment.number, row)
                if self._catalog.sleepers.shape(sleeper).namespace == space:
                    found.append(sleeper)
        return found

    def described(self, sleepers: Iterable[Sleeper]) -> list[Described]:
        """Return frames with their headers, without waking them; not those that cannot be read."""
        with self._lock:
            there, places = self._catalog.sleepers.located(sleepers)
        if not places or self._tier is None:
            return []
        items = self._tier.headers(places).result(ADMIN_SECONDS)
        return [(sleeper, item.header) for sleeper, item in zip(there, items, strict=True) if item]

    def by_keys(
        self, spaces: Collection[Fingerprint], holds: Callable[[bytes], bool], *, limit: int
    ) -> list[Described]:
        """Return frames, each with its header, of which `holds` says yes to their packed keys; reads the
        headers of all that sleep in some namespaces.
        """
        found: list[Described] = []
        for some in self.asleep(spaces):
            found += (pair for pair in self.described(some) if holds(pair[1].keys))
            if len(found) >= limit:
                break
        return found[:limit]

    def awake(self, states: Iterable[NamespaceState]) -> Iterator[list[Node]]:
        """Yield the runs that are awake of some namespaces, some at a time; the lock is held to look for them
        only.
        """
        return stretches(self._lock, states)

    def asleep(self, spaces: Collection[Fingerprint]) -> Iterator[list[Sleeper]]:
        """Yield what sleeps of some namespaces, some frames at a time; the lock is held to look for them
        only.
        """
        sleepers = self._catalog.sleepers
        with self._lock:
            segments = list(self._catalog.segments)
        found: list[Sleeper] = []
        for segment in segments:
            with self._lock:
                found += sleepers.of_spaces(spaces, among=[segment]) if segment.bed.count else ()
            while len(found) >= HEADERS_AT_ONCE:
                yield found[:HEADERS_AT_ONCE]
                del found[:HEADERS_AT_ONCE]
        if found:
            yield found

    def blocks_asleep(self, states: Collection[NamespaceState]) -> int:
        """Return how many blocks sleep of some namespaces."""
        sleepers, spaces = self._catalog.sleepers, {state.fingerprint for state in states}
        with self._lock:
            codes = set(sleepers.names.codes(spaces))
            return sum(blocks for (shape, _), blocks in sleepers.blocks_held.items() if shape in codes)

    def below(self, space: Fingerprint, keys: bytes) -> list[Sleeper]:
        """Return the frames that hold any of these blocks or follow one of them, and what follows those."""
        parents, places = self._column(space, "parent")
        names, found = set(split_keys(keys)), dict[Sleeper, None]()
        fresh, is_first = keys, True
        while fresh or is_first:
            hits = np.flatnonzero(np.isin(parents, tags_of(fresh)))
            asked = [s for s in _sleepers(hits, places) if s not in found]
            if not asked:
                # Only once a chain has come to its end: it looks at every block.
                packed = b"".join(names)
                asked = [s for s in self.holding(space, packed) if s not in found]
                if not asked:
                    break
            held = [(s, h) for s, h in self.described(asked) if _is_meant(h, names)]
            found.update((sleeper, None) for sleeper, _ in held)
            fresh = b"".join(header.keys for _, header in held)
            names.update(split_keys(fresh))
            is_first = False
        return list(found)


def _is_meant(header: FrameHeader, names: set[bytes]) -> bool:
    return header.parent in names or not names.isdisjoint(split_keys(header.keys))


def _short(marks: Marks) -> Marks:
    return marks & np.uint32((1 << _FILTER_BITS) - 1)


def _sleepers(
    positions: npt.NDArray[np.intp], places: list[tuple[int, npt.NDArray[np.intp]]]
) -> list[Sleeper]:
    """Return what lies at positions of a column."""
    ends = np.cumsum([len(rows) for _, rows in places])
    owners = np.searchsorted(ends, positions, side="right")
    found = []
    for position, owner in zip(positions.tolist(), owners.tolist(), strict=True):
        number, rows = places[owner]
        found.append(Sleeper(number, int(rows[position - (int(ends[owner - 1]) if owner else 0)])))
    return found
