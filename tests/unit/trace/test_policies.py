"""What the learning order keeps, of traffic in which the least recent order keeps nothing."""

from __future__ import annotations

import random

from kvstore.core.eviction import POLICIES
from kvstore.core.eviction_density import HitDensity
from kvstore.core.reuse import AGE_STARTS, FIRST_AGE_SECONDS, Birth, Kind, ReuseTable, age_of, signature_of
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


def test_what_is_worth_less_than_all_else_is_not_taken_in() -> None:
    requests = sessions_among_strangers(150)
    simulator = Simulator(block_tokens=4, capacity_blocks=ROOM, policy=HitDensity())
    tally = simulator.run(requests)
    missed = sum(r.blocks for r in requests) - tally.hit_blocks
    assert tally.stored_blocks < missed - 1000
    assert tally.hit_blocks > 10 * (150 - SESSIONS) / 2


def test_what_goes_on_to_ssd_is_taken_in_whatever_it_is_worth() -> None:
    requests = sessions_among_strangers(150)
    simulator = Simulator(
        block_tokens=4, capacity_blocks=ROOM, policy=HitDensity(), block_bytes=4096, ssd_bytes=1 << 30
    )
    tally = simulator.run(requests)
    assert tally.stored_blocks == sum(r.blocks for r in requests) - tally.hit_blocks


def test_what_was_not_taken_in_is_known_when_it_comes_back() -> None:
    policy, names = HitDensity(), [bytes([n]) * 16 for n in range(10)]
    policy.expect(None, names, retention_class="default", now=100.0)
    policy.refuse(None, names, 0, retention_class="default")
    policy.expect(None, [bytes([99]) * 16], retention_class="default", now=110.0)
    policy.expect(None, names, retention_class="default", now=130.0)
    assert (policy._path.pause_seconds, policy._path.spell, policy._path.new_blocks) == (30.0, 1, 0)


def test_what_left_is_followed_within_bounds() -> None:
    policy = HitDensity(gone_max=16)
    simulator = Simulator(block_tokens=4, capacity_blocks=ROOM, policy=policy)
    rng = random.Random(1)
    for index in range(200):
        simulator.request(request(index, 1 + 100 * rng.randrange(40), rng.randrange(1, 30)))
    assert len(policy._gone) <= 16
    assert not policy._awaited
    assert {node for node in policy.nodes() if node.count == 0} == set()
    assert sum(node.count for node in policy.nodes()) == simulator.ladder.catalog.slabs.used_pages


def born(table: ReuseTable[Birth], at: float, *, new_blocks: int = 1) -> Birth:
    """A session of a hundred blocks."""
    birth = Birth(table, at, Kind.SESSION)
    birth.signature = signature_of(
        pause_seconds=5.0, usual_pause=3.0, spell=1, blocks=100, new_blocks=new_blocks
    )
    birth.grow(100)
    table.follow(birth)
    return birth


def worth_at(table: ReuseTable[Birth], age: int, *, new_blocks: int = 1) -> float:
    """What a session is worth at an age."""
    birth = born(table, 0.0, new_blocks=new_blocks)
    birth.age = age
    return birth.worth


def test_blocks_are_worth_more_when_they_are_about_to_be_read() -> None:
    table: ReuseTable[Birth] = ReuseTable()
    assert worth_at(table, 0) > worth_at(table, 10) > worth_at(table, 20)
    table, now = ReuseTable(), 0.0
    for _ in range(2000):
        birth = born(table, now)
        now += AGE_STARTS[12]
        table.pass_time(now)
        birth.read(now, 100)
    table.learn()
    assert worth_at(table, 11) > 2 * worth_at(table, 0)


def test_sessions_are_told_apart_by_what_is_known_of_them() -> None:
    table: ReuseTable[Birth] = ReuseTable()
    before = worth_at(table, 4, new_blocks=1), worth_at(table, 4, new_blocks=300)
    assert before[0] == before[1]
    now = 0.0
    for number in range(1000):
        comes_back, stays_away = born(table, now, new_blocks=1), born(table, now, new_blocks=300)
        now += AGE_STARTS[8]
        table.pass_time(now)
        comes_back.read(now, 100)
        stays_away.blocks = 0
        if not number % 100:
            table.learn()
    table.learn()
    assert worth_at(table, 4, new_blocks=1) > 3 * worth_at(table, 4, new_blocks=300)


def test_a_part_that_is_read_counts_for_its_share() -> None:
    """A session of which a third is read again is worth as much as a third of the sessions coming back."""
    worths = []
    for reads in ([33] * 300, [100, 0, 0] * 100):
        table: ReuseTable[Birth] = ReuseTable()
        for number, blocks in enumerate(reads):
            birth = born(table, 20.0 * number)
            table.pass_time(20.0 * number + 10.0)
            birth.read(20.0 * number + 10.0, blocks)
            birth.blocks = 0
        table.learn()
        worths.append(worth_at(table, 0))
    assert abs(worths[0] / worths[1] - 1) < 0.1


def test_ages_are_half_octaves() -> None:
    assert age_of(-1.0) == age_of(0) == age_of(FIRST_AGE_SECONDS - 0.01) == 0
    assert age_of(FIRST_AGE_SECONDS) == 1
    assert age_of(2 * FIRST_AGE_SECONDS) == 3
    assert age_of(1e18) == len(AGE_STARTS) - 2
