"""expiry: what a match takes while a million blocks end, against the same when nothing ends.

In process: the ladder, the SSD tier with its index and its segment files, and the daemon's housekeeping on a
thread of its own. Segment files are sparse, only headers reach the disk: what is measured is not the writing.
"""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import xxhash

from kvstore.api import CommitRequest, MatchRequest, PartDigests, ReserveRequest
from kvstore.bench import rows
from kvstore.bench.harness import Bench, milliseconds
from kvstore.bench.rows import Row
from kvstore.clock import SystemClock
from kvstore.core.housekeeping import PAUSE_SECONDS
from kvstore.core.ladder import Ladder
from kvstore.errors import TierUnavailable
from kvstore.events import Events
from kvstore.hashing import chain_root
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.retention import HOUR
from kvstore.service.daemon import TICK_SECONDS
from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdTier
from kvstore.types import HASH_BYTES, BlockHash

RUNS, RUNS_QUICK = 10_000, 1_500
RUN_BLOCKS = 100
SEGMENT_BYTES = 40 << 20
SEGMENTS_LEAST = 100
PROMPT_BLOCKS = 600
CALM_SECONDS, CALM_SECONDS_QUICK = 12.0, 4.0
EXPIRY_SECONDS_MAX = 90.0
ARENA_BYTES = 64 << 20
PAYLOAD_BYTES = 64
QUEUE_BYTES = 256 << 20


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group."""
    runs = RUNS_QUICK if bench.is_quick else RUNS
    with bench.scratch() as directory, Store.opened(directory, bench.shared_memory) as store:
        for number in range(runs):
            store.put(number, RUN_BLOCKS, retention_class="batch")
            if not number % 100:
                bench.tell(f"storing {number * RUN_BLOCKS:,} blocks")
        segments = store.settle()
        if segments < SEGMENTS_LEAST and not bench.is_quick:
            raise TierUnavailable(f"expiry: {segments} segments, at least {SEGMENTS_LEAST} are meant to end")
        prompt = store.put(1 << 40, PROMPT_BLOCKS, retention_class="chat")
        gc.collect()
        gc.freeze()
        try:
            yield from _rows(bench, store, prompt, what=f"{runs:,} runs in {segments} segments")
        finally:
            gc.unfreeze()


def _rows(bench: Bench, store: Store, prompt: bytes, *, what: str) -> Iterator[Row]:
    with store.housekeeping():
        bench.tell("matching while nothing ends")
        end = time.perf_counter() + (CALM_SECONDS_QUICK if bench.is_quick else CALM_SECONDS)
        calm = _latencies(store, prompt, until=lambda: time.perf_counter() >= end)
        bench.tell("matching while everything ends")
        store.clock.ahead += 1.01 * HOUR
        late = time.perf_counter() + EXPIRY_SECONDS_MAX
        busy = _latencies(store, prompt, until=lambda: store.is_empty() or time.perf_counter() >= late)
        if not store.is_empty():
            raise TierUnavailable(f"expiry: not all had ended after {EXPIRY_SECONDS_MAX:.0f} s")
    calm = calm[: len(busy)]
    median, high = statistics.median(busy), float(np.quantile(busy, 0.999))
    usual_high = milliseconds(float(np.quantile(calm, 0.999)))
    told = f"{len(busy):,} matches of {PROMPT_BLOCKS} blocks in process, sparse segment files"
    told = f"{usual_high} when nothing ends; {what}, {told}"
    yield Row(rows.EXPIRY_P999, high / median, f"{milliseconds(high)} against {milliseconds(median)}; {told}")
    worst, usual = max(busy), max(calm)
    detail = f"{milliseconds(worst)} against {milliseconds(usual)} in {len(calm):,} matches before"
    yield Row(rows.EXPIRY_MAX, worst / usual, detail)


def _latencies(store: Store, prompt: bytes, *, until: Callable[[], bool]) -> Sequence[float]:
    taken: list[float] = []
    while not until():
        for _ in range(32):
            began = time.perf_counter()
            answer = store.ladder.match(MatchRequest(namespace=store.name, keys=prompt))
            taken.append(time.perf_counter() - began)
            store.ladder.release(answer.lease, used=answer.blocks)
    return taken


class AheadClock(SystemClock):
    """The system's clock, so many seconds ahead."""

    ahead = 0.0

    def monotonic(self) -> float:
        """Return seconds that only grow."""
        return super().monotonic() + self.ahead

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return super().wall() + self.ahead


