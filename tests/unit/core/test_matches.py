"""Leases, loads, boundaries, reasons, expiry and eviction."""

from __future__ import annotations

import dataclasses

import pytest

from kvstore import hashing
from kvstore.api import MatchRequest, PartBlocks, Progress, TierRun
from kvstore.core.limits import Limits
from kvstore.errors import InvalidArgument, LeaseExpired, Overloaded, ShuttingDown
from kvstore.types import BlockHash, MatchMode, MissReason, PutOutcome, ReleaseOutcome, Tier
from tests.support.driver import check_extents, namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig


def stored(blocks: int = 8, **rig_fields: object) -> tuple[Rig, bytes]:
    rig = Rig(**rig_fields)  # type: ignore[arg-type]
    keys = rig.keys(blocks)
    put(rig.ladder, rig.space, rig.root, keys)
    return rig, keys


def reopened(rig: Rig, **rig_fields: object) -> Rig:
    return Rig(disk=rig.disk, space=rig.space, **rig_fields)  # type: ignore[arg-type]


def test_a_probe_leaves_no_trace() -> None:
    rig, keys = stored()
    before = dict(rig.events.counters())
    answer = rig.match(keys, mode=MatchMode.PROBE)
    assert (answer.blocks, answer.lease, answer.ready) == (8, 0, True)
    assert dict(rig.events.counters()) == before and rig.ladder.gauges()["kvstore_leases"] == 0


def test_bitmap_of_a_chain_is_its_visible_prefix() -> None:
    rig, keys = stored(10)
    answer = rig.match(keys[: 9 * 32] + b"z" * 64, mode=MatchMode.BITMAP)
    assert answer.bitmap == bytes([0xFF, 0x01])


def test_hits_are_counted_on_delivery_by_tier_and_class() -> None:
    rig, keys = stored()
    lease = rig.match(keys, retention_class="chat").lease
    assert rig.events.total("kvstore_hit_tokens_total") == 0
    rig.ladder.release(lease, used=5)
    assert rig.events.counters()[("kvstore_hit_tokens_total", (("class", "chat"), ("tier", "host")))] == 5 * 4
    assert rig.events.total("kvstore_lookup_tokens_total") == 8 * 4


def test_an_expired_lease_counts_nothing_and_holds_nothing() -> None:
    rig, keys = stored()
    lease = rig.match(keys, lease_seconds=10.0).lease
    rig.tick(10.0)
    assert rig.ladder.gauges()["kvstore_leases"] == 0
    assert not rig.ladder.release(lease, used=8)
    assert rig.events.total("kvstore_hit_tokens_total") == 0
    with pytest.raises(LeaseExpired):
        rig.ladder.watch(lease)


def test_renew_moves_the_deadline_and_never_beyond_a_minute() -> None:
    rig, keys = stored()
    lease = rig.match(keys, lease_seconds=10.0).lease
    assert rig.ladder.renew([lease, 99], lease_seconds=3600.0) == (99,)
    rig.tick(59.0)
    assert rig.ladder.gauges()["kvstore_leases"] == 1
    rig.tick(2.0)
    assert rig.ladder.gauges()["kvstore_leases"] == 0


def test_a_gone_client_holds_nothing() -> None:
    rig, keys = stored()
    rig.match(keys, session=3)
    rig.match(keys, session=4)
    rig.ladder.end_session(3)
    assert rig.ladder.gauges()["kvstore_leases"] == 1


def test_a_match_is_frozen_for_its_owner() -> None:
    rig = Rig()
    keys = rig.keys(8)
    put(rig.ladder, rig.space, rig.root, keys[: 4 * 32])
    first = rig.match(keys, owner="request-1")
    put(rig.ladder, rig.space, rig.root, keys)
    assert rig.match(keys, owner="request-1").blocks == first.blocks == 4
    assert rig.match(keys, owner="request-2").blocks == 8


def test_blocks_on_ssd_are_loaded_under_the_lease() -> None:
    rig = reopened(stored(20)[0], manual=True, limits=Limits(load_bytes=4 * 4096))
    keys = rig.keys(20)
    news: list[Progress] = []
    answer = rig.ladder.match(MatchRequest(namespace=rig.space.fingerprint, keys=keys), news.append)
    assert (answer.blocks, answer.ready, answer.tiers) == (20, False, (TierRun(Tier.SSD, 20),))
    rig.tier.run(2)
    assert [p.done for p in news] == [False, False]
    assert sum(e.count for p in news for e in p.extents) == 8
    rig.tier.run()
    assert news[-1].done and news[-1].blocks == 20
    compared = [check_extents(rig.ladder, rig.space, keys, p.extents) for p in news]
    assert sum(compared) == 20


