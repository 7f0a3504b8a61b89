"""Frozen matches of an owner, what counts as delivered, and deadlines that move."""

from __future__ import annotations

from kvstore.api import MatchRequest
from kvstore.types import MissReason, ReleaseOutcome
from tests.support.driver import namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig


def stored(rig: Rig, blocks: int, *, provenance: int = 0) -> bytes:
    keys = rig.keys(blocks)
    put(rig.ladder, rig.space, rig.root, keys, provenance=provenance)
    return keys


def hits(rig: Rig) -> float:
    return rig.events.total("kvstore_hit_tokens_total")


def test_the_answer_stands_while_any_lease_of_the_owner_lives() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys[:64])
    first = rig.match(keys, owner="r1")
    second = rig.match(keys, owner="r1")
    put(rig.ladder, rig.space, keys[32:64], keys[64:])
    rig.ladder.release(first.lease, used=2)
    third = rig.match(keys, owner="r1")
    assert (second.blocks, third.blocks) == (2, 2)
    rig.ladder.release(second.lease, used=2)
    rig.ladder.release(third.lease, used=2)
    assert rig.match(keys, owner="r1").blocks == 4


def test_an_answer_repeated_for_an_owner_counts_as_one_delivery() -> None:
    rig = Rig()
    keys = stored(rig, 4)
    leases = [rig.match(keys, owner="r1").lease for _ in range(3)]
    rig.ladder.release(leases[0], used=2)
    assert hits(rig) == 2 * 4
    rig.ladder.release(leases[1], used=4)
    rig.ladder.release(leases[2], used=3)
    assert hits(rig) == 4 * 4 == rig.events.total("kvstore_lookup_tokens_total")


def test_nothing_negative_is_delivered() -> None:
    rig = Rig()
    lease = rig.match(stored(rig, 2)).lease
    rig.ladder.release(lease, used=-1)
    assert hits(rig) == 0


def test_deleted_blocks_are_not_matched_again_by_an_owner_that_holds_them() -> None:
    rig = Rig()
    keys = stored(rig, 3)
    assert rig.match(keys, owner="r1").blocks == 3
    rig.ladder.delete(rig.space.fingerprint, keys[64:])
    found = rig.match(keys, owner="r1")
    assert (found.blocks, found.reason) == (2, MissReason.DELETED)
    check_integrity(rig.ladder)


def test_bytes_found_bad_are_not_matched_again_by_an_owner_that_holds_them() -> None:
    rig = Rig(ssd=False)
    keys = stored(rig, 3)
    bad = rig.match(keys, owner="r1").lease
    rig.match(keys, owner="r1")
    rig.ladder.release(bad, used=1, outcome=ReleaseOutcome.CORRUPT)
    assert rig.match(keys, owner="r1").blocks == 1


def test_a_frozen_answer_is_not_less_exact_than_asked_for() -> None:
    rig = Rig()
    keys = stored(rig, 2, provenance=640)
    assert rig.match(keys, owner="r1").blocks == 2
    found = rig.match(keys, owner="r1", exact_only=True)
    assert (found.blocks, found.reason) == (0, MissReason.IDENTITY_MISMATCH)


def test_a_frozen_answer_whose_side_parts_are_gone_is_no_error() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys = rig.keys(2)
    put(rig.ladder, rig.space, rig.root, keys, with_side=True)
    assert rig.match(keys, owner="r1").boundaries == (2, 1)
    for node in list(rig.ladder._catalog.namespaces[rig.space.fingerprint].loose.nodes()):
        rig.ladder._catalog.drop(node, 0, MissReason.CORRUPT)
    assert rig.match(keys, owner="r1").blocks == 2


def test_renewals_leave_nothing_behind() -> None:
    rig = Rig()
    keys = stored(rig, 1)
    lease = rig.match(keys).lease
    for _ in range(3000):
        rig.ladder.renew([lease], lease_seconds=60.0)
        rig.ladder.release(rig.match(keys).lease, used=0, outcome=ReleaseOutcome.UNUSED)
    assert len(rig.ladder._leases._deadlines) < 1100
    rig.tick(59.0)
    assert rig.ladder.gauges()["kvstore_leases"] == 1
    rig.tick(1.0)
    assert rig.ladder.gauges()["kvstore_leases"] == 0


def test_why_a_block_left_is_told_to_its_own_namespace_alone() -> None:
    from kvstore.types import Addressing

    rig = Rig(space=namespace(addressing=Addressing.FLAT))
    other = namespace(addressing=Addressing.FLAT, model="of somebody else")
    rig.ladder.open(other)
    key = bytes(range(32))
    put(rig.ladder, rig.space, rig.root, key)
    put(rig.ladder, other, rig.root, bytes(32))
    rig.ladder.delete(rig.space.fingerprint, key)
    found = rig.ladder.match(MatchRequest(namespace=other.fingerprint, keys=key))
    assert found.reason is MissReason.NEVER_STORED
    assert rig.match(key).reason is MissReason.DELETED
