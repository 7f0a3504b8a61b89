"""Frames asleep: what a start keeps of them, what wakes them, and how those in use no more fall asleep."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvstore.api import CommitAnswer
from kvstore.core.limits import Limits
from kvstore.core.sleepers import RunsAsleep
from kvstore.core.tags import TagMap, tag_of
from kvstore.types import AckTier, MissReason, PutOutcome
from tests.support.driver import put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig
from tests.unit.core.test_removal import reopened

DAY = 86400.0


def again(rig: Rig) -> Rig:
    """Start anew at the same time."""
    rig.ladder.close(deadline_seconds=0.0)
    return Rig(disk=rig.disk, space=rig.space, clock=rig.clock)


def asleep(rig: Rig) -> int:
    return int(rig.ladder.gauges()["kvstore_frames_asleep"])


def awake(rig: Rig) -> int:
    return int(rig.ladder.gauges()["kvstore_nodes"])


def use(rig: Rig, keys: bytes) -> None:
    answer = rig.match(keys)
    assert answer.blocks == len(keys) // 32
    rig.ladder.release(answer.lease, used=answer.blocks)


def test_a_start_wakes_nothing_and_a_match_wakes_its_own_path() -> None:
    rig = Rig()
    first, second, other = rig.keys(8), rig.keys(12), rig.keys(3, salt=1)
    for keys in (first, second, other):
        put(rig.ladder, rig.space, rig.root, keys)
    rig = reopened(rig)
    assert (asleep(rig), awake(rig)) == (3, 0)
    assert rig.length(second) == 12
    assert (asleep(rig), awake(rig)) == (1, 2)
    assert rig.length(rig.keys(3, salt=2)) == 0
    assert asleep(rig) == 1
    check_integrity(rig.ladder)


def test_a_branch_inside_of_a_frame_is_found() -> None:
    rig = Rig()
    trunk, branch = rig.chain([0, 0, 0, 0, 0, 0]), rig.chain([0, 0, 0, 1, 1])
    put(rig.ladder, rig.space, rig.root, trunk)
    put(rig.ladder, rig.space, rig.root, branch)
    rig = reopened(rig)
    assert rig.length(branch) == 5
    assert rig.length(trunk) == 6
    assert asleep(rig) == 0
    check_integrity(rig.ladder)


def test_a_put_finds_what_sleeps_of_its_blocks() -> None:
    rig = Rig()
    keys = rig.keys(8)
    put(rig.ladder, rig.space, rig.root, keys[: 4 * 32])
    rig = reopened(rig)
    frames = len(rig.disk.frames)
    put(rig.ladder, rig.space, rig.root, keys)
    assert len(rig.disk.frames) == frames + 1
    assert [len(f.header.keys) // 32 for f in rig.disk.frames.values()] == [4, 4]


def test_a_put_behind_the_end_of_a_frame_asleep_is_found() -> None:
    rig = Rig()
    keys = rig.keys(8)
    put(rig.ladder, rig.space, rig.root, keys[: 4 * 32])
    rig = reopened(rig)
    put(rig.ladder, rig.space, keys[3 * 32 : 4 * 32], keys[4 * 32 :])
    assert rig.length(keys) == 8
    check_integrity(rig.ladder)


def test_a_put_behind_a_block_inside_of_a_frame_asleep_joins_it_at_the_next_match() -> None:
    """Nothing in memory tells which frame has that block; nobody loses anything by it."""
    rig, trunk, branch = a_put_behind_a_block_that_sleeps()
    rig = again(rig)
    assert rig.length(branch) == 5, "also across a start"
    now = rig.ladder.wall()
    assert ends(rig, branch) == [now + 2 * DAY, now + 3 * DAY], "each by its own time so far"
    use(rig, branch)
    assert ends(rig, branch) == [now + 3 * DAY] * 2
    assert ends(rig, trunk) == [now + 3 * DAY, now + 2 * DAY]
    check_integrity(rig.ladder)


def test_a_put_behind_a_block_that_sleeps_expires_by_its_own_time() -> None:
    rig, _, branch = a_put_behind_a_block_that_sleeps()
    rig.tick(2 * DAY + 1.0)
    assert [run.expires_at for run in rig.ladder.list(rig.space.fingerprint).runs if run.host_blocks] == [
        rig.ladder.wall() + DAY - 1.0
    ]
    assert rig.match(branch).reason is MissReason.EXPIRED, "what it follows has ended"
    rig.tick(DAY)
    assert (asleep(rig), awake(rig), rig.disk.frames) == (0, 0, {})
    assert rig.match(branch).reason is MissReason.EXPIRED


def a_put_behind_a_block_that_sleeps() -> tuple[Rig, bytes, bytes]:
    """The trunk was put a day before the branch, and has slept since a start."""
    rig = Rig()
    trunk, branch = rig.chain([0, 0, 0, 0, 0, 0]), rig.chain([0, 0, 0, 1, 1])
    put(rig.ladder, rig.space, rig.root, trunk, retention_class="agent")
    rig = again(rig)
    rig.clock.advance(DAY)
    parent, mine = branch[2 * 32 : 3 * 32], branch[3 * 32 :]
    acks: list[CommitAnswer] = []
    put(rig.ladder, rig.space, parent, mine, retention_class="agent", ack=AckTier.SSD, acks=acks)
    assert [run.outcome for answer in acks for run in answer.outcomes] == [PutOutcome.STORED_SSD]
    assert (asleep(rig), awake(rig)) == (1, 1), "it waits for what it follows"
    return rig, trunk, branch


def ends(rig: Rig, keys: bytes) -> list[float]:
    return [run.expires_at for run in rig.ladder.inspect(rig.space.fingerprint, keys=keys)[0]]


def test_a_put_of_blocks_inside_of_a_frame_asleep_stores_them_twice_until_the_next_match() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys)
    rig = again(rig)
    rig.clock.advance(1.0)
    put(rig.ladder, rig.space, keys[32 : 2 * 32], keys[2 * 32 : 5 * 32])
    assert (asleep(rig), awake(rig)) == (1, 1)
    assert rig.length(keys) == 6
    assert asleep(rig) == 0
    check_integrity(rig.ladder)
    (namespace,) = rig.ladder.status().namespaces
    assert namespace["blocks"] == 6


def test_what_nobody_asked_for_in_a_while_falls_asleep_with_its_life() -> None:
    rig = Rig(pages=64)
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="agent")
    rig.tick(DAY)
    use(rig, keys[: 4 * 32])
    before = ends(rig, keys)
    for salt in range(1, 30):  # out of host memory with it
        put(rig.ladder, rig.space, rig.root, rig.keys(6, salt=salt), retention_class="handoff")
    assert asleep(rig) == 0
    for _ in range(4):
        rig.tick(601.0)
    assert asleep(rig) >= 1
    assert rig.length(keys) == 6
    assert ends(rig, keys) == before
    rig.tick(1.0)
    assert rig.length(keys) == 6, "it has just woken: it stays awake"


def test_a_frame_that_falls_asleep_again_has_its_row_again() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys)
    rig = again(rig)
    (segment,) = rig.ladder.catalog.segments
    for _ in range(3):
        assert rig.length(keys) == 6
        assert asleep(rig) == 0
        for _ in range(2):
            rig.tick(601.0)
        assert asleep(rig) == 1
    assert (len(segment.bed.rows), len(segment.bed.held), len(segment.bed.marks)) == (1, 1, 6)
    check_integrity(rig.ladder)


def test_frames_asleep_expire_and_the_ledger_says_so() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig = again(rig)
    assert asleep(rig) == 1
    for _ in range(8):
        rig.tick(3600.0)
    assert asleep(rig) == 0
    assert not rig.disk.frames
    assert rig.match(keys).reason is MissReason.EXPIRED
    ((_, reason, departed),) = rig.ladder.departed(keys[:8])
    assert reason is MissReason.EXPIRED
    assert departed is not None and departed.retention_class == "batch"


def test_a_delete_reaches_what_sleeps_behind_a_block_and_copies_of_it() -> None:
    rig = Rig()
    keys = rig.keys(12)
    for end in (4, 8, 12):
        put(rig.ladder, rig.space, rig.root, keys[: end * 32])
    rig = reopened(rig)
    left = rig.ladder.delete(rig.space.fingerprint, keys[5 * 32 : 6 * 32])
    assert left == 8, "one shared a frame with those that were meant"
    assert rig.length(keys) == 5 or rig.length(keys) == 4
    rig = reopened(rig)
    assert rig.length(keys) == 4, "a frame goes as a whole where it is on SSD alone"


def test_who_looks_does_not_wake() -> None:
    rig = Rig()
    runs = [rig.keys(3, salt=salt) for salt in range(5)]
    for keys in runs:
        put(rig.ladder, rig.space, rig.root, keys)
    rig = reopened(rig)
    space = rig.space.fingerprint
    page = rig.ladder.list(space, limit=3)
    rest = rig.ladder.list(space, cursor=page.cursor, limit=3)
    assert sorted(run.keys for run in (*page.runs, *rest.runs)) == sorted(runs)
    (found,), _, _ = rig.ladder.inspect(space, hash_prefix=runs[2][32:48])
    assert found.keys == runs[2]
    assert [run.keys for _, _, run in rig.ladder.present(runs[4][:9])] == [runs[4]]
    assert rig.ladder.status().namespaces[0]["blocks"] == 15
    assert asleep(rig) == 5


def test_a_disk_that_does_not_tell_in_time_is_a_miss_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys)
    rig = reopened(rig)
    tier: Any = rig.tier
    told, waiting = tier.headers, list[tuple[Any, Future[Any]]]()

    def late(frames: Any) -> Future[Any]:
        waiting.append((frames, Future()))
        return waiting[-1][1]

    monkeypatch.setattr(tier, "headers", late)
    answer = rig.match(keys)
    assert (answer.blocks, answer.reason) == (0, MissReason.TIER_DOWN)
    assert rig.match(keys).reason is MissReason.TIER_DOWN
    assert len(waiting) == 1, "it is not asked again at once"
    assert Limits().wake_seconds <= 0.02
    frames, future = waiting[0]
    future.set_result(told(frames).result())
    assert rig.length(keys) == 4, "what comes late is taken"


def test_the_thread_that_never_waits_is_told_what_sleeps() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys)
    rig = reopened(rig)
    alarm = rig.ladder.alarm
    alarm.never_waits = threading.get_ident()
    with pytest.raises(RunsAsleep) as caught:
        rig.match(keys)
    woken = list[bool]()
    alarm.wake(caught.value.sleepers, caught.value.keys, lambda: woken.append(True))
    assert woken == [True]
    assert rig.length(keys) == 4


def test_a_header_that_cannot_be_read_is_asked_for_again_later() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys)
    rig = reopened(rig)
    frames = dict(rig.disk.frames)
    rig.disk.frames.clear()
    assert rig.match(keys).reason is MissReason.TIER_DOWN
    rig.disk.frames.update(frames)
    assert rig.match(keys).reason is MissReason.TIER_DOWN
    rig.tick(10.0)
    assert rig.length(keys) == 4


@pytest.mark.parametrize("seed", range(3))
def test_a_tag_map_is_a_multimap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tags = rng.integers(0, 1 << 63, 3000, dtype=np.uint64)
    tags[::7] = tags[0]
    values = np.arange(1, 3001, dtype=np.uint64)
    found = TagMap()
    found.rebuild(tags[:2000], values[:2000])
    known = list(zip(tags[:2000].tolist(), values[:2000].tolist(), strict=True))
    for tag, value in zip(tags[2000:].tolist(), values[2000:].tolist(), strict=True):
        if not found.add(tag, value):
            found.rebuild(*(np.array(column, np.uint64) for column in zip(*known, strict=True)))
            assert found.add(tag, value)
        known.append((tag, value))
    for tag in set(tags.tolist()):
        assert sorted(found.get(tag)) == sorted(v for t, v in known if t == tag)
    asked = np.concatenate((tags[5:20], rng.integers(0, 1 << 63, 9, dtype=np.uint64)))
    expected = [(at, v) for at, tag in enumerate(asked.tolist()) for t, v in known if t == tag]
    assert found.find(asked) == sorted(expected)
    assert tag_of(bytes(range(32))) == int.from_bytes(bytes(range(8)), "little")