def test_many_readers_of_a_run_are_one_read() -> None:
    rig = reopened(stored(8)[0], manual=True)
    keys = rig.keys(8)
    leases = [rig.match(keys).lease for _ in range(10)]
    assert rig.tier.run() == 1
    for lease in leases:
        progress, _ = rig.fetch(lease)
        assert progress.done and check_extents(rig.ladder, rig.space, keys, progress.extents) == 8


def test_a_prefetch_waits_behind_fetches_and_can_be_cancelled() -> None:
    limits = Limits(load_bytes=4096, loads_in_flight_max=1)
    rig = reopened(stored(8)[0], manual=True, limits=limits)
    keys = rig.keys(8)
    answer = rig.ladder.prefetch(rig.space.fingerprint, keys, deadline_seconds=5.0)
    assert (answer.blocks, answer.resident, answer.loading) == (8, 0, 8)
    assert rig.ladder.gauges()["kvstore_loads_queued"] == 7
    assert rig.ladder.cancel(answer.prefetch) and not rig.ladder.cancel(answer.prefetch)
    assert rig.ladder.gauges()["kvstore_loads_queued"] == 0
    rig.tier.run()
    assert rig.match(keys).tiers[0] == TierRun(Tier.HOST, 1)
    check_integrity(rig.ladder)


def test_a_prefetch_ends_with_its_deadline() -> None:
    rig = reopened(stored(8)[0], manual=True, limits=Limits(load_bytes=4096, loads_in_flight_max=1))
    rig.ladder.prefetch(rig.space.fingerprint, rig.keys(8), deadline_seconds=5.0)
    rig.tick(5.0)
    assert rig.ladder.gauges()["kvstore_loads_queued"] == 0 and rig.ladder.gauges()["kvstore_prefetches"] == 0


def test_a_rotten_record_shortens_the_prefix_and_is_dropped() -> None:
    rig, keys = stored(8)
    (frame,) = rig.disk.frames.values()
    payload, digest = frame.records[0][5]
    frame.records[0][5] = (b"!" + payload[1:], digest)
    again = reopened(rig)
    answer = again.match(keys)
    progress, _ = again.fetch(answer.lease)
    assert (progress.done, progress.blocks, progress.reason) == (True, 5, MissReason.CORRUPT)
    assert check_extents(again.ladder, again.space, keys, progress.extents) == 5
    again.ladder.release(answer.lease, used=5)
    check_integrity(again.ladder)
    later = again.match(keys)
    assert (later.blocks, later.reason) == (5, MissReason.CORRUPT)


def test_a_reader_that_finds_host_bytes_bad_gets_the_disk_copy_next_time() -> None:
    rig, keys = stored(8)
    answer = rig.match(keys)
    slot = int(answer.extents[0].slots[3])
    rig.memory.data[slot * 4096] ^= 0xFF
    rig.ladder.release(answer.lease, used=3, outcome=ReleaseOutcome.CORRUPT)
    assert rig.events.total("kvstore_corrupt_total", tier="host") == 1
    again = rig.match(keys)
    assert again.tiers == (TierRun(Tier.HOST, 3), TierRun(Tier.SSD, 1), TierRun(Tier.HOST, 4))
    progress, _ = rig.fetch(again.lease)
    assert check_extents(rig.ladder, rig.space, keys, progress.extents) == 8


def test_reasons_tell_why() -> None:
    rig = Rig(pages=64, ssd=False)
    old, young = rig.keys(40, salt=1), rig.keys(40, salt=2)
    assert rig.match(old).reason is MissReason.NEVER_STORED
    put(rig.ladder, rig.space, rig.root, old)
    put(rig.ladder, rig.space, rig.root, young, retention_class="swa")
    found = rig.match(old)
    assert (found.blocks, found.reason) == (24, MissReason.EVICTED)
    rig.ladder.release(found.lease, used=0)
    rig.tick(181.0)
    assert rig.match(young).reason is MissReason.EXPIRED
    rig.ladder.delete(rig.space.fingerprint, old[:32])
    assert rig.match(old).reason is MissReason.DELETED
    check_integrity(rig.ladder)


def test_a_namespace_that_differs_from_a_filled_sibling_says_so() -> None:
    rig, _ = stored()
    other = namespace(bytes_max=602)
    other = dataclasses.replace(other, weights="other weights")
    root = hashing.chain_root(other.fingerprint)
    answer = rig.ladder.open(other, root=root)
    assert "weights: stored 'w', offered 'other weights'" in answer.siblings[0]
    rig.space = other
    assert (
        rig.match(hashing.block_hashes(root, [1, 2, 3, 4], block_tokens=4)).reason
        is MissReason.IDENTITY_MISMATCH
    )


