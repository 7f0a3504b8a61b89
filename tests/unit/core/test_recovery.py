"""What a restart makes of copies, of clocks that were set back, and of bytes found bad."""

from __future__ import annotations

from kvstore.types import ReleaseOutcome
from tests.support.driver import check_extents, namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig
from tests.unit.core.test_removal import reopened, spoil


def test_of_two_copies_on_disk_the_newer_counts() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys)
    spoil(rig, keys[96:128])
    rig = reopened(rig)
    rig.ladder.release(rig.match(keys).lease, used=3)
    assert rig.length(keys) == 3
    rig.clock.advance(1.0)
    put(rig.ladder, rig.space, rig.root, keys)
    rig = reopened(rig)
    check_integrity(rig.ladder)
    lease = rig.match(keys).lease
    progress, _ = rig.fetch(lease)
    assert (progress.blocks, progress.reason) == (6, None)
    assert check_extents(rig.ladder, rig.space, keys, progress.extents) == 6


def test_of_two_copies_the_newer_counts_though_the_clock_was_set_back_between_them() -> None:
    rig = Rig()
    keys = rig.keys(6)
    rig.clock.advance(1000.0)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="agent")
    spoil(rig, keys[96:128])
    for expected in (3, 6):
        rig = reopened(rig)
        assert rig.length(keys) == 6
        progress, _ = rig.fetch(rig.match(keys).lease)
        assert progress.blocks == expected
        put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig = reopened(rig)
    now = rig.clock.wall()
    runs, _, _ = rig.ladder.inspect(rig.space.fingerprint, keys=keys)
    assert [run.expires_at - now for run in runs][-1] == 3600.0


def test_of_the_runs_that_share_a_frame_the_one_that_ends_first_speaks_for_it() -> None:
    rig = Rig()
    keys, day = rig.keys(3), 86400.0
    put(rig.ladder, rig.space, rig.root, keys, retention_class="chat")
    rig.tick(5 * day)
    rig.ladder.touch(rig.space.fingerprint, keys[:32], retention_class="agent")
    rig.tick(1 * day)
    rig.ladder.touch(rig.space.fingerprint, keys)
    rig.ladder.close(deadline_seconds=0.0)
    again = Rig(disk=rig.disk, space=rig.space, clock=rig.clock)
    assert again.length(keys) == 3
    again.tick(3 * day)
    assert again.length(keys) == 0, "the first block was held by agent, for three days"


def test_of_two_copies_of_a_side_part_the_newer_counts() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys = rig.keys(2)
    put(rig.ladder, rig.space, rig.root, keys, with_side=True)
    for stored in rig.disk.frames.values():
        if len(stored.header.parts) == 1 and stored.header.parts[0].index == 1:
            data, digest = stored.records[0][1]
            stored.records[0][1] = (bytes([data[0] ^ 1]) + data[1:], digest)
    rig = reopened(rig)
    rig.ladder.release(rig.match(keys).lease, used=1)
    assert rig.match(keys).boundaries == (1,)
    rig.clock.advance(1.0)
    put(rig.ladder, rig.space, rig.root, keys, with_side=True)
    rig = reopened(rig)
    check_integrity(rig.ladder)
    found = rig.match(keys)
    assert found.boundaries == (2, 1)
    progress, _ = rig.fetch(found.lease)
    assert (progress.blocks, progress.reason) == (2, None)


def test_a_touch_from_the_future_is_not_renewed_by_each_restart() -> None:
    rig = Rig()
    keys = rig.keys(2)
    rig.clock.advance(1000.0)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig = reopened(rig)
    (run,), _, _ = rig.ladder.inspect(rig.space.fingerprint, keys=keys)
    rig.clock.advance(500.0)
    clock = rig.clock
    rig.ladder.close(deadline_seconds=0.0)
    again = Rig(disk=rig.disk, space=rig.space, clock=clock)
    (later,), _, _ = again.ladder.inspect(rig.space.fingerprint, keys=keys)
    assert later.expires_at == run.expires_at


def test_bytes_found_bad_are_read_again_though_others_hold_them() -> None:
    rig = Rig()
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys)
    other = rig.match(keys)
    mine = rig.match(keys)
    slot = int(mine.extents[0].slots[1])
    image = rig.memory.images(mine.extents[0].slots[1:2], stride_pages=1)[0]
    image[0] ^= 1
    rig.ladder.release(mine.lease, used=1, outcome=ReleaseOutcome.CORRUPT)
    check_integrity(rig.ladder)
    found = rig.match(keys)
    progress, _ = rig.fetch(found.lease)
    assert check_extents(rig.ladder, rig.space, keys, progress.extents) == 3
    assert slot not in [s for e in progress.extents for s in e.slots.tolist()]
    assert rig.memory.generations[slot] == other.extents[0].generations[1]
    rig.ladder.release(found.lease, used=3)
    rig.ladder.release(other.lease, used=3)
    check_integrity(rig.ladder)
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 3 * 4096


def test_a_lease_sees_what_was_read_again() -> None:
    rig = Rig()
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys)
    mine, other = rig.match(keys), rig.match(keys)
    rig.ladder.release(other.lease, used=1, outcome=ReleaseOutcome.CORRUPT)
    rig.fetch(mine.lease)
    progress, _ = rig.fetch(mine.lease)
    assert progress.done
    assert sum(extent.count for extent in progress.extents) == progress.blocks == 3
