"""Purges: what is deleted is gone from the index, the side parts and the disk, and stays gone."""

from __future__ import annotations

from kvstore.api import CommitAnswer, OutcomeRun
from kvstore.core.limits import Limits
from kvstore.types import AckTier, MissReason, PutOutcome, ReleaseOutcome
from tests.support.driver import namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig


def reopened(rig: Rig, *, pages: int = 512, limits: Limits | None = None) -> Rig:
    rig.ladder.close(deadline_seconds=0.0)
    return Rig(disk=rig.disk, space=rig.space, pages=pages, limits=limits)


def spoil(rig: Rig, block: bytes) -> None:
    """Flip a byte of a block on the disk."""
    for stored in rig.disk.frames.values():
        at = stored.header.keys.find(block)
        if at >= 0:
            data, digest = stored.records[0][at // 32]
            stored.records[0][at // 32] = (bytes([data[0] ^ 1]) + data[1:], digest)


def test_side_parts_go_with_their_blocks() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys, with_side=True)
    rig.ladder.delete(rig.space.fingerprint, keys[64:96])
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 2 * 2 * 4096
    again = reopened(rig)
    page = again.ladder.list(rig.space.fingerprint, limit=100)
    assert all(keys[64:96] not in run.keys for run in page.runs)


def test_orphans_go_too_when_what_they_follow_is_gone_already() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys[:64], retention_class="handoff")
    put(rig.ladder, rig.space, keys[32:64], keys[64:])
    catalog = rig.ladder._catalog
    node = catalog.namespaces[rig.space.fingerprint].runs.find(keys[32:64])
    assert node is not None
    catalog.drop(node, node.count - 1, MissReason.EXPIRED)
    assert rig.ladder.delete(rig.space.fingerprint, keys[32:64]) == 2
    put(rig.ladder, rig.space, keys[:32], keys[32:64])
    assert rig.length(keys) == 2
    assert not [frame for frame in rig.disk.frames.values() if keys[96:] in frame.header.keys]


def test_what_left_the_index_before_is_deleted_from_the_disk() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys)
    spoil(rig, keys[96:128])
    rig = reopened(rig)
    lease = rig.match(keys).lease
    rig.ladder.release(lease, used=0, outcome=ReleaseOutcome.UNUSED)
    assert rig.length(keys) == 3
    rig.ladder.delete(rig.space.fingerprint, keys[128:160])
    assert reopened(rig).length(keys) <= 3
    assert not [frame for frame in rig.disk.frames.values() if keys[128:160] in frame.header.keys]


def purge(rig: Rig, keys: bytes | None) -> list[tuple[int, bool]]:
    """Delete; returns what is heard of it, now or later."""
    heard: list[tuple[int, bool]] = []
    rig.ladder.delete(rig.space.fingerprint, keys, lambda count, durable: heard.append((count, durable)))
    return heard


def crashed(rig: Rig) -> Rig:
    """What a start finds after everything but the disk is gone."""
    return Rig(disk=rig.disk, space=rig.space)


def test_a_purge_is_answered_when_a_write_under_way_has_come_to_its_grave() -> None:
    rig = Rig(manual=True)
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys)
    heard = purge(rig, keys[:32])
    assert (rig.length(keys), heard) == (0, [])
    other = purge(rig, rig.keys(1, salt=5))
    rig.tier.run()
    assert (heard, other) == ([(3, True)], [(0, True)])
    assert not rig.disk.frames


def test_a_purge_waits_also_for_what_left_before_it() -> None:
    rig = Rig(manual=True)
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys)
    assert rig.ladder.delete(rig.space.fingerprint, keys[64:]) == 1
    heard = purge(rig, keys[64:])
    assert heard == []
    rig.tier.run()
    assert heard == [(0, True)]
    rig.tier.run()
    assert crashed(rig).length(keys) == 2


