"""A trace through the daemon's own core: the same index, order, retention, put path and segment reclaim.

Only clock, memory (pages that nobody touches), disk (places without bytes) and keys (ids instead of hashes)
differ. A request looks up its blocks, then writes those it missed; it touches all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvstore.api import NO_SESSION, CommitRequest, MatchRequest, PartDigests, ReserveRequest
from kvstore.clock import ManualClock
from kvstore.core.eviction import EvictionPolicy, ExactLru
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.core.slabs import SlabAllocator
from kvstore.events import Events
from kvstore.hashing import chain_root
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.retention import DEFAULT_CLASS, RetentionClass
from kvstore.tiers.base import TierUsage
from kvstore.trace.blocks import IDS_MAX, TraceRequest
from kvstore.trace.residency import Residency, Watched
from kvstore.trace.tally import Served, Tally
from kvstore.trace.virtual_ssd import VirtualSsd
from kvstore.types import DIGEST_BYTES, HASH_BYTES, BlockHash, Tier, TtlMode, key_at

__all__ = ["HALF_TICK_SECONDS", "Simulator", "Tally", "pages_for", "seconds_of"]

UNLIMITED_BLOCKS = 1 << 26
HALF_TICK_SECONDS = 0.0005
"""A TTL is inclusive in whole milliseconds: a block touched at t is there at t + TTL."""
SEGMENT_BYTES = 256 << 20
TICK_SECONDS = 1.0
TICKS_AT_ONCE = 16
"""Of the daemon's housekeeping between two requests, this much is done."""
GRAIN = 1 << 20
NO_PARTS = (1,)
"""Extents of a part that there is not: where blocks lie is of no interest here."""


def seconds_of(milliseconds: int) -> float:
    """Return seconds of a kind that adds up without rounding, so that two clocks that are told the same
    times agree to the last bit. Units: multiples of 2^-20 s.
    """
    return round(milliseconds * GRAIN / 1000) / GRAIN


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


