"""The whole ladder with the plug pulled at the calls of its tier: what was acknowledged is found, ancestors
and all, what was deleted stays away, and the books are right before the first admission.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

import pytest

from kvstore import hashing
from kvstore.api import MatchRequest
from kvstore.core.ladder import Ladder
from kvstore.errors import TierUnavailable
from kvstore.tiers.ssd import SsdTier
from kvstore.types import HASH_BYTES, AckTier, BlockHash, MatchMode, PutOutcome, split_keys
from tests.crash.test_ladder_ssd import Answers, check_hit, opened
from tests.crash.test_ssd_crash import WAIT_SECONDS, abandon, prepare_index
from tests.support.crash_fs import Crashed, CrashFileSystem
from tests.support.driver import namespace, put

FATES = ("kept", "lost", "cut", "older")
POINTS = int(os.environ.get("KVSTORE_CRASH_POINTS", "1000"))
FIRST_SEED = int(os.environ.get("KVSTORE_CRASH_SEED", "1"))
STEPS = 10


@dataclass(slots=True)
class Chains:
    """Conversations of one namespace: chains that branch off one another, in a tree that a seed decides."""

    seed: int
    promised: dict[bytes, None] = field(default_factory=dict)
    together: list[set[bytes]] = field(default_factory=list)
    doomed: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)

    def run(self, directory: Path, fs: CrashFileSystem, *, snapshot: bool) -> SsdTier | None:
        """Put, delete and restart over a tier that may crash; returns the tier that was open at the end. On
        request the index of the middle is put aside.
        """
        rng = random.Random(self.seed)
        space = namespace(parts=2)
        root = hashing.chain_root(space.fingerprint)
        tier: SsdTier | None = None
        try:
            ladder, tier = opened(directory, fs, boot=0)
            ladder.open(space, root=root)
            tokens: list[list[int]] = [[]]
            for step in range(STEPS):
                what = rng.choices(("put", "delete", "restart"), (7, 1, 1))[0]
                if what == "put":
                    stem = rng.choice(tokens)
                    stem = stem[: 4 * rng.randint(0, len(stem) // 4)]
                    tokens.append(stem + [rng.randrange(3) for _ in range(4 * rng.randint(1, 7))])
                    self._put(ladder, hashing.block_hashes(root, tokens[-1], block_tokens=4))
                elif what == "delete" and self.promised:
                    self._delete(
                        ladder, rng.choice(sorted(self.promised)), is_written_below=rng.random() < 0.5
                    )
                elif what == "restart":
                    ladder.close(deadline_seconds=WAIT_SECONDS)
                    ladder, tier = opened(directory, fs, boot=step + 1)
                    ladder.open(space, root=root)
                if snapshot and step == STEPS // 2:
                    tier.sync_index().result(WAIT_SECONDS)
                    shutil.copytree(directory / "index", directory.with_name("index-copy"))
                if fs.is_down:
                    return tier
            ladder.close(deadline_seconds=WAIT_SECONDS)
        except (Crashed, TierUnavailable):
            assert fs.is_down
        return tier

    def _put(self, ladder: Ladder, keys: bytes) -> None:
        space = namespace(parts=2)
        root = hashing.chain_root(space.fingerprint)
        answers = Answers()
        answer = put(ladder, space, root, keys, ack=AckTier.SSD, acks=answers) or answers.wait()
        known = set().union(*self.together)
        self.together.append(set(split_keys(keys)) - known)
        # A block that is put again is no longer deleted, whether or not it is durable.
        self.doomed -= set(split_keys(keys))
        self.gone -= set(split_keys(keys))
        if answer.outcomes[-1].outcome is PutOutcome.STORED_SSD:
            self.promised[keys] = None

    def _delete(self, ladder: Ladder, keys: bytes, *, is_written_below: bool) -> None:
        """Delete the last block of a chain and all that follows it; perhaps while some of that is written.

        What shares a frame with it moves, so it is not promised any more.
        """
        last = BlockHash(keys[-HASH_BYTES:])
        space = namespace(parts=2)
        tail = hashing.block_hashes(last, [9] * 12, block_tokens=4)
        if is_written_below:
            put(ladder, space, last, tail, ack=AckTier.HOST)
        below = {chain for chain in self.promised if last in split_keys(chain)}
        lost = {key for chain in below for key in split_keys(chain)[split_keys(chain).index(last) :]}
        lost |= set(split_keys(tail))
        self.doomed |= lost
        moved = set().union(*(frame for frame in self.together if frame & lost))
        for chain in [chain for chain in self.promised if moved & set(split_keys(chain))]:
            del self.promised[chain]
        self.together = [frame - lost for frame in self.together]
        heard: Queue[bool] = Queue()
        ladder.delete(space.fingerprint, last, lambda _, durable: heard.put(durable))
        if heard.get(timeout=WAIT_SECONDS):
            self.gone |= lost

    def check(self, directory: Path, fs: CrashFileSystem) -> None:
        """Restart and compare with what was promised, before and after a put."""
        ladder, tier = opened(directory, fs, boot=99)
        space = namespace(parts=2)
        root = hashing.chain_root(space.fingerprint)
        segments = tier._directory.segments
        allocated = sum(fs.stat(segments / name).allocated_bytes for name in fs.listdir(segments))
        assert tier.usage().used_bytes == allocated, "the accounting differs from the disk"
        ladder.open(space, root=root)
        for keys in self.promised:
            check_hit(ladder, space, keys)
        for key in self.gone:
            request = MatchRequest(namespace=space.fingerprint, keys=key, mode=MatchMode.BITMAP)
            assert ladder.match(request).blocks == 0, "a deleted block came back"
        late = Chains(self.seed + 1_000_000)
        late._put(ladder, hashing.block_hashes(root, [7] * 12, block_tokens=4))
        assert late.promised, "nothing can be written after the restart"
        ladder.close(deadline_seconds=WAIT_SECONDS)


def run_points(scratch: Path, *, points: int, first_seed: int, stride: int) -> Counter[str]:
    """Run so many points: of each history every `stride`-th call, with the fates of the index in turn."""
    seen: Counter[str] = Counter()
    for seed in itertools.count(first_seed):
        seen["histories"] += 1
        for at in itertools.count(1 + seed % stride, stride):
            fate = FATES[(seed + at // stride) % len(FATES)]
            directory = scratch / f"{seed}-{at}" / "store"
            directory.mkdir(parents=True)
            chains, fs = Chains(seed), CrashFileSystem(seed=seed * 100_003 + at)
            fs.crash_at(at)
            try:
                tier = chains.run(directory, fs, snapshot=fate == "older")
                if not fs.is_down:
                    break
                if tier is not None:
                    abandon(tier)
                prepare_index(directory, fate, seed=at)
                chains.check(directory, fs.reboot())
            except BaseException as error:
                error.add_note(f"history {seed} crashed before call {at}, index {fate}")
                raise
            finally:
                shutil.rmtree(directory.parent)
            seen["points"] += 1
            seen["chains promised"] += len(chains.promised)
            seen["blocks deleted"] += len(chains.gone)
            if seen["points"] >= points:
                return seen
    raise AssertionError("histories never end")


def test_histories_at_some_of_their_calls(scratch: Path, figure: Callable[[str], None]) -> None:
    seen = run_points(scratch, points=40, first_seed=700, stride=35)
    figure(f"crash points of the ladder from seed 700: {dict(seen)}")


@pytest.mark.long
@pytest.mark.usefixtures("quiet_log")
@pytest.mark.timeout(3600)
def test_histories_at_every_call(scratch: Path, figure: Callable[[str], None]) -> None:
    """Set KVSTORE_CRASH_POINTS and KVSTORE_CRASH_SEED for more, and for others."""
    started = time.monotonic()
    seen = run_points(scratch, points=POINTS, first_seed=FIRST_SEED, stride=1)
    seconds = time.monotonic() - started
    figure(f"crash points of the ladder from seed {FIRST_SEED}: {dict(seen)} in {seconds:.0f} s")
