"""What the learning order keeps, of traffic in which the least recent order keeps nothing."""

from __future__ import annotations

import random

from kvstore.core.eviction import POLICIES
from kvstore.core.eviction_density import HitDensity
from kvstore.core.reuse import AGE_STARTS, FIRST_AGE_BLOCKS, ReuseTable, age_of
from kvstore.trace.requests import TraceRequest
from kvstore.trace.simulator import Simulator

SESSIONS, ROOM = 4, 80


def request(index: int, first: int, blocks: int) -> TraceRequest:
    """A request of one run."""
    return TraceRequest(index * 1000, 4 * blocks, 0, ((first, blocks),))


def sessions_among_strangers(rounds: int) -> list[TraceRequest]:
    """Four sessions take turns to come back; between two of them come five requests that nobody repeats."""
    found: list[TraceRequest] = []
    for turn in range(rounds):
        found.append(request(len(found), 1 + 100 * (turn % SESSIONS), 10))
        found += [request(len(found) + i, 10_000 + 10 * len(found) + 10 * i, 10) for i in range(5)]
    return found


def hits(policy: str, requests: list[TraceRequest]) -> int:
    """Hit blocks with room for 80."""
    simulator = Simulator(block_tokens=4, capacity_blocks=ROOM, policy=POLICIES[policy]())
    return simulator.run(requests).hit_blocks


def test_sessions_are_kept_before_what_nobody_repeats() -> None:
    requests = sessions_among_strangers(150)
    possible = 10 * (150 - SESSIONS)
    assert hits("lru", requests) == 0
    assert hits("density", requests) > possible / 3


def test_what_left_is_followed_within_bounds() -> None:
    policy = HitDensity(gone_max=16)
    simulator = Simulator(block_tokens=4, capacity_blocks=ROOM, policy=policy)
    rng = random.Random(1)
    for index in range(200):
        simulator.request(request(index, 1 + 100 * rng.randrange(40), rng.randrange(1, 30)))
    assert len(policy._gone) <= 16
    assert {node for node in policy.nodes() if node.count == 0} == set()
    assert sum(node.count for node in policy.nodes()) == simulator.ladder.catalog.slabs.used_pages


def test_blocks_are_worth_more_when_they_are_about_to_be_read() -> None:
    table = ReuseTable()
    assert table.worth[0, 0] > table.worth[0, 10] > table.worth[0, 20]
    now = 0.0
    for _ in range(2000):
        birth = table.born(now, 0)
        birth.blocks = 100
        now += AGE_STARTS[12]
        table.pass_time(now)
        birth.read(now, 100)
    table.learn()
    assert table.worth[0, 11] > 2 * table.worth[0, 0]


def test_ages_are_half_octaves() -> None:
    assert age_of(0) == age_of(FIRST_AGE_BLOCKS - 1) == 0
    assert age_of(FIRST_AGE_BLOCKS) == 1
    assert age_of(2 * FIRST_AGE_BLOCKS) == 3
    assert age_of(1e18) == len(AGE_STARTS) - 2
