"""Blocks of several parts, such as layers, come part by part: who computes begins with the first of them."""

from __future__ import annotations

import pytest

from kvstore.api import MatchRequest, Progress
from kvstore.core import loads
from kvstore.core.limits import Limits
from kvstore.types import MissReason, ReleaseOutcome, Tier
from tests.support.driver import check_extents, namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig
from tests.unit.core.test_matches import reopened

PARTS, BLOCKS = 3, 8
LIMITS = Limits(load_bytes=2 * 4096, loads_in_flight_max=1)
LOADS = BLOCKS // 2


def stored(limits: Limits = LIMITS) -> tuple[Rig, bytes]:
    """A rig that restarted: its blocks are on disk alone, written as two frames."""
    rig = Rig(space=namespace(parts=PARTS))
    keys = rig.keys(BLOCKS)
    put(rig.ladder, rig.space, rig.root, keys[: len(keys) // 2])
    put(rig.ladder, rig.space, keys[len(keys) // 2 - 32 : len(keys) // 2], keys[len(keys) // 2 :])
    return reopened(rig, manual=True, limits=limits), keys


def match(rig: Rig, keys: bytes, news: list[Progress]) -> int:
    request = MatchRequest(namespace=rig.space.fingerprint, keys=keys)
    return rig.ladder.match(request, news.append).lease


def places(news: list[Progress]) -> list[tuple[int, int, int]]:
    return [(e.part, e.first, e.count) for progress in news for e in progress.extents]


def given_up() -> tuple[Rig, bytes]:
    """A lease on the stored blocks that ended when some parts of some of them had come."""
    rig, keys = stored()
    lease = match(rig, keys, [])
    rig.tier.run(LOADS + 1)
    rig.ladder.release(lease, used=0, outcome=ReleaseOutcome.UNUSED)
    return rig, keys


def test_a_part_of_all_blocks_comes_before_the_next_one() -> None:
    rig, keys = stored()
    news: list[Progress] = []
    match(rig, keys, news)
    rig.tier.run()
    expected = [(part, first, 2) for part in range(PARTS) for first in range(0, BLOCKS, 2)]
    assert places(news) == expected
    assert [progress.done for progress in news] == [False] * (len(news) - 1) + [True]
    assert sum(check_extents(rig.ladder, rig.space, keys, p.extents) for p in news) == PARTS * BLOCKS
    check_integrity(rig.ladder)


def test_a_prefetch_brings_block_after_block() -> None:
    rig, keys = stored()
    rig.ladder.prefetch(rig.space.fingerprint, keys, deadline_seconds=60.0)
    rig.tier.run(PARTS)
    found = rig.match(keys, load=False)  # a prefetch's loads are half as large
    assert [(run.tier, run.count) for run in found.tiers] == [(Tier.HOST, 1), (Tier.SSD, BLOCKS - 1)]
    check_integrity(rig.ladder)


def test_a_sweep_is_bounded() -> None:
    limits = Limits(load_bytes=2 * 4096, sweep_bytes=PARTS * 4 * 4096, loads_in_flight_max=1)
    rig, keys = stored(limits)
    news: list[Progress] = []
    match(rig, keys, news)
    rig.tier.run()
    sweeps = [(part, first, 2) for begin in (0, 4) for part in range(PARTS) for first in (begin, begin + 2)]
    assert places(news) == sweeps


def test_who_comes_in_between_hears_of_every_part_once() -> None:
    rig, keys = stored()
    first: list[Progress] = []
    match(rig, keys, first)
    rig.tier.run(LOADS + 1)
    late: list[Progress] = []
    request = MatchRequest(namespace=rig.space.fingerprint, keys=keys)
    answer = rig.ladder.match(request, late.append)
    watched: list[Progress] = []
    now = rig.ladder.watch(answer.lease, watched.append)
    rig.tier.run()
    for begin, news in ((answer.extents, late), (now.extents, watched)):
        all_of_it = [(e.part, e.first, e.count) for e in begin] + places(news)
        assert sorted(all_of_it) == sorted(places(first))
    check_integrity(rig.ladder)


def test_reads_that_nobody_waits_for_any_more_are_given_up_and_begun_again_for_the_next() -> None:
    rig, keys = given_up()
    assert rig.ladder.gauges()["kvstore_loads_queued"] == 0
    news: list[Progress] = []
    again = rig.match(keys)
    progress = rig.ladder.watch(again.lease, news.append)
    rig.tier.run()
    assert news[-1].done and news[-1].blocks == BLOCKS and news[-1].reason is None
    every = progress.extents + tuple(e for p in news for e in p.extents)
    assert check_extents(rig.ladder, rig.space, keys, every) == PARTS * BLOCKS
    rig.ladder.release(again.lease, used=BLOCKS)
    check_integrity(rig.ladder)


def test_a_load_that_was_given_up_leaves_nothing_behind() -> None:
    rig, _ = given_up()
    rig.tier.run()
    gauges = rig.ladder.gauges()
    assert (gauges["kvstore_loads_in_flight"], gauges["kvstore_loads_queued"]) == (0, 0)
    check_integrity(rig.ladder)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_rotten_record_of_one_part_cuts_all(part: int) -> None:
    rig, keys = stored()
    frame = next(iter(rig.disk.frames.values()))
    payload, digest = frame.records[part][1]
    frame.records[part][1] = (b"!" + payload[1:], digest)
    news: list[Progress] = []
    match(rig, keys, news)
    rig.tier.run()
    assert (news[-1].done, news[-1].blocks, news[-1].reason) == (True, 1, MissReason.CORRUPT)
    check_integrity(rig.ladder)


def test_a_disk_that_hangs_within_a_load_ends_it_for_its_readers_and_frees_its_slots_later() -> None:
    rig, keys = stored()
    news: list[Progress] = []
    lease = match(rig, keys, news)
    rig.tier.run(LOADS + 1)
    for _ in range(4):
        rig.tick(3.0)
    assert (news[-1].done, news[-1].blocks, news[-1].reason) == (True, 0, MissReason.TIER_DOWN)
    rig.ladder.release(lease, used=0)
    rig.tier.run()
    gauges = rig.ladder.gauges()
    assert (gauges["kvstore_loads_in_flight"], gauges["kvstore_loads_queued"]) == (0, 0)
    check_integrity(rig.ladder)


def test_a_load_that_two_stretches_of_a_match_wait_for_is_queued_once() -> None:
    rig, keys = stored()
    match(rig, keys, [])
    (waiter,) = rig.ladder._leases
    frame = waiter.items[0].frame
    rig.ladder._loads.leave(waiter)
    assert rig.ladder.gauges()["kvstore_loads_queued"] == 0
    joined = rig.ladder._loads.want([(frame, 2, 2), (frame, 3, 1)], waiter, urgent=True)
    assert (joined, rig.ladder.gauges()["kvstore_loads_queued"]) == (2, PARTS)


def test_what_one_request_wants_is_read_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "LOAD_BYTES_MIN", 4096)
    rig, keys = stored(Limits(load_bytes=1 << 20, loads_in_flight_max=100))
    news: list[Progress] = []
    match(rig, keys, news)
    assert rig.tier.run() == PARTS * loads.SHARES