class SparseFileSystem(OsFileSystem):
    """Writes the first buffer of each write, a frame's header, and leaves a hole in the place of the rest."""

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Return the length of all buffers."""
        end = offset + sum(buffer.nbytes for buffer in buffers)
        super().pwritev(handle, buffers[:1], offset)
        if os.fstat(handle).st_size < end:
            os.truncate(handle, end)
        return end - offset


class Store:
    """A ladder over host memory and SSD in this process."""

    def __init__(self, arena: HostArena, tier: SsdTier, clock: AheadClock) -> None:
        self.clock = clock
        self._tier = tier
        self.ladder = Ladder(
            host=arena, ssd=tier, clock=clock, events=Events(), new_number=itertools.count(1).__next__
        )
        self.ladder.recover()
        layout = Layout.single(dtype="bench", bytes_max=PAYLOAD_BYTES, layers=1)
        identity = Namespace(model="bench-expiry", weights="none", layout=layout, block_tokens=16)
        self.name = identity.fingerprint
        self.root = chain_root(self.name)
        self.ladder.open(identity, root=self.root)
        self._digest = xxhash.xxh3_128_digest(bytes(PAYLOAD_BYTES))

    @classmethod
    @contextmanager
    def opened(cls, directory: Path, shared_memory: Path) -> Iterator[Store]:
        """Lend a store on a directory."""
        with ExitStack() as stack:
            arena = HostArena.create(
                shared_memory, total_bytes=ARENA_BYTES, arena_id=secrets.randbits(63) + 1, boot_id=1
            )
            stack.callback(arena.close)
            clock = AheadClock()
            tier = SsdTier(
                directory,
                fs=SparseFileSystem(),
                clock=clock,
                events=Events(),
                capacity_bytes=1 << 40,
                min_free_bytes=0,
                queue_bytes_max=QUEUE_BYTES,
                segment_bytes_max=SEGMENT_BYTES,
            )
            store = cls(arena, tier, clock)
            stack.callback(store.ladder.close, deadline_seconds=10.0)
            yield store

    def put(self, number: int, blocks: int, *, retention_class: str) -> bytes:
        """Store a run of its own; its payload is what the arena holds, zeros. Returns its keys."""
        words = np.zeros((blocks, HASH_BYTES // 8), np.uint64)
        words[:, 0], words[:, 1] = number + 1, np.arange(1, blocks + 1)
        keys = words.tobytes()
        while self.ladder.gauges()["kvstore_write_queue_bytes"] > ARENA_BYTES // 4:
            time.sleep(0.005)
        answer = self.ladder.reserve(
            ReserveRequest(
                namespace=self.name,
                parent=BlockHash(self.root),
                keys=keys,
                retention_class=retention_class,
            )
        )
        if sum(extent.count for extent in answer.extents) < blocks:
            raise TierUnavailable(f"expiry: {blocks} blocks find no room: {answer.outcomes}")
        lengths = np.full(blocks, PAYLOAD_BYTES, np.uint32).tobytes()
        parts = tuple(
            PartDigests(e.part, e.first, lengths[: 4 * e.count], self._digest * e.count)
            for e in answer.extents
        )
        self.ladder.commit(CommitRequest(reservation=answer.reservation, blocks=blocks, parts=parts))
        return keys

    def settle(self) -> int:
        """Wait until all is on SSD; returns in how many segments."""
        while self.ladder.gauges()["kvstore_write_queue_bytes"]:
            time.sleep(0.01)
        return len(self.ladder.catalog.segments)

    def is_empty(self) -> bool:
        """Say whether all but the segment of the prompt is gone."""
        return len(self.ladder.catalog.segments) <= 1

    @contextmanager
    def housekeeping(self) -> Iterator[None]:
        """Do what the daemon does beside its requests, on a thread, while the body runs."""
        over = threading.Event()

        def work() -> None:
            while not over.wait(TICK_SECONDS):
                self.ladder.tick(pause=lambda: time.sleep(PAUSE_SECONDS))

        thread = threading.Thread(target=work, name="kvstore-tick")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