class Simulator:
    """One store without payload. Not thread-safe: a simulation is one thread.

    Without `classes` there is one, with `ttl_seconds` and `ttl_mode`. `capacity_blocks` is host memory, 0 for
    no limit; with `ssd_bytes` there is an SSD tier below it, and blocks have `block_bytes`.
    `is_inclusive` TTLs hold to their last millisecond, as in the definitions of traces; the daemon's do not.
    `session` makes the store bound what one client may reserve, as the daemon does.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        ttl_seconds: float = math.inf,
        ttl_mode: TtlMode = TtlMode.SLIDING,
        capacity_blocks: int = 0,
        classes: Sequence[RetentionClass] = (),
        policy: EvictionPolicy | None = None,
        block_bytes: int = 1,
        ssd_bytes: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        is_inclusive: bool = True,
        session: int = NO_SESSION,
    ) -> None:
        lowest = Tier.SSD if ssd_bytes else Tier.HOST
        table = tuple(classes) or (RetentionClass(DEFAULT_CLASS, ttl_seconds, ttl_mode, lowest),)
        if is_inclusive:
            table = tuple(replace(c, ttl_seconds=c.ttl_seconds + HALF_TICK_SECONDS) for c in table)
        self._block_tokens = block_tokens
        self._session = session
        self._clock = ManualClock()
        self._first_ms: int | None = None
        self._began_at = self._ticked_at = self._clock.wall()
        self._residency = Residency(exact_ends=not ssd_bytes)
        layout = Layout.single(dtype="none", bytes_max=block_bytes if ssd_bytes else 1, layers=1)
        self._stride_bytes = layout.parts[0].stride_bytes
        stride_pages = layout.parts[0].stride_pages
        space = Namespace(model="trace", weights="none", layout=layout, block_tokens=block_tokens)
        self._name = space.fingerprint
        self._root = chain_root(self._name)
        pages = pages_for((capacity_blocks or UNLIMITED_BLOCKS) * stride_pages)
        self._ssd: VirtualSsd | None = None
        if ssd_bytes:
            self._ssd = VirtualSsd(
                capacity_bytes=ssd_bytes, segment_bytes=segment_bytes, now=self._clock.monotonic
            )
        self.ladder = Ladder(
            host=UntouchedMemory(pages),
            ssd=self._ssd,
            clock=self._clock,
            events=Events(),
            classes=table,
            limits=Limits(
                keys_max=IDS_MAX, ledger_entries=1 << 12, ssd_capacity_bytes=ssd_bytes, sleep_seconds=math.inf
            ),
            policy=Watched(ExactLru() if policy is None else policy, self._residency),
            new_number=itertools.count(1).__next__,
        )
        self.ladder.open(space, root=self._root)
        catalog = self.ladder.catalog
        # Memory is lent in slabs; what rounding up added is taken away again.
        idle = catalog.slabs.usable_pages // stride_pages - capacity_blocks if capacity_blocks else 0
        catalog.slabs.allocate(idle, stride_pages=stride_pages)
        self._residency.follow(catalog, self._began_at, stride_pages=stride_pages, idle_slots=idle)

    def run(
        self,
        requests: Sequence[TraceRequest],
        on_progress: Callable[[int], None] | None = None,
        *,
        warm_up: int = 0,
    ) -> Tally:
        """Run requests in order and return what was counted, the first `warm_up` requests left out."""
        tally = Tally(self._block_tokens)
        half = len(requests) // 2
        for index, request in enumerate(requests):
            if index == warm_up:
                self._move_to(request.timestamp_ms)
                self._residency.restart()
            served = self.serve(request)
            tally.stored_blocks += served.stored_blocks
            if index >= warm_up:
                name = request.retention_class or DEFAULT_CLASS
                tally.count(request, served, retention_class=name, in_half=index >= half)
            if on_progress is not None and not index % 256:
                on_progress(index)
        self._settle(tally)
        return tally

    def _settle(self, tally: Tally) -> None:
        host, ssd = self._residency.host, self._residency.ssd
        tally.resident_blocks_mean, tally.resident_blocks_peak = host.mean, host.peak
        tally.duration_seconds = self._residency.duration_seconds
        if self._ssd is not None:
            tally.ssd_bytes_mean, tally.ssd_bytes_peak = ssd.mean, ssd.peak
            tally.resident_blocks_mean = ssd.mean / self._stride_bytes
            tally.resident_blocks_peak = ssd.peak // self._stride_bytes
            tally.ssd_written_bytes = self._ssd.written_bytes

    def ssd_usage(self) -> TierUsage:
        """Return what the SSD tier holds; for a simulation that has one."""
        assert self._ssd is not None
        return self._ssd.usage()

    def request(self, request: TraceRequest) -> int:
        """Serve one request, and return how many leading blocks were there."""
        return self.serve(request).hit_blocks

    def serve(self, request: TraceRequest) -> Served:
        """Look one request up and write what it missed."""
        self._move_to(request.timestamp_ms)
        if not request.runs:
            return Served()
        keys, blocks = request.keys(), request.blocks
        found = self.ladder.match(
            MatchRequest(
                namespace=self._name,
                keys=keys,
                retention_class=request.retention_class,
                parts=NO_PARTS,
                load=self._ssd is not None,
                session=self._session,
            )
        )
        hit = found.blocks
        if found.lease:
            if not found.ready:
                # The disk has answered already; what found no room in host memory is a miss.
                hit = self.ladder.watch(found.lease).blocks
            self.ladder.release(found.lease, used=hit)
        stored = self._put(keys, hit, request.retention_class) if hit < blocks else 0
        self._residency.note_level()
        return Served(hit, found.tiers, stored)

    def _put(self, keys: bytes, present: int, retention_class: str) -> int:
        parent = key_at(keys, present - 1) if present else self._root
        answer = self.ladder.reserve(
            ReserveRequest(
                namespace=self._name,
                parent=BlockHash(parent),
                keys=keys[present * HASH_BYTES :],
                retention_class=retention_class,
                session=self._session,
            )
        )
        if not answer.reservation:
            return 0
        filled = tuple(
            PartDigests(e.part, e.first, e.lengths.tobytes(), bytes(DIGEST_BYTES * e.count))
            for e in answer.extents
        )
        count = len(keys) // HASH_BYTES - present
        self.ladder.commit(CommitRequest(reservation=answer.reservation, blocks=count, parts=filled))
        return sum(extent.count for extent in answer.extents)

    def _move_to(self, timestamp_ms: int) -> None:
        if self._first_ms is None:
            self._first_ms = timestamp_ms
        elapsed = seconds_of(timestamp_ms - self._first_ms)
        self._clock.advance(max(0.0, self._began_at + elapsed - self._clock.wall()))
        now = self._clock.wall()
        self._residency.move_to(now)
        if self._ssd is not None and now - self._ticked_at >= TICK_SECONDS:
            for _ in range(min(TICKS_AT_ONCE, int((now - self._ticked_at) / TICK_SECONDS))):
                self.ladder.tick()
            self._ticked_at = now


def pages_for(wanted: int) -> int:
    """Return how many pages an arena needs for so many to be of use: slabs are of one size."""
    pages = wanted
    while (usable := SlabAllocator(first_page=1, total_pages=pages + 1).usable_pages) < wanted:
        pages += wanted - usable
    return pages
