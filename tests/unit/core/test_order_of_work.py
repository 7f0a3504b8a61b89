"""Who gets the disk first: fetches, then prefetches, then write-behind. Told by counting, not by time."""

from __future__ import annotations

from kvstore.core.limits import Limits
from kvstore.tiers.base import FrameRead, FrameWrite
from kvstore.types import key_at
from tests.support.driver import put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig
from tests.unit.core.test_matches import reopened, stored

LIMITS = Limits(load_bytes=4096, loads_in_flight_max=1, write_bytes_behind_reads=1)


def work(rig: Rig) -> list[object]:
    """Carry out all that waits, one piece at a time; returns the pieces in order."""
    done: list[object] = []
    while rig.tier._work:
        done.append(rig.tier._work[0][1])
        rig.tier.run(1)
    return done


def test_fetches_go_before_prefetches_and_those_before_write_behind() -> None:
    """A prefetch of 8 blocks waits, one is under way; then come 20 writes, then a fetch of another run."""
    rig, ahead = stored(8)
    urgent = rig.keys(6, salt=9)
    put(rig.ladder, rig.space, rig.root, urgent)
    rig = reopened(rig, manual=True, limits=LIMITS)
    rig.ladder.prefetch(rig.space.fingerprint, ahead, deadline_seconds=5.0)
    for salt in range(20, 40):
        put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=salt))
    rig.match(urgent)
    done = work(rig)
    reads = [key_at(item.keys, 0) for item in done if isinstance(item, FrameRead)]
    assert reads[0] == key_at(ahead, 0), "it was under way already"
    assert reads[1:7] == [key_at(urgent, index) for index in range(6)]
    assert reads[7:] == [key_at(ahead, index) for index in range(1, 8)]
    last_read = max(index for index, item in enumerate(done) if isinstance(item, FrameRead))
    writes_before = sum(isinstance(item, FrameWrite) for item in done[:last_read])
    assert 0 < writes_before <= len(reads), "they go on, one at a time"
    assert len([item for item in done if isinstance(item, FrameWrite)]) == 20
    check_integrity(rig.ladder)


def test_without_loads_that_wait_all_is_written_at_once() -> None:
    rig = Rig(manual=True, limits=LIMITS)
    for salt in range(20):
        put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=salt))
    assert len(rig.tier._work) == 20
