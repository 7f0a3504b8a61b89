"""Quotas of classes: obeyed in host memory and on SSD, at the cost of the class itself and of nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.eviction import ExactLru
from kvstore.core.frames import Node
from kvstore.core.ladder import Ladder
from kvstore.types import HASH_BYTES, PAGE_BYTES, AckTier, BlockHash, MissReason, PutOutcome, Tier
from tests.support.driver import put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig

BLOCK = PAGE_BYTES


def limit(ladder: Ladder, name: str, quota_bytes: int) -> None:
    table = ladder.class_table()
    ladder.adopt(table.changed(replace(table.named(name), quota_bytes=quota_bytes), at=ladder.wall()))


def held(rig: Rig, name: str) -> dict[Tier, int]:
    return rig.ladder.catalog.quotas.held_bytes(name)


def store(rig: Rig, salt: int, *, blocks: int, name: str) -> bytes:
    keys = rig.keys(blocks, salt=salt)
    put(rig.ladder, rig.space, rig.root, keys, retention_class=name)
    rig.tick(1)
    return keys


def test_a_full_class_makes_room_among_its_own_on_both_tiers() -> None:
    rig = Rig()
    limit(rig.ladder, "batch", 32 * BLOCK)
    others = store(rig, 1, blocks=40, name="agent")
    runs = [store(rig, 100 + n, blocks=1, name="batch") for n in range(50)]
    for tier in (Tier.HOST, Tier.SSD):
        assert 0 < held(rig, "batch")[tier] <= 32 * BLOCK
    assert rig.length(others) == 40
    assert rig.length(runs[-1]) == 1
    gone = rig.match(runs[0])
    assert (gone.blocks, gone.reason) == (0, MissReason.EVICTED)
    assert held(rig, "agent") == {
        Tier.HOST: 40 * BLOCK,
        Tier.SSD: rig.ladder.catalog.segments.class_bytes["agent"],
    }


def test_a_put_larger_than_the_quota_is_cut_at_its_tail() -> None:
    rig = Rig(ssd=False)
    limit(rig.ladder, "batch", 4 * BLOCK)
    answer = put(rig.ladder, rig.space, rig.root, rig.keys(10), retention_class="batch")
    assert answer is not None
    assert [(run.outcome, run.count) for run in answer.outcomes] == [
        (PutOutcome.STORED_HOST, 4),
        (PutOutcome.THROTTLED, 6),
    ]
    assert rig.length(rig.keys(10)) == 4


def test_what_a_lease_holds_stays_and_the_newcomer_is_refused() -> None:
    rig = Rig(ssd=False)
    limit(rig.ladder, "batch", 8 * BLOCK)
    first = store(rig, 1, blocks=8, name="batch")
    lease = rig.match(first).lease
    store(rig, 2, blocks=4, name="batch")
    assert (rig.length(first), rig.length(rig.keys(4, salt=2))) == (8, 0)
    rig.ladder.release(lease, used=8)
    assert store(rig, 3, blocks=4, name="batch") and rig.length(rig.keys(4, salt=3)) == 4


def test_a_run_too_long_for_the_quota_of_the_ssd_stays_in_host_memory() -> None:
    rig = Rig()
    limit(rig.ladder, "batch", 8 * BLOCK)
    acks: list = []  # type: ignore[type-arg]
    answer = put(
        rig.ladder, rig.space, rig.root, rig.keys(8), retention_class="batch", ack=AckTier.SSD, acks=acks
    )
    assert answer is None
    assert acks[0].outcomes[0].outcome is PutOutcome.STORED_HOST
    assert held(rig, "batch") == {Tier.HOST: 8 * BLOCK, Tier.SSD: 0}


def test_loads_count_for_the_class_too() -> None:
    rig = Rig(pages=64)
    runs = [store(rig, n, blocks=4, name="batch") for n in range(6)]
    store(rig, 50, blocks=60, name="agent")
    assert held(rig, "batch")[Tier.HOST] < 8 * BLOCK
    limit(rig.ladder, "batch", 16 * BLOCK)
    for keys in runs:
        answer = rig.match(keys)
        rig.ladder.tick()
        rig.ladder.release(answer.lease, used=answer.blocks)
        assert held(rig, "batch")[Tier.HOST] <= 16 * BLOCK
        check_integrity(rig.ladder)


@pytest.mark.parametrize("ssd", [True, False])
def test_a_lowered_quota_is_reached_by_and_by(ssd: bool) -> None:
    rig = Rig(ssd=ssd)
    for n in range(12):
        store(rig, n, blocks=4, name="batch")
    lowered = replace(rig.ladder.class_table().named("batch"), quota_bytes=20 * BLOCK)
    assert rig.ladder.over_quota(lowered)[Tier.HOST] == 28 * BLOCK
    limit(rig.ladder, "batch", 20 * BLOCK)
    rig.tick(1)
    assert held(rig, "batch")[Tier.HOST] <= 20 * BLOCK
    assert held(rig, "batch")[Tier.SSD] <= 20 * BLOCK
    assert rig.length(rig.keys(4, salt=11)) == 4
    assert len(rig.keys(1)) == HASH_BYTES


class Backwards(ExactLru):
    """A policy that lists its nodes in another order than that in which they leave."""

    def nodes(self) -> list[Node]:
        """Return the most recent first."""
        return super().nodes()[::-1]


def test_room_is_made_in_whatever_order_a_policy_lists_its_nodes() -> None:
    rig = Rig(ssd=False)
    rig.ladder.catalog.policy = Backwards()
    limit(rig.ladder, "batch", 16 * BLOCK)
    keys, parent = rig.keys(12), rig.root
    for block in range(12):
        key = keys[block * HASH_BYTES : (block + 1) * HASH_BYTES]
        put(rig.ladder, rig.space, parent, key, retention_class="batch")
        parent = BlockHash(key)
        rig.tick(1)
        rig.ladder.touch(rig.space.fingerprint, keys[:HASH_BYTES])
    assert rig.length(keys) == 12
    store(rig, 1, blocks=15, name="batch")
    assert (rig.length(rig.keys(15, salt=1)), rig.length(keys)) == (15, 0)
