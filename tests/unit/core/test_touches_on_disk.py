"""What a restart knows of touches: of each block, also when runs that share a frame live differently."""

from __future__ import annotations

from dataclasses import replace

from kvstore.tiers.base import SLICES_MAX, SliceTouch
from kvstore.types import HASH_BYTES, MatchMode
from tests.support.driver import put
from tests.unit.core.rig import Rig

HOUR = 3600.0


def reopened(rig: Rig) -> Rig:
    """Restart without loss; time goes on."""
    rig.ladder.close(deadline_seconds=0.0)
    return Rig(disk=rig.disk, space=rig.space, clock=rig.clock)


def touched(rig: Rig, keys: bytes, blocks: int, *, by: str = "") -> None:
    answer = rig.match(keys[: blocks * HASH_BYTES], retention_class=by)
    rig.ladder.release(answer.lease, used=answer.blocks)


def test_a_living_head_outlives_the_tail_that_it_was_written_with() -> None:
    rig = Rig()
    keys = rig.keys(9)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig.clock.advance(0.9 * HOUR)
    touched(rig, keys, 4)
    rig = reopened(rig)
    assert rig.length(keys) == 9
    rig.clock.advance(0.5 * HOUR)
    assert rig.length(keys) == 4, "the head lives on, the tail has ended"
    rig.clock.advance(0.5 * HOUR)
    assert rig.length(keys) == 0


def test_every_boundary_of_a_frame_is_known_after_a_restart() -> None:
    rig = Rig()
    keys = rig.keys(SLICES_MAX)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    for blocks in range(SLICES_MAX, 0, -1):
        rig.clock.advance(60.0)
        touched(rig, keys, blocks)
    before = ends(rig, keys)
    assert len(set(before)) == SLICES_MAX
    assert ends(reopened(rig), keys) == before


def test_more_boundaries_than_a_note_has_room_for_forget_early_but_never_late() -> None:
    rig = Rig()
    keys = rig.keys(3 * SLICES_MAX)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    for blocks in range(3 * SLICES_MAX, 0, -1):
        rig.clock.advance(10.0)
        touched(rig, keys, blocks)
    before = ends(rig, keys)
    (stored,) = rig.disk.frames.values()
    assert len(stored.touches) == SLICES_MAX
    after = ends(reopened(rig), keys)
    assert all(late <= early for late, early in zip(after, before, strict=True))
    assert sum(before) - sum(after) <= 10.0 * len(before) * 2, "neighbours that differ least were merged"


def test_a_restart_keeps_the_class_of_each_part_of_a_frame() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    touched(rig, keys, 2, by="chat")
    rig = reopened(rig)
    runs, _, _ = rig.ladder.inspect(rig.space.fingerprint, keys=keys)
    found = [(len(run.keys) // HASH_BYTES, run.retention_class) for run in runs]
    assert found == [(2, "chat"), (4, "batch")]


def test_a_touch_from_the_future_in_one_slice_is_taken_back_for_good() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    (stored,) = rig.disk.frames.values()
    now = rig.clock.wall()
    stored.touches = (SliceTouch(0, 2, "batch", now + 1e6), SliceTouch(2, 2, "batch", now))
    rig = reopened(rig)
    assert ends(rig, keys) == [now + HOUR] * 4
    (stored,) = rig.disk.frames.values()
    assert max(touch.touched_at for touch in stored.touches) == now


def test_of_two_copies_of_one_put_the_longer_life_counts() -> None:
    """A copy was written and the touches went on to the old one when the store fell."""
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig.clock.advance(600.0)
    touched(rig, keys, 2)
    before = ends(rig, keys)
    (stored,) = rig.disk.frames.values()
    place = replace(stored.location, segment=9, offset=900)
    rig.disk.frames[(9, 900)] = replace(stored, location=place, touches=())
    rig = reopened(rig)
    assert ends(rig, keys) == before
    assert list(rig.disk.frames) == [(9, 900)], "the older copy is deleted"
    assert ends(reopened(rig), keys) == before


def ends(rig: Rig, keys: bytes) -> list[float]:
    """When each block of a chain ends."""
    found = []
    for run in rig.ladder.inspect(rig.space.fingerprint, keys=keys)[0]:
        found += [run.expires_at] * (len(run.keys) // HASH_BYTES)
    return found


def test_loose_blocks_keep_their_one_touch() -> None:
    rig = Rig()
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig.clock.advance(0.5 * HOUR)
    touched(rig, keys, 3)
    rig = reopened(rig)
    rig.clock.advance(0.7 * HOUR)
    assert rig.match(keys, mode=MatchMode.PROBE).blocks == 3
