"""Purges: by namespace, tenant, class and prefix; invisible at once, bytes when leases and writes end."""

from __future__ import annotations

import pytest

from kvstore import hashing
from kvstore.core.purging import Target
from kvstore.errors import UnknownNamespace
from kvstore.retention import DAY
from kvstore.types import HASH_BYTES, PAGE_BYTES, Fingerprint, MissReason
from tests.support.driver import namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig
from tests.unit.core.test_removal import reopened


def restarted(rig: Rig) -> Rig:
    return Rig(disk=rig.disk, clock=rig.clock, space=rig.space)


def filled(rig: Rig) -> dict[str, bytes]:
    found = {}
    for salt, name in enumerate(("agent", "chat", "batch")):
        found[name] = rig.keys(6, salt=10 + salt)
        put(rig.ladder, rig.space, rig.root, found[name], retention_class=name)
    return found


def test_a_class_goes_and_the_others_stay() -> None:
    rig = Rig()
    keys = filled(rig)
    target = Target(retention_class="chat")
    foreseen = rig.ladder.foresee_purge(target)
    assert (foreseen.runs, foreseen.blocks, foreseen.bytes) == (1, 6, 6 * PAGE_BYTES)
    assert rig.length(keys["chat"]) == 6
    purge = rig.ladder.purge(target)
    assert purge.amount == foreseen
    assert {name: rig.length(k) for name, k in keys.items()} == {"agent": 6, "chat": 0, "batch": 6}
    assert rig.match(keys["chat"]).reason is MissReason.DELETED
    assert purge.unreachable_since == purge.gone_at == rig.ladder.wall()
    assert purge.is_durable
    check_integrity(rig.ladder)
    again = restarted(rig)
    assert {name: again.length(k) for name, k in keys.items()} == {"agent": 6, "chat": 0, "batch": 6}


def test_a_class_in_the_middle_of_a_chain_leaves_what_follows_for_its_return() -> None:
    rig = Rig()
    keys = rig.keys(8)
    put(rig.ladder, rig.space, rig.root, keys[: 4 * HASH_BYTES], retention_class="batch")
    put(
        rig.ladder,
        rig.space,
        keys[3 * HASH_BYTES : 4 * HASH_BYTES],
        keys[4 * HASH_BYTES :],
        retention_class="chat",
    )
    # The write of what follows took the head over.
    assert rig.ladder.foresee_purge(Target(retention_class="batch")).blocks == 0
    rig.ladder.touch(rig.space.fingerprint, keys[: 4 * HASH_BYTES], retention_class="system")
    assert rig.ladder.purge(Target(retention_class="system")).amount.blocks == 4
    assert rig.length(keys) == 0
    put(rig.ladder, rig.space, rig.root, keys[: 4 * HASH_BYTES], retention_class="batch")
    assert rig.length(keys) == 8


def test_a_prefix_goes_with_all_that_follows_and_what_is_before_it_stays() -> None:
    rig = Rig()
    one, two = rig.chain([1, 2, 3, 4]), rig.chain([1, 2, 5, 6])
    for keys in (one, two):
        put(rig.ladder, rig.space, rig.root, keys)
    target = Target(namespace=rig.space.fingerprint, keys=one[: 3 * HASH_BYTES])
    assert rig.ladder.foresee_purge(target).blocks == 2
    purge = rig.ladder.purge(target)
    assert (purge.amount.blocks, purge.amount.bytes) == (2, 2 * PAGE_BYTES)
    assert (rig.length(one), rig.length(two)) == (2, 4)
    assert restarted(rig).length(two) == 4
    assert restarted(rig).length(one) == 2


def test_a_tenant_goes_with_all_its_namespaces() -> None:
    rig = Rig()
    keys = filled(rig)
    assert rig.ladder.foresee_purge(Target(tenant="acme")).blocks == 0
    assert rig.ladder.purge(Target(tenant="")).amount.blocks == 18
    assert not any(rig.length(k) for k in keys.values())
    with pytest.raises(UnknownNamespace):
        rig.ladder.purge(Target(namespace=Fingerprint(bytes(32))))


def test_leased_blocks_are_invisible_at_once_and_their_bytes_follow_the_lease() -> None:
    rig = Rig()
    keys = filled(rig)
    lease = rig.match(keys["chat"]).lease
    purge = rig.ladder.purge(Target(namespace=rig.space.fingerprint))
    assert rig.length(keys["chat"]) == 0
    assert (purge.leased_bytes, purge.gone_at, purge.is_durable) == (6 * PAGE_BYTES, None, True)
    assert rig.ladder.catalog.slabs.used_pages == 6
    rig.tick(3)
    rig.ladder.release(lease, used=6)
    rig.ladder.look_after(purge)
    assert (purge.leased_bytes, purge.gone_at) == (0, rig.ladder.wall())
    assert not rig.ladder.catalog.slabs.used_pages


def test_what_is_queued_or_being_written_is_gone_when_the_write_comes_back() -> None:
    rig = Rig(manual=True)
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys)
    purge = rig.ladder.purge(Target(namespace=rig.space.fingerprint))
    assert rig.length(keys) == 0
    assert (purge.writing_bytes, purge.is_durable, purge.gone_at) == (6 * PAGE_BYTES, False, None)
    rig.tier.run()
    rig.ladder.look_after(purge)
    rig.tier.run()
    rig.ladder.look_after(purge)
    assert purge.is_durable
    assert purge.gone_at is not None
    assert restarted(rig).length(keys) == 0


def test_a_flat_namespace_loses_the_given_blocks() -> None:
    from kvstore.types import Addressing

    rig = Rig(space=namespace(addressing=Addressing.FLAT))
    keys = hashing.block_hashes(rig.root, list(range(16)), block_tokens=4)
    put(rig.ladder, rig.space, bytes(32), keys)
    rig.ladder.purge(Target(namespace=rig.space.fingerprint, keys=keys[2 * HASH_BYTES :]))
    assert rig.length(keys) == 2
    rig.tick(4 * DAY)


def test_what_shared_a_frame_on_ssd_with_what_was_meant_is_told() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig = reopened(rig)
    assert rig.match(keys[: 2 * 32], load=False, retention_class="agent").blocks == 2
    purge = rig.ladder.purge(Target(retention_class="batch"))
    assert (purge.amount.blocks, purge.also_blocks) == (4, 2)
    assert rig.length(keys) == 0
