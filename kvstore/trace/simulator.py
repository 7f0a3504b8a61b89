"""A trace through the daemon's own core: the same index, order, retention and put path, on a virtual clock.

Only the memory (pages that nobody touches), the clock and the keys (ids instead of hashes) differ. A request
looks up its blocks, then writes those it missed; it touches all of them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.api import CommitRequest, MatchRequest, PartDigests, ReserveRequest
from kvstore.clock import ManualClock
from kvstore.core.catalog import Catalog
from kvstore.core.eviction import ExactLru
from kvstore.core.frames import Node
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.events import Events
from kvstore.hashing import chain_root
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.retention import DEFAULT_CLASS, RetentionClass
from kvstore.trace.requests import IDS_MAX, TraceRequest
from kvstore.types import DIGEST_BYTES, HASH_BYTES, BlockHash, MissReason, Tier, TtlMode, key_at

UNLIMITED_PAGES = 1 << 26
HALF_TICK_SECONDS = 0.0005
"""A TTL is inclusive in whole milliseconds: a block touched at t is there at t + TTL."""


class UntouchedMemory:
    """An arena of page numbers alone. Shapes: generations u32[total_pages], zeros that stay unbacked."""

    def __init__(self, pages: int) -> None:
        self.first_page = 1
        self.total_pages = pages + 1
        self.generations: npt.NDArray[np.uint32] = np.zeros(self.total_pages, np.uint32)

    def images(self, slots: npt.NDArray[np.uint32], *, stride_pages: int) -> tuple[memoryview, ...]:
        """Return nothing: no payload is ever moved."""
        return ()

    def touched_pages(self) -> int:
        """Return all pages."""
        return self.total_pages - self.first_page


@dataclass(slots=True)
class Tally:
    """What a simulation counts. Units: tokens and blocks as named; resident blocks over virtual time."""

    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    requests_with_hit: int = 0
    half_input_tokens: int = 0
    half_hit_tokens: int = 0
    resident_blocks_mean: float = 0.0
    resident_blocks_peak: int = 0
    duration_seconds: float = 0.0

    def rates(self) -> dict[str, float]:
        """Return the hit rates; of what is in each name."""
        return {
            "token_hit_rate": self.hit_tokens / max(1, self.input_tokens),
            "token_hit_rate_half": self.half_hit_tokens / max(1, self.half_input_tokens),
            "block_hit_rate": self.hit_blocks / max(1, self.blocks),
            "request_hit_rate": self.requests_with_hit / max(1, self.requests),
        }


class Simulator:
    """One store without payload. Not thread-safe: a simulation is one thread."""

    def __init__(
        self,
        *,
        block_tokens: int,
        ttl_seconds: float = math.inf,
        ttl_mode: TtlMode = TtlMode.SLIDING,
        capacity_blocks: int = 0,
    ) -> None:
        self._block_tokens = block_tokens
        self._clock = ManualClock()
        self._first_ms: int | None = None
        self._began_at = self._clock.wall()
        self._residency = Residency()
        held_by = RetentionClass(DEFAULT_CLASS, ttl_seconds + HALF_TICK_SECONDS, ttl_mode, Tier.HOST)
        layout = Layout.single(dtype="none", bytes_max=1, layers=1)
        self._space = Namespace(model="trace", weights="none", layout=layout, block_tokens=block_tokens)
        self._name = self._space.fingerprint
        self._root = chain_root(self._name)
        self._ladder = Ladder(
            host=UntouchedMemory(capacity_blocks or UNLIMITED_PAGES),
            ssd=None,
            clock=self._clock,
            events=Events(),
            classes=(held_by,),
            limits=Limits(keys_max=IDS_MAX, ledger_entries=1 << 12),
            policy=WatchedLru(self._residency),
            new_number=itertools.count(1).__next__,
        )
        self._ladder.open(self._space, root=self._root)
        self._residency.follow(self._ladder.catalog, self._began_at)

    def run(
        self, requests: Sequence[TraceRequest], on_progress: Callable[[int], None] | None = None
    ) -> Tally:
        """Run requests in order and return what was counted."""
        tally = Tally()
        half = len(requests) // 2
        for index, request in enumerate(requests):
            hit_blocks = self.request(request)
            hit = min(hit_blocks * self._block_tokens, request.input_tokens)
            tally.requests += 1
            tally.input_tokens += request.input_tokens
            tally.hit_tokens += hit
            tally.blocks += request.blocks
            tally.hit_blocks += hit_blocks
            tally.requests_with_hit += hit_blocks > 0
            if index >= half:
                tally.half_input_tokens += request.input_tokens
                tally.half_hit_tokens += hit
            if on_progress is not None and not index % 256:
                on_progress(index)
        tally.resident_blocks_mean = self._residency.mean_blocks
        tally.resident_blocks_peak = self._residency.peak_blocks
        tally.duration_seconds = self._residency.duration_seconds
        return tally

    def request(self, request: TraceRequest) -> int:
        """Look one request up, write what it missed, and return how many leading blocks were there."""
        self._move_to(request.timestamp_ms)
        if not request.runs:
            return 0
        keys = request.keys()
        found = self._ladder.match(MatchRequest(namespace=self._name, keys=keys))
        if found.lease:
            self._ladder.release(found.lease, used=found.blocks)
        if found.blocks < request.blocks:
            self._put(keys, found.blocks)
        self._residency.note_level()
        return found.blocks

    def _put(self, keys: bytes, present: int) -> None:
        parent = key_at(keys, present - 1) if present else self._root
        answer = self._ladder.reserve(
            ReserveRequest(namespace=self._name, parent=BlockHash(parent), keys=keys[present * HASH_BYTES :])
        )
        if answer.reservation:
            filled = tuple(
                PartDigests(e.part, e.first, e.lengths.tobytes(), bytes(DIGEST_BYTES * e.count))
                for e in answer.extents
            )
            count = len(keys) // HASH_BYTES - present
            self._ladder.commit(CommitRequest(reservation=answer.reservation, blocks=count, parts=filled))

    def _move_to(self, timestamp_ms: int) -> None:
        if self._first_ms is None:
            self._first_ms = timestamp_ms
        elapsed = (timestamp_ms - self._first_ms) / 1000.0
        self._clock.advance(max(0.0, self._began_at + elapsed - self._clock.wall()))
        self._residency.move_to(self._clock.wall())


class Residency:
    """How many blocks live when: the store's own page count, integrated over virtual time.

    Runs are dropped at the very moment they expire, which the daemon does within a tick.
    """

    def __init__(self) -> None:
        self._catalog: Catalog | None = None
        self._ends: list[tuple[float, int, Node]] = []
        self._order = itertools.count()
        self._area = 0.0
        self._peak = 0
        self._at = 0.0
        self._started_at = 0.0

    def follow(self, catalog: Catalog, now: float) -> None:
        """Begin to count."""
        self._catalog = catalog
        self._started_at = self._at = now

    def saw(self, node: Node) -> None:
        """A run came to be, or was split off another."""
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

    def _integrate(self, now: float) -> None:
        assert self._catalog is not None
        self._area += self._catalog.slabs.used_pages * (now - self._at)
        self._at = now

    def note_level(self) -> None:
        """Note the level after a request."""
        assert self._catalog is not None
        self._peak = max(self._peak, self._catalog.slabs.used_pages)

    @property
    def duration_seconds(self) -> float:
        """Virtual time since the first request."""
        return self._at - self._started_at

    @property
    def mean_blocks(self) -> float:
        """The mean number of resident blocks."""
        return self._area / self.duration_seconds if self.duration_seconds else 0.0

    @property
    def peak_blocks(self) -> int:
        """The most blocks resident after any request."""
        return self._peak


class WatchedLru(ExactLru):
    """Exact LRU that tells the residency count of every run that comes to be."""

    def __init__(self, residency: Residency) -> None:
        super().__init__()
        self._residency = residency

    def add(self, node: Node) -> None:
        """Put a new node at the recent end."""
        if node not in self:
            self._residency.saw(node)
        super().add(node)

    def split(self, head: Node, tail: Node) -> None:
        """Give the tail the place next to its head."""
        super().split(head, tail)
        self._residency.saw(tail)
