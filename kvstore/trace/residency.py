"""How much stays when: levels of the simulated tiers over virtual time."""

from __future__ import annotations

import heapq
import itertools
import math

from kvstore.core.catalog import Catalog
from kvstore.core.eviction import EvictionPolicy
from kvstore.core.frames import Node
from kvstore.types import MissReason


class Level:
    """A quantity over time: its mean and its peak."""

    def __init__(self) -> None:
        self._area = 0.0
        self._seconds = 0.0
        self.peak = 0

    def lasted(self, value: int, seconds: float) -> None:
        """The quantity was so much for so long."""
        self._area += value * seconds
        self._seconds += seconds

    def reached(self, value: int) -> None:
        """The quantity is so much now."""
        self.peak = max(self.peak, value)

    @property
    def mean(self) -> float:
        """The mean over time."""
        return self._area / self._seconds if self._seconds else 0.0


class Residency:
    """The store's own page and byte counts, integrated over virtual time. Units: host slots, SSD bytes.

    With `exact_ends` runs are dropped at the very moment they expire, which the daemon does within a tick;
    segments on SSD end as the daemon's housekeeping ends them.
    """

    def __init__(self, *, exact_ends: bool) -> None:
        self.host = Level()
        self.ssd = Level()
        self._exact_ends = exact_ends
        self._catalog: Catalog | None = None
        self._ends: list[tuple[float, int, Node]] = []
        self._order = itertools.count()
        self._at = 0.0
        self._started_at = 0.0
        self._stride_pages = 1
        self._idle_slots = 0

    def follow(self, catalog: Catalog, now: float, *, stride_pages: int, idle_slots: int) -> None:
        """Begin to count; `idle_slots` are taken for good and hold nothing."""
        self._catalog = catalog
        self._stride_pages, self._idle_slots = stride_pages, idle_slots
        self._started_at = self._at = now

    def restart(self) -> None:
        """Count from now on only."""
        self.host, self.ssd = Level(), Level()
        self._started_at = self._at

    def saw(self, node: Node) -> None:
        """A run came to be, or was split off another."""
        if not self._exact_ends:
            return
        assert self._catalog is not None
        end = self._catalog.retention.end(node)
        if math.isfinite(end):
            heapq.heappush(self._ends, (end, next(self._order), node))

    def move_to(self, now: float) -> None:
        """Let time pass: what ends before `now` leaves at its own moment."""
        assert self._catalog is not None
        while self._ends and self._ends[0][0] <= now:
            at, _, node = heapq.heappop(self._ends)
            if not node.count or node not in self._catalog.policy:
                continue
            if self._catalog.retention.end(node) > at:
                self.saw(node)
                continue
            self._integrate(at)
            self._catalog.drop(node, 0, MissReason.EXPIRED)
        self._integrate(now)

    def _host_slots(self, catalog: Catalog) -> int:
        return catalog.slabs.used_pages // self._stride_pages - self._idle_slots

    def _integrate(self, now: float) -> None:
        assert self._catalog is not None
        self.host.lasted(self._host_slots(self._catalog), now - self._at)
        self.ssd.lasted(self._catalog.segments.used_bytes, now - self._at)
        self._at = now

    def note_level(self) -> None:
        """Note the levels after a request."""
        assert self._catalog is not None
        self.host.reached(self._host_slots(self._catalog))
        self.ssd.reached(self._catalog.segments.used_bytes)

    @property
    def duration_seconds(self) -> float:
        """Virtual time since the count began."""
        return self._at - self._started_at


class Watched:
    """A policy that tells the residency count of every run that comes to be."""

    def __init__(self, inner: EvictionPolicy, residency: Residency) -> None:
        self._inner = inner
        self._residency = residency
        self.touch = inner.touch
        self.join = inner.join
        self.leaving = inner.leaving
        self.remove = inner.remove
        self.expect = inner.expect
        self.refuse = inner.refuse
        self.victims = inner.victims
        self.nodes = inner.nodes

    def add(self, node: Node) -> None:
        """Learn of a node."""
        if node not in self._inner:
            self._residency.saw(node)
        self._inner.add(node)

    def split(self, head: Node, tail: Node) -> None:
        """A node was cut."""
        self._inner.split(head, tail)
        self._residency.saw(tail)

    def __contains__(self, node: object) -> bool:
        return node in self._inner

    def __len__(self) -> int:
        return len(self._inner)