def test_expiry_hides_and_a_new_put_of_the_parent_brings_the_child_back() -> None:
    rig = Rig()
    keys = rig.keys(8)
    put(rig.ladder, rig.space, rig.root, keys[: 4 * 32], retention_class="batch")
    put(rig.ladder, rig.space, BlockHash(keys[3 * 32 : 4 * 32]), keys[4 * 32 :], retention_class="chat")
    assert rig.length(keys) == 8
    rig.tick(3601.0)
    assert rig.length(keys) == 8, "the child's class holds its ancestors too"


def test_a_fixed_life_is_not_renewed_by_what_is_put_behind_it() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys[:64], retention_class="handoff")
    rig.tick(40.0)
    put(rig.ladder, rig.space, BlockHash(keys[32:64]), keys[64:], retention_class="handoff")
    rig.tick(25.0)
    assert rig.length(keys) == 0
    assert rig.match(keys).reason is MissReason.EXPIRED


def test_eviction_leaves_the_leaves_first() -> None:
    rig = Rig(pages=64, ssd=False)
    trunk = rig.keys(20)
    put(rig.ladder, rig.space, rig.root, trunk)
    branches = [
        trunk + hashing.block_hashes(BlockHash(trunk[-32:]), [b] * 40, block_tokens=4) for b in range(6)
    ]
    for branch in branches:
        put(rig.ladder, rig.space, rig.root, branch)
        check_integrity(rig.ladder)
    assert rig.length(branches[-1]) == 30
    assert rig.length(branches[0]) == 20, "the trunk outlives its branches"
    assert not rig.ladder._catalog.namespaces[rig.space.fingerprint].runs.orphans


def test_a_second_model_gets_room() -> None:
    rig = Rig(pages=256, ssd=False)
    put(rig.ladder, rig.space, rig.root, rig.keys(256))
    other = dataclasses.replace(namespace(bytes_max=9000), model="other")
    root = hashing.chain_root(other.fingerprint)
    rig.ladder.open(other, root=root)
    keys = hashing.block_hashes(root, list(range(80)), block_tokens=4)
    answer = put(rig.ladder, other, root, keys)
    assert (
        answer is not None and answer.outcomes[0].count == 20 and answer.outcomes[0].outcome == "stored_host"
    )
    check_integrity(rig.ladder)


def test_a_second_model_gets_a_slab_though_every_slab_is_half_full() -> None:
    """Recency alone would free slots here and there, and no slab until nothing of the first model is left."""
    rig = Rig(pages=256, ssd=False)
    runs = [rig.keys(2, salt=salt) for salt in range(128)]
    for keys in runs:
        put(rig.ladder, rig.space, rig.root, keys)
    for keys in runs[::2]:
        rig.ladder.release(rig.match(keys).lease, used=2)
    other = dataclasses.replace(namespace(bytes_max=9000), model="other")
    root = hashing.chain_root(other.fingerprint)
    rig.ladder.open(other, root=root)
    answer = put(rig.ladder, other, root, hashing.block_hashes(root, list(range(4)), block_tokens=4))
    assert answer is not None
    assert answer.outcomes[0].outcome is PutOutcome.STORED_HOST
    assert sum(rig.length(keys) for keys in runs) > 240
    check_integrity(rig.ladder)


def test_leased_blocks_are_never_evicted() -> None:
    rig = Rig(pages=64, ssd=False)
    keys = rig.keys(40)
    put(rig.ladder, rig.space, rig.root, keys)
    answer = rig.match(keys)
    put(rig.ladder, rig.space, rig.root, rig.keys(64, salt=5))
    assert check_extents(rig.ladder, rig.space, keys, answer.extents) == 40
    assert rig.length(keys) == 40


@pytest.mark.parametrize("kind", ["trailing_blocks", "checkpoint"])
def test_boundaries_need_their_side_parts(kind: str) -> None:
    rig = Rig(space=namespace(side=kind))
    keys = rig.keys(10)
    put(rig.ladder, rig.space, rig.root, keys)
    bare = rig.match(keys)
    assert (bare.blocks, bare.boundaries, bare.reason) == (10, (), MissReason.PART_MISSING)
    rig.ladder.release(bare.lease, used=0)
    put(rig.ladder, rig.space, rig.root, keys, parts=(PartBlocks(1, 5, 2),), retention_class="swa")
    expected = (7,) if kind == "trailing_blocks" else (7, 6)
    answer = rig.match(keys)
    assert (answer.blocks, answer.boundaries) == (10, expected)
    side = [e for e in answer.extents if e.part == 1]
    assert sum(e.count for e in side) == (2 if kind == "trailing_blocks" else 1)
    check_extents(rig.ladder, rig.space, keys, answer.extents)
    rig.ladder.release(answer.lease, used=7)
    rig.tick(400.0)
    assert rig.match(keys).boundaries == ()


