"""Runs that share frames and segments: each block leaves once, and not while it lives."""

from __future__ import annotations

from typing import Any

from kvstore.api import CommitAnswer, OutcomeRun
from kvstore.core.frames import Slice
from kvstore.core.limits import Limits
from kvstore.retention import DAY
from kvstore.types import PAGE_BYTES, AckTier, MissReason, PutOutcome
from tests.support.driver import put
from tests.unit.core.rig import Rig


def test_a_run_outlives_the_shorter_lived_one_that_it_was_written_with() -> None:
    rig = Rig(manual=True)
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig.ladder.release(rig.match(keys[:64], retention_class="chat").lease, used=2)
    rig.tier.run()
    rig.tick(3700.0)
    rig.tick(3700.0)
    assert rig.length(keys) == 2


def test_a_block_leaves_once_with_its_segment() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys)
    rig.ladder.release(rig.match(keys[:64], retention_class="chat").lease, used=2)
    catalog: Any = rig.ladder._catalog
    for node in list(catalog.namespaces[rig.space.fingerprint].nodes()):
        catalog._release_host(node)
    left, leave = [0], catalog._leave

    def count(piece: Slice, reason: MissReason) -> None:
        left[0] += piece.count
        leave(piece, reason)

    catalog._leave = count
    with rig.ladder._decision():
        for segment in catalog.segments:
            catalog.release_segment(segment, MissReason.EVICTED)
    assert left == [4]
    assert rig.match(keys).reason is MissReason.EVICTED


def test_only_what_makes_room_is_unlinked_at_once() -> None:
    for capacity, is_full in ((8, False), (4, True)):
        rig = Rig(limits=Limits(ssd_capacity_bytes=capacity * PAGE_BYTES))
        for salt in range(4):
            put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=salt))
        assert not rig.tier.urgent
        rig.tick(5 * DAY)
        assert rig.tier.urgent == [is_full]
        for salt in range(3 * capacity):
            put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=salt))
        assert len(rig.tier.urgent) > 1
        assert all(rig.tier.urgent[1:])


def test_a_write_into_a_segment_that_was_let_go_meanwhile_is_not_durable() -> None:
    rig = Rig(manual=True)
    first, second = rig.keys(1, salt=1), rig.keys(1, salt=2)
    acks: list[CommitAnswer] = []
    put(rig.ladder, rig.space, rig.root, first)
    put(rig.ladder, rig.space, rig.root, second, ack=AckTier.SSD, acks=acks)
    rig.tier.run(1)
    with rig.ladder._decision():
        for segment in rig.ladder._catalog.segments:
            rig.ladder._catalog.release_segment(segment, MissReason.EVICTED)
    rig.tier.run()
    assert acks[0].outcomes == (OutcomeRun(PutOutcome.STORED_HOST, 1),)
    for _ in range(4):
        rig.tick(6.0)
        rig.tier.run()
    (run,), _, _ = rig.ladder.inspect(rig.space.fingerprint, keys=second)
    assert run.ssd_blocks == 1
    assert len([f for f in rig.disk.frames.values() if f.header.keys == second]) == 1