def test_what_still_waits_for_the_disk_is_never_written() -> None:
    rig = Rig(manual=True, limits=Limits(write_queue_bytes_max=1))
    first, second = rig.keys(1, salt=1), rig.keys(4, salt=2)
    put(rig.ladder, rig.space, rig.root, first)
    put(rig.ladder, rig.space, rig.root, second)
    lease = rig.match(second).lease
    heard = purge(rig, second[64:])
    assert heard == [(2, True)]
    for _ in range(4):
        rig.tier.run()
    assert rig.disk.next_offset == 1, "a lease holds the frame: what is left of it waits"
    rig.ladder.release(lease, used=0)
    rig.tick(6.0)
    rig.tier.run()
    assert (crashed(rig).length(first), crashed(rig).length(second)) == (1, 2)


def test_a_purge_that_the_disk_refuses_says_so_and_is_tried_again() -> None:
    rig = Rig()
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys)
    rig.tier.refuse_deletes = "read-only"
    assert purge(rig, keys[:32]) == [(3, False)]
    assert purge(rig, keys[:32]) == [(0, False)]
    rig.tick(6.0)
    assert len(rig.disk.frames) == 1
    assert rig.ladder.gauges()["kvstore_deletions_pending"] >= 1
    rig.tier.refuse_deletes = ""
    assert purge(rig, keys[:32]) == [(0, True)]
    assert not rig.disk.frames
    rig.tick(6.0)
    assert rig.ladder.gauges()["kvstore_deletions_pending"] == 0


def test_what_the_disk_refused_to_delete_is_deleted_later() -> None:
    rig = Rig()
    put(rig.ladder, rig.space, rig.root, rig.keys(3))
    rig.tier.refuse_deletes = "read-only"
    rig.ladder.delete(rig.space.fingerprint, None)
    rig.tier.refuse_deletes = ""
    rig.tick(6.0)
    assert not rig.disk.frames


def test_a_purge_waits_no_longer_than_the_limit() -> None:
    rig = Rig(manual=True, limits=Limits(write_seconds_max=3.0))
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys)
    heard = purge(rig, None)
    rig.tick(2.0)
    assert heard == []
    rig.tick(1.5)
    assert heard == [(3, False)]
    rig.tier.run()
    assert purge(rig, None) == [(0, True)]


def test_without_a_disk_a_purge_is_over_at_once() -> None:
    rig = Rig(ssd=False)
    put(rig.ladder, rig.space, rig.root, rig.keys(3))
    assert purge(rig, None) == [(3, True)]


def test_neighbours_of_what_was_deleted_are_written_again() -> None:
    rig = Rig()
    keys = rig.keys(4)
    acks: list[CommitAnswer] = []
    put(rig.ladder, rig.space, rig.root, keys, ack=AckTier.SSD, acks=acks)
    assert acks[0].outcomes == (OutcomeRun(PutOutcome.STORED_SSD, 4),)
    assert rig.ladder.delete(rig.space.fingerprint, keys[64:]) == 2
    assert reopened(rig).length(keys) == 2


def test_all_that_left_is_counted() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys)
    put(rig.ladder, rig.space, keys[32:64], rig.keys(4, salt=1)[64:])
    rig.ladder.release(rig.match(keys[:96]).lease, used=1)
    rig = reopened(rig)
    assert rig.ladder.delete(rig.space.fingerprint, None) == 6
    check_integrity(rig.ladder)


def test_pages_show_side_parts_that_start_like_their_run() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    for salt in range(4):
        put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=salt), with_side=True)
    seen, cursor = 0, ""
    while True:
        page = rig.ladder.list(rig.space.fingerprint, cursor=cursor, limit=1)
        seen, cursor = seen + len(page.runs), page.cursor
        if not cursor:
            break
    assert seen == 8


def test_blocks_evicted_before_they_were_written_are_not_acknowledged_as_durable() -> None:
    rig = Rig(pages=64, manual=True, limits=Limits(write_queue_bytes_max=1))
    rig.tier.manual = True
    first = rig.keys(2, salt=1)
    put(rig.ladder, rig.space, rig.root, first)
    acks: list[CommitAnswer] = []
    keys = rig.keys(10, salt=2)
    put(rig.ladder, rig.space, rig.root, keys, ack=AckTier.SSD, acks=acks)
    put(rig.ladder, rig.space, rig.root, rig.keys(56, salt=3))
    rig.tier.run()
    assert rig.length(keys) < 10
    assert acks[0].outcomes == (OutcomeRun(PutOutcome.STORED_HOST, 10),)
