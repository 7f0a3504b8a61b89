"""The ladder over an SSD tier whose file system crashes: what was acknowledged on SSD is a hit again."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from threading import Event

import pytest

from kvstore import hashing
from kvstore.api import CommitAnswer, MatchRequest, Progress
from kvstore.clock import ManualClock
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.events import Events
from kvstore.namespace import Namespace
from kvstore.tiers.ssd import SsdTier
from kvstore.types import HASH_BYTES, AckTier, PutOutcome, ReleaseOutcome
from tests.crash.test_ssd_crash import WAIT_SECONDS, abandon, small_ssd
from tests.support.crash_fs import CrashFileSystem
from tests.support.driver import check_extents, namespace, put
from tests.support.memory import PrivateMemory

ROUNDS = 4
PUTS = 6


def opened(directory: Path, fs: CrashFileSystem, *, boot: int) -> tuple[Ladder, SsdTier]:
    tier = small_ssd(directory, fs, seed=boot)
    numbers = count(1)
    ladder = Ladder(
        host=PrivateMemory(2048),
        ssd=tier,
        clock=ManualClock(),
        events=Events(),
        new_number=lambda: next(numbers),
        limits=Limits(load_bytes=8192),
    )
    ladder.recover()
    return ladder, tier


class Answers(list[CommitAnswer]):
    """A list that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._came = Event()

    def append(self, answer: CommitAnswer) -> None:
        super().append(answer)
        self._came.set()

    def wait(self) -> CommitAnswer:
        assert self._came.wait(WAIT_SECONDS)
        return self[0]


def check_hit(ladder: Ladder, space: Namespace, keys: bytes) -> None:
    """Match a chain, wait until it is resident, and compare every byte."""
    loaded = Event()

    def on_progress(progress: Progress) -> None:
        if progress.done:
            loaded.set()

    request = MatchRequest(namespace=space.fingerprint, keys=keys)
    answer = ladder.match(request, on_progress)
    assert answer.blocks == len(keys) // HASH_BYTES
    extents = answer.extents
    if not answer.ready:
        assert loaded.wait(WAIT_SECONDS)
        progress = ladder.watch(answer.lease, on_progress)
        assert (progress.blocks, progress.reason) == (answer.blocks, None)
        extents = progress.extents
    assert check_extents(ladder, space, keys, extents) == answer.blocks * len(space.layout.parts)
    ladder.release(answer.lease, used=answer.blocks, outcome=ReleaseOutcome.USED)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_acknowledged_on_ssd_is_a_hit_after_a_crash(scratch: Path, seed: int) -> None:
    rng = random.Random(seed)
    fs = CrashFileSystem(seed=seed)
    space = namespace(parts=2)
    root = hashing.chain_root(space.fingerprint)
    promised: set[bytes] = set()
    chains = [[rng.randrange(3) for _ in range(4 * rng.randint(1, 9))] for _ in range(ROUNDS * PUTS)]
    for boot in range(ROUNDS):
        ladder, tier = opened(scratch, fs, boot=boot)
        ladder.open(space, root=root)
        for keys in promised:
            check_hit(ladder, space, keys)
        for tokens in chains[boot * PUTS : (boot + 1) * PUTS]:
            keys = hashing.block_hashes(root, tokens, block_tokens=4)
            answers = Answers()
            answer = put(ladder, space, root, keys, ack=AckTier.SSD, acks=answers) or answers.wait()
            # Durable means with every ancestor, so the last block speaks for the whole chain.
            if answer.outcomes[-1].outcome is PutOutcome.STORED_SSD:
                promised.add(keys)
        fs.crash()
        abandon(tier)
        fs = fs.reboot()
    assert promised
