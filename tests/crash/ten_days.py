"""Days of agent traffic over the real ladder and SSD tier, on a virtual clock and a disk that loses power.

Sessions are shaped like those of cc_dev: prompts that grow turn by turn, now and then cut and continued
otherwise, with the trace's distribution of gaps; every session starts with one of a few shared heads. Blocks
are small. Beside the store runs an oracle of who was touched when.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import hashing
from kvstore.api import MatchRequest, Progress
from kvstore.clock import ManualClock
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.errors import TierUnavailable
from kvstore.events import Events
from kvstore.retention import DAY, HOUR, RetentionClass
from kvstore.tiers.ssd import SsdTier
from kvstore.types import HASH_BYTES, MatchMode, split_keys
from tests.crash.test_ssd_crash import WAIT_SECONDS, abandon
from tests.support.asleep import all_nodes
from tests.support.crash_fs import Crashed, CrashFileSystem
from tests.support.driver import check_extents, namespace, put
from tests.support.integrity import check_integrity
from tests.support.memory import PrivateMemory
from tests.support.ssd import open_ssd

TTL_SECONDS = 3 * DAY
SEGMENT_BYTES = 512 << 10
GAPS = ((0.0, 2.0), (0.824, 60.0), (0.926, 180.0), (0.949, 300.0), (0.969, 600.0), (0.988, 1800.0),
        (0.995, HOUR), (0.9984, 4 * HOUR), (0.99965, 12 * HOUR), (1.0, 2 * DAY))  # fmt: skip
"""Share of the requests whose prefix was touched at most so long ago."""


def gap(rng: random.Random) -> float:
    """Draw the time between two requests of a session; log-uniform between the trace's quantiles."""
    share = rng.random()
    at = max(1, bisect.bisect_left([s for s, _ in GAPS], share))
    (low_share, low), (high_share, high) = GAPS[at - 1], GAPS[at]
    return float(low * (high / low) ** ((share - low_share) / (high_share - low_share)))


@dataclass(slots=True)
class Session:
    """A conversation: one number a block; equal beginnings are equal blocks."""

    path: list[int]
    turns: int

    def go_on(self, rng: random.Random) -> None:
        """The next turn: what was said and answered, behind the prompt or a part of it."""
        self.turns -= 1
        if rng.random() < 0.2:
            del self.path[max(4, len(self.path) - rng.randint(1, 6)) :]
        self.path += [rng.getrandbits(30) for _ in range(rng.randint(1, 4))]


@dataclass(slots=True)
class Figures:
    """What the days came to. Units: bytes."""

    requests: int = 0
    blocks_asked: int = 0
    blocks_served: int = 0
    crashes: int = 0
    checked: int = 0
    kept_checked: int = 0
    kept_missing: int = 0
    put_bytes: int = 0
    copied: dict[str, int] = field(default_factory=lambda: {"time": 0, "capacity": 0})
    evicted_bytes: int = 0
    expired_bytes: int = 0
    disk_peak: int = 0

    def amplification(self, reason: str) -> float:
        """Bytes written, copies for this reason included, for each byte that was put."""
        return 1.0 + self.copied[reason] / max(1, self.put_bytes)

    def text(self) -> str:
        """Return the figures in a line."""
        return (
            f"{self.requests} requests, {self.blocks_served} of {self.blocks_asked} blocks served, "
            f"{self.crashes} crashes; {self.put_bytes >> 20} MiB put, peak {self.disk_peak >> 20} MiB, "
            f"{self.expired_bytes >> 20} MiB expired, {self.evicted_bytes >> 20} MiB evicted; write "
            f"amplification by time {self.amplification('time'):.3f}, "
            f"by capacity {self.amplification('capacity'):.3f}; books compared {self.checked} times, "
            f"{self.kept_checked} durable blocks looked for after crashes, {self.kept_missing} not found"
        )


