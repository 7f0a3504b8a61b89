"""expiry: what a match takes while a million blocks end, against the same when nothing ends.

In process: the ladder, the SSD tier with its index and its segment files, and the daemon's housekeeping on a
thread of its own. Segment files are sparse, only headers reach the disk: what is measured is not the writing.

Runs are stored in groups that end one after the other, a group a round. A round matches while its group ends,
and then as often while nothing does. On a virtual machine single matches take milliseconds in either half,
whatever the store does, so the longest of each half is taken round by round and the medians of those are
compared; the longest of all are told beside them.
"""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from kvstore.core.limits import Limits
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
REST_SECONDS = 1.0
"""Between a round's two halves: what unlinking left to the file system is not to slow the second."""
WARM_MATCHES = 1024
"""After the rest: the first match from cold caches would be the longest of its half."""
ROUND_SECONDS_MAX = 60.0
ARENA_BYTES = 64 << 20
PAYLOAD_BYTES = 64
QUEUE_BYTES = 256 << 20


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group."""
    runs = RUNS_QUICK if bench.is_quick else RUNS
    with (
        bench.scratch() as directory,
        Store.opened(directory, bench.shared_memory, groups=bench.rounds) as store,
    ):
        groups, stored = [], 0
        for number in range(bench.rounds):
            bench.tell(f"storing {runs * RUN_BLOCKS:,} blocks, group {number + 1} of {bench.rounds}")
            end = -(-runs * (number + 1) // bench.rounds)
            groups.append(store.put_group(range(stored, end)))
            stored = end
        segments = sum(group.segments for group in groups)
        if segments < SEGMENTS_LEAST and not bench.is_quick:
            raise TierUnavailable(f"expiry: {segments} segments, at least {SEGMENTS_LEAST} are meant to end")
        prompt = store.put(1 << 40, PROMPT_BLOCKS, retention_class="chat")
        store.settle()
        gc.collect()
        gc.freeze()
        try:
            yield from _rows(bench, store, groups, prompt, what=f"{stored:,} runs in {segments} segments")
        finally:
            gc.unfreeze()


def _rows(bench: Bench, store: Store, groups: Sequence[Group], prompt: bytes, *, what: str) -> Iterator[Row]:
    """Let group after group end, and match as often while nothing does."""
    busy, calm = list[Latencies](), list[Latencies]()
    with store.housekeeping():
        for number, group in enumerate(groups):
            bench.tell(f"matching, round {number + 1} of {len(groups)}")
            busy.append(_while_ending(store, group, prompt))
            time.sleep(REST_SECONDS)
            _latencies(store, prompt, until=lambda taken: len(taken) >= WARM_MATCHES)
            calm.append(_latencies(store, prompt, until=lambda taken: len(taken) >= len(busy[-1].matches)))
    matches = [seconds for taken in busy for seconds in taken.matches]
    median, high = statistics.median(matches), _high(matches)
    usual_high = milliseconds(_high([seconds for taken in calm for seconds in taken.matches]))
    pairs = [seconds for taken in busy for seconds in taken.with_release]
    told = f"{len(matches):,} matches of {PROMPT_BLOCKS} blocks in process, sparse segment files"
    told = f"{usual_high} when nothing ends, {milliseconds(_high(pairs))} with the release; {what}, {told}"
    yield Row(rows.EXPIRY_P999, high / median, f"{milliseconds(high)} against {milliseconds(median)}; {told}")
    longest, usual = ([max(taken.matches) for taken in half] for half in (busy, calm))
    worst = statistics.median(longest)
    told = f"of {len(busy)} rounds; {milliseconds(max(longest))} against {milliseconds(max(usual))} in all"
    detail = f"{milliseconds(worst)} against {milliseconds(statistics.median(usual))}, medians {told}"
    yield Row(rows.EXPIRY_MAX, worst / statistics.median(usual), detail)


def _high(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.999))


def _while_ending(store: Store, group: Group, prompt: bytes) -> Latencies:
    """Match from when the first frame of a group goes until its last row has left the index on disk."""
    late = time.perf_counter() + ROUND_SECONDS_MAX
    before = store.ending_bytes
    store.let_end(group)

    def is_left(size: int) -> bool:
        if time.perf_counter() >= late:
            raise TierUnavailable(f"expiry: not all had ended after {ROUND_SECONDS_MAX:.0f} s")
        return store.ending_bytes > before - size

    _latencies(store, prompt, until=lambda _: not is_left(1))
    taken = _latencies(store, prompt, until=lambda _: not is_left(group.bytes))
    # The index would be told within a second: a second in which nothing ends.
    store.commit()
    rest = _latencies(store, prompt, until=lambda _: store.is_idle())
    return Latencies(taken.matches + rest.matches, taken.with_release + rest.with_release)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of matches, and of each with the release behind it, which does the housekeeping that is due."""

    matches: list[float]
    with_release: list[float]


def _latencies(store: Store, prompt: bytes, *, until: Callable[[Sequence[float]], bool]) -> Latencies:
    matches, with_release = list[float](), list[float]()
    while not until(matches):
        for _ in range(32):
            began = time.perf_counter()
            answer = store.ladder.match(MatchRequest(namespace=store.name, keys=prompt))
            matches.append(time.perf_counter() - began)
            store.ladder.release(answer.lease, used=answer.blocks)
            with_release.append(time.perf_counter() - began)
    return Latencies(matches, with_release)


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


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that end together, the last of them stored at a wall time, and what they take on SSD."""

    stored_at: float
    segments: int
    bytes: int


class Store:
    """A ladder over host memory and SSD in this process, for so many groups of runs."""

    def __init__(self, arena: HostArena, tier: SsdTier, clock: AheadClock, *, groups: int) -> None:
        self._clock, self._tier = clock, tier
        self._apart_seconds = HOUR / (2 * groups)
        self.ladder = Ladder(
            host=arena,
            ssd=tier,
            clock=clock,
            events=Events(),
            # Two buckets from group to group: no segment has runs of two.
            limits=Limits(bucket_fraction=self._apart_seconds / (2 * HOUR)),
            new_number=itertools.count(1).__next__,
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
    def opened(cls, directory: Path, shared_memory: Path, *, groups: int) -> Iterator[Store]:
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
            store = cls(arena, tier, clock, groups=groups)
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

    def put_group(self, numbers: Iterable[int]) -> Group:
        """Store runs that end together, later than those before."""
        self._clock.ahead += self._apart_seconds
        segments, size = len(self.ladder.catalog.segments), self.ending_bytes
        for number in numbers:
            self.put(number, RUN_BLOCKS, retention_class="batch")
        self.settle()
        segments = len(self.ladder.catalog.segments) - segments
        return Group(self._clock.wall(), segments, self.ending_bytes - size)

    def settle(self) -> None:
        """Wait until all is on SSD."""
        while self.ladder.gauges()["kvstore_write_queue_bytes"]:
            time.sleep(0.01)

    def let_end(self, group: Group) -> None:
        """Go to where the class's hour is over for a group, but not for the next."""
        self._clock.ahead += group.stored_at + HOUR + self._apart_seconds / 2 - self._clock.wall()

    @property
    def ending_bytes(self) -> int:
        """What is left on SSD of the runs that end."""
        return self.ladder.catalog.segments.class_bytes["batch"]

    def commit(self) -> None:
        """Have the index on disk told now of what went."""
        self._tier.sync_index()

    def is_idle(self) -> bool:
        """Say whether all that was let go has left the disk and its index."""
        return not len(self.ladder.catalog.graves)

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