def test_side_parts_survive_a_restart_when_their_class_does() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys)
    put(rig.ladder, rig.space, rig.root, keys, parts=(PartBlocks(1, 3, 1),))
    again = reopened(rig)
    answer = again.match(keys)
    assert answer.boundaries == (4,)
    progress, _ = again.fetch(answer.lease)
    assert check_extents(again.ladder, again.space, keys, progress.extents) == 5


def test_approximate_blocks_are_left_out_on_request() -> None:
    from kvstore.api import CommitRequest, ReserveRequest
    from tests.support.driver import fill

    rig = Rig()
    keys = rig.keys(2)
    request = ReserveRequest(namespace=rig.space.fingerprint, parent=rig.root, keys=keys, provenance=640)
    answer = rig.ladder.reserve(request)
    filled = tuple(fill(rig.ladder, rig.space, keys, e) for e in answer.extents)
    rig.ladder.commit(CommitRequest(reservation=answer.reservation, blocks=2, parts=filled))
    assert rig.match(keys).blocks == 2 and rig.match(keys, exact_only=True).blocks == 0


def test_a_clock_that_jumps_neither_empties_nor_immortalises_the_store() -> None:
    rig, keys = stored()
    rig.clock.jump_wall(365 * 86400.0)
    rig.tick(1.0)
    assert rig.length(keys) == 8
    rig.clock.jump_wall(-2 * 365 * 86400.0)
    for _ in range(8):
        rig.tick(12 * 3600.0)
    assert rig.length(keys) == 0


def test_inspect_finds_a_prompt_after_a_restart_before_any_client_comes() -> None:
    rig, keys = stored(8)
    again = reopened(rig, declares_root=False)
    runs, visible, reason = again.ladder.inspect(again.space.fingerprint, keys=keys)
    assert (len(runs), visible, reason) == (1, 8, None)
    assert again.length(keys) == 0, "a match still needs the root that a client declares"


def test_list_pages_through_all_runs() -> None:
    rig = Rig()
    for salt in range(5):
        put(rig.ladder, rig.space, rig.root, rig.keys(2, salt=salt))
    seen, cursor = 0, ""
    while True:
        page = rig.ladder.list(rig.space.fingerprint, cursor=cursor, limit=2)
        seen += len(page.runs)
        cursor = page.cursor
        if not cursor:
            break
    assert seen == 5


def test_delete_takes_descendants_along_and_the_disk_forgets_too() -> None:
    rig, keys = stored(8)
    assert rig.ladder.delete(rig.space.fingerprint, keys[5 * 32 : 6 * 32]) == 3
    assert rig.length(keys) == 5
    assert rig.ladder.delete(rig.space.fingerprint, None) == 5
    assert not rig.disk.frames and rig.ladder.gauges()["kvstore_host_used_bytes"] == 0


def test_ssd_capacity_evicts_whole_segments_and_their_descendants() -> None:
    rig = Rig(pages=2048, limits=Limits(ssd_capacity_bytes=10 * 4096))
    for salt in range(30):
        put(rig.ladder, rig.space, rig.root, rig.keys(3, salt=salt))
        check_integrity(rig.ladder)
    assert rig.ladder.gauges()["kvstore_ssd_used_bytes"] <= 10 * 4096
    again = reopened(rig)
    assert 0 < sum(again.length(again.keys(3, salt=s)) for s in range(30)) < 90


@pytest.mark.parametrize(
    ("fields", "message"), [({"keys": b""}, "1..65536 keys"), ({"lease_seconds": 0.0}, "positive")]
)
def test_bad_matches_are_refused(fields: dict[str, object], message: str) -> None:
    rig, keys = stored()
    with pytest.raises(InvalidArgument, match=message):
        rig.match(**{"keys": keys, **fields})  # type: ignore[arg-type]


def test_limits_are_answers() -> None:
    rig, keys = stored(limits=Limits(leases_max=2))
    rig.match(keys)
    rig.match(keys)
    with pytest.raises(Overloaded, match="limit is 2"):
        rig.match(keys)


def test_a_draining_store_admits_nothing() -> None:
    rig, keys = stored()
    assert rig.ladder.drain(deadline_seconds=1.0)
    with pytest.raises(ShuttingDown):
        rig.match(keys)


def test_verify_finds_bad_bytes_in_both_tiers() -> None:
    rig, keys = stored(6)
    rig.memory.data[int(rig.match(keys).extents[0].slots[1]) * 4096] ^= 1
    (frame,) = rig.disk.frames.values()
    payload, digest = frame.records[0][4]
    frame.records[0][4] = (payload[:-1] + b"?", digest)
    steps = list(rig.ladder.verify())
    faults = [fault for step in steps for fault in step.faults]
    assert {(f.tier, f.key) for f in faults} == {(Tier.HOST, keys[32:64]), (Tier.SSD, keys[4 * 32 : 5 * 32])}