class TenDays:
    """One run. `capacity_bytes` 0 means that the disk holds everything."""

    def __init__(
        self, directory: Path, *, seed: int, sessions: int, turns: int, crashes: int, days: float = 10.0,
        capacity_bytes: int = 0, tick_seconds: float = HOUR,
    ) -> None:  # fmt: skip
        self.rng = random.Random(seed)
        self.figures = Figures()
        self._directory, self._seed, self._capacity = directory, seed, capacity_bytes
        self._clock, self._tick_seconds = ManualClock(), tick_seconds
        self._fs = CrashFileSystem(seed=seed)
        self._space = namespace(bytes_max=200)
        self._root = hashing.chain_root(self._space.fingerprint)
        self._touched: dict[bytes, float] = {}
        self._known: dict[bytes, float] = {}
        self._durable: dict[bytes, float] = {}
        self._chains: dict[bytes, None] = {}
        self._boots = 0
        start, seconds = self._clock.wall(), days * DAY
        heads = [[-1 - i] * 6 for i in range(3)]
        self._due: list[tuple[float, int, Session]] = []
        for number in range(sessions):
            first = Session([*self.rng.choice(heads), *self._fresh(8)], self.rng.randint(1, 2 * turns))
            heapq.heappush(self._due, (start + seconds * self.rng.random() * 0.9, number, first))
        self._end = start + seconds
        self._crashes = sorted(start + seconds * self.rng.random() for _ in range(crashes))
        self._open()

    def _fresh(self, blocks: int) -> list[int]:
        return [self.rng.getrandbits(30) for _ in range(blocks)]

    def _open(self) -> None:
        self._boots += 1
        self._events = Events()
        self._tier: SsdTier = open_ssd(
            self._directory,
            fs=self._fs,
            clock=self._clock,
            events=self._events,
            capacity_bytes=self._capacity + 4 * SEGMENT_BYTES if self._capacity else 4 << 30,
            segment_bytes_max=SEGMENT_BYTES,
            index_bytes_max=256 << 20,
            seed=self._seed * 1000 + self._boots,
        )
        self._ladder = Ladder(
            host=PrivateMemory(1024),
            ssd=self._tier,
            clock=self._clock,
            events=self._events,
            classes=(RetentionClass("agent", TTL_SECONDS),),
            limits=Limits(ssd_capacity_bytes=self._capacity),
            new_number=itertools.count(1).__next__,
        )
        self._ladder.recover()
        self._ladder.open(self._space, root=self._root)

    def run(self) -> Figures:
        """Let the days pass."""
        while self._due and self._due[0][0] < self._end:
            at, number, session = heapq.heappop(self._due)
            self._pass(at)
            self._request(session)
            if session.turns > 0:
                session.go_on(self.rng)
                heapq.heappush(self._due, (at + gap(self.rng), number, session))
        self._pass(self._end)
        self._ladder.close(deadline_seconds=WAIT_SECONDS)
        self._collect()
        return self.figures

    def _pass(self, until: float) -> None:
        """Let time pass, with its housekeeping and its crashes."""
        while self._clock.wall() < until:
            crash = self._crashes[0] if self._crashes else self._end
            self._clock.advance(
                max(0.0, min(until, crash, self._clock.wall() + self._tick_seconds) - self._clock.wall())
            )
            if self._crashes and self._clock.wall() >= crash:
                self._crashes.pop(0)
                self._crash_soon()
            self._tick()
        if self._fs.is_down:
            self._restart()

    def _tick(self) -> None:
        try:
            self._ladder.tick()
            self._settle()
            if not self._fs.is_down and self.rng.random() < 0.25:
                self._compare_books()
        except Crashed:
            pass
        if self._fs.is_down:
            self._restart()

    def _crash_soon(self) -> None:
        """Pull the plug some calls from now, whatever they are."""
        self._fs.crash_at(self._fs.calls + self.rng.randint(1, 60))

    def _settle(self) -> None:
        """Wait until the disk has done what it was asked to, and the index knows."""
        until, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
        ladder = self._ladder
        while not self._fs.is_down:
            with ladder._lock:
                busy = ladder._loads.in_flight or ladder._loads.queued or ladder._moves.slots
                if ladder._writeback.idle and not busy:
                    break
            assert time.monotonic() < until, "the disk does not answer"
            pause.wait(0.001)
        try:
            if not self._fs.is_down:
                # What leaves asleep is deleted once its header has been read.
                self._tier.headers([]).result(WAIT_SECONDS)
                self._tier.sync_index().result(WAIT_SECONDS)
        except TierUnavailable:
            if not self._fs.is_down:
                raise  # else the power went while the index was committed
        if not self._fs.is_down:
            self._durable = {key: self._known[key] for key in self._on_ssd() & self._known.keys()}

    def _on_ssd(self) -> set[bytes]:
        state = self._ladder.catalog.namespaces[self._space.fingerprint]
        return {
            key
            for node in all_nodes(self._ladder, state)
            for piece in node.slices
            if piece.frame.location is not None
            for key in split_keys(piece.keys)
        }

    # Requests

    def _request(self, session: Session) -> None:
        keys = hashing.block_hashes(
            self._root, [t for block in session.path for t in (block & 0xFFFFFFFF, 0, 0, 0)], block_tokens=4
        )
        try:
            self._match(keys)
            put(self._ladder, self._space, self._root, keys)
        except Crashed:
            return
        now = self._clock.wall()
        self._touched.update(dict.fromkeys(split_keys(keys), now))
        self._known.update(dict.fromkeys(split_keys(keys), now))
        self._chains[keys] = None

    def _match(self, keys: bytes) -> None:
        loaded, now = threading.Event(), self._clock.wall()

        def on_progress(progress: Progress) -> None:
            if progress.done:
                loaded.set()

        answer = self._ladder.match(MatchRequest(namespace=self._space.fingerprint, keys=keys), on_progress)
        names = split_keys(keys)
        for key in names[: answer.blocks]:
            assert now < self._touched[key] + TTL_SECONDS, "an expired block was served"
        self.figures.requests += 1
        self.figures.blocks_asked += len(names)
        self.figures.blocks_served += answer.blocks
        if answer.lease:
            if not answer.ready:
                while not loaded.wait(0.01) and not self._fs.is_down:
                    pass
            progress = self._ladder.watch(answer.lease)
            if not self._fs.is_down:
                assert progress.blocks == answer.blocks, progress.reason
                assert check_extents(self._ladder, self._space, keys, progress.extents) == answer.blocks
            self._ladder.release(answer.lease, used=answer.blocks)

    # Crashes and books

    def _restart(self) -> None:
        self.figures.crashes += 1
        self._collect()
        abandon(self._tier)
        self._fs = self._fs.reboot()
        self._known = dict(self._durable)  # later touches may be lost
        self._open()
        self._compare_books()
        if not self._capacity:
            self._look_for_what_was_durable()

    def _look_for_what_was_durable(self) -> None:
        """What was on SSD when the index was last committed is there, as long as it lives."""
        now = self._clock.wall()
        for keys in self._chains:
            names = split_keys(keys)
            lives = [key in self._durable and now < self._durable[key] + TTL_SECONDS for key in names]
            wanted = lives.index(False) if False in lives else len(lives)
            request = MatchRequest(namespace=self._space.fingerprint, keys=keys, mode=MatchMode.PROBE)
            found = self._ladder.match(request).blocks
            self.figures.kept_checked += wanted
            self.figures.kept_missing += max(0, wanted - found)
            assert all(now < self._touched[key] + TTL_SECONDS for key in names[:found]), "kept too long"
        self._chains = {
            keys: None for keys in self._chains if now < self._touched[keys[:HASH_BYTES]] + 2 * TTL_SECONDS
        }

    def _compare_books(self) -> None:
        """What the tier counts is what the file system says, and no file is there that nobody knows."""
        check_integrity(self._ladder)
        segments = self._tier._directory.segments
        allocated = sum(self._fs.stat(segments / name).allocated_bytes for name in self._fs.listdir(segments))
        used = self._tier.usage().used_bytes
        assert used == allocated, f"{used} bytes counted, {allocated} on the disk"
        known = {segment.number for segment in self._ladder.catalog.segments}
        living = {info.segment for info in self._tier.segments() if info.frames}
        assert living == known, f"segments {sorted(living ^ known)} are known to one side only"
        self.figures.checked += 1
        self.figures.disk_peak = max(self.figures.disk_peak, allocated)

    def _collect(self) -> None:
        events, figures = self._events, self.figures
        copied = 0
        for reason in figures.copied:
            amount = int(events.total("kvstore_ssd_copied_bytes_total", reason=reason))
            figures.copied[reason] += amount
            copied += amount
        figures.put_bytes += int(events.total("kvstore_ssd_written_bytes_total")) - copied
        figures.evicted_bytes += int(events.total("kvstore_evicted_bytes_total", tier="ssd"))
        figures.expired_bytes += int(events.total("kvstore_expired_bytes_total"))
