"""One history through the simulator's form (ids, no bytes) and the daemon's (hashes of tokens, payload in
memory): every decision must be the same.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest

from kvstore import hashing
from kvstore.api import MatchRequest
from kvstore.clock import ManualClock
from kvstore.core.catalog import Catalog
from kvstore.core.eviction import POLICIES
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.events import Events
from kvstore.retention import RetentionClass
from kvstore.trace.requests import TraceRequest
from kvstore.trace.simulator import HALF_TICK_SECONDS, Simulator, pages_for, seconds_of
from kvstore.types import HASH_BYTES, PutOutcome, Tier, TtlMode, key_at
from tests.support.driver import check_extents, namespace, put
from tests.support.memory import PrivateMemory

CLASSES = (
    RetentionClass("agent", 60.0, TtlMode.SLIDING, Tier.HOST),
    RetentionClass("batch", 5.0, TtlMode.FIXED, Tier.HOST),
)
FOR_EVER = (RetentionClass("agent", math.inf, TtlMode.SLIDING, Tier.HOST),)


class Hashed:
    """A store as the daemon runs it: keys are hash chains of tokens, slots hold digested bytes."""

    def __init__(self, *, classes: tuple[RetentionClass, ...], blocks: int, policy: str) -> None:
        self.clock = ManualClock()
        self.space = namespace()
        self.root = hashing.chain_root(self.space.fingerprint)
        self.ladder = Ladder(
            host=PrivateMemory(pages_for(blocks)),
            ssd=None,
            clock=self.clock,
            events=Events(),
            classes=[
                RetentionClass(c.name, c.ttl_seconds + HALF_TICK_SECONDS, c.mode, c.lowest_tier)
                for c in classes
            ],
            limits=Limits(ledger_entries=1 << 12),
            policy=POLICIES[policy](),
            new_number=itertools.count(1).__next__,
        )
        self.ladder.open(self.space, root=self.root)

    def serve(self, request: TraceRequest) -> tuple[int, int]:
        """Return how many blocks were delivered, each checked, and how many were stored."""
        tokens = [t for first, count in request.runs for i in range(count) for t in (first + i, 0, 0, 0)]
        keys = hashing.block_hashes(self.root, tokens, block_tokens=4)
        found = self.ladder.match(
            MatchRequest(namespace=self.space.fingerprint, keys=keys, retention_class=request.retention_class)
        )
        delivered = check_extents(self.ladder, self.space, keys, found.extents)
        if found.lease:
            self.ladder.release(found.lease, used=delivered)
        if delivered == request.blocks:
            return delivered, 0
        parent = key_at(keys, delivered - 1) if delivered else self.root
        rest = keys[delivered * HASH_BYTES :]
        answer = put(self.ladder, self.space, parent, rest, retention_class=request.retention_class)
        assert answer is not None
        stored = sum(run.count for run in answer.outcomes if run.outcome is PutOutcome.STORED_HOST)
        return delivered, stored


def history(rng: random.Random, *, length: int) -> list[TraceRequest]:
    """Conversations that grow, fork and come back; ids differ wherever prefixes do."""
    requests, now, fresh = [], 0, itertools.count(1)
    chains: list[list[int]] = [[next(fresh)]]
    for _ in range(length):
        now += rng.choice([0, 0, 1, 400, 3000, 5000, 60_000])
        chain = rng.choice(chains[-12:])
        if rng.random() < 0.3:
            chain = chain[: rng.randint(1, len(chain))]
            chains.append(chain)
        chain += [next(fresh) for _ in range(rng.randint(0, 9))]
        runs = tuple((block, 1) for block in chain)
        requests.append(
            TraceRequest(now, 4 * len(chain), 0, runs, "batch" if rng.random() < 0.3 else "agent")
        )
    return requests


def order(catalog: Catalog) -> list[tuple[int, str]]:
    """In which order what would leave: how long each run is, and who holds it."""
    return [(node.count, node.retention_class) for node in catalog.policy.nodes()]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(2))
def test_with_little_room_both_keep_and_evict_the_same(seed: int, policy: str) -> None:
    requests = [
        TraceRequest(r.timestamp_ms, r.input_tokens, 0, r.runs)
        for r in history(random.Random(seed), length=90)
    ]
    simulator = Simulator(block_tokens=4, classes=FOR_EVER, capacity_blocks=128, policy=POLICIES[policy]())
    hashed = Hashed(classes=FOR_EVER, blocks=128, policy=policy)
    hits = 0
    for request in requests:
        hashed.clock.advance(seconds_of(request.timestamp_ms) - elapsed(hashed))
        served = simulator.serve(request)
        assert hashed.serve(request) == (served.hit_blocks, served.stored_blocks), request
        assert order(hashed.ladder.catalog) == order(simulator.ladder.catalog)
        hits += served.hit_blocks
    assert hits
    assert simulator.ladder.catalog.slabs.used_pages == hashed.ladder.catalog.slabs.used_pages


@pytest.mark.parametrize("seed", range(2))
def test_with_lives_of_classes_both_see_the_same(seed: int) -> None:
    simulator = Simulator(block_tokens=4, classes=CLASSES)
    hashed = Hashed(classes=CLASSES, blocks=4096, policy="lru")
    expired = 0
    for request in history(random.Random(seed), length=90):
        hashed.clock.advance(seconds_of(request.timestamp_ms) - elapsed(hashed))
        hashed.ladder.tick()
        served = simulator.serve(request)
        delivered, _ = hashed.serve(request)
        assert delivered == served.hit_blocks, request
        expired += served.stored_blocks
    distinct = sum(node.count for node in hashed.ladder.catalog.policy.nodes())
    assert expired > distinct  # some were stored again after their end


def elapsed(hashed: Hashed) -> float:
    """How far the daemon's clock is."""
    return hashed.clock.wall() - ManualClock().wall()
