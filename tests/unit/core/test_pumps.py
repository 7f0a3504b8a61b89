"""A tier that answers at once: long queues are worked off without recursion, and nothing is left behind."""

from __future__ import annotations

import pytest

from kvstore.core.limits import Limits
from kvstore.core.pumps import Turns
from kvstore.types import MissReason
from tests.support.driver import put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig
from tests.unit.core.test_removal import reopened

BLOCKS = 900


def test_a_long_queue_of_loads_that_fail_at_once_ends() -> None:
    rig = Rig(pages=2048)
    keys = rig.keys(BLOCKS)
    put(rig.ladder, rig.space, rig.root, keys)
    rig = reopened(rig, pages=2048, limits=Limits(load_bytes=1, loads_in_flight_max=1))
    assert rig.length(keys) == BLOCKS  # they are awake
    rig.disk.frames.clear()
    found = rig.match(keys)
    progress, _ = rig.fetch(found.lease)
    assert (progress.done, progress.blocks, progress.reason) == (True, 0, MissReason.TIER_DOWN)
    assert rig.ladder.gauges()["kvstore_loads_in_flight"] == 0
    check_integrity(rig.ladder)


def test_a_long_queue_of_writes_that_succeed_at_once_ends() -> None:
    rig = Rig(pages=2048, limits=Limits(write_queue_bytes_max=1), manual=True)
    for salt in range(BLOCKS):
        put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=salt))
    rig.tier.manual = False
    rig.tier.run()
    assert rig.ladder.gauges()["kvstore_write_queue_bytes"] == 0
    assert len(rig.disk.frames) == BLOCKS


def test_who_fails_does_not_keep_the_turn() -> None:
    turns, done = Turns(), list[int]()

    def fail() -> None:
        raise OSError

    with pytest.raises(OSError):
        turns.run(fail)
    turns.run(lambda: done.append(1))
    assert done == [1]
