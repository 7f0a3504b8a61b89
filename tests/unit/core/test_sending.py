"""What is sent straight out of a slot stays there until it is sent, whatever becomes of its lease."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.api import Extent, MatchRequest, Progress
from kvstore.core.limits import Limits
from kvstore.errors import LeaseExpired
from kvstore.types import HASH_BYTES, MissReason
from tests.support.driver import check_extents, namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig
from tests.unit.core.test_matches import reopened

BLOCKS, PAGES = 8, 16


def stored() -> tuple[Rig, bytes]:
    rig = Rig(pages=PAGES, ssd=False)
    keys = rig.keys(BLOCKS)
    put(rig.ladder, rig.space, rig.root, keys)
    return rig, keys


def crowded(rig: Rig) -> None:
    """Put more than there is room for, so that everything goes that may."""
    for salt in range(1, 4):
        put(rig.ladder, rig.space, rig.root, rig.keys(BLOCKS, salt=salt))


def are_unmoved(rig: Rig, extents: tuple[Extent, ...]) -> bool:
    return all((rig.memory.generations[e.slots] == e.generations).all() for e in extents)


def released(rig: Rig, lease: int) -> None:
    rig.ladder.release(lease, used=0)


def expired(rig: Rig, lease: int) -> None:
    rig.tick(61.0)


def session_ended(rig: Rig, lease: int) -> None:
    rig.ladder.end_session(7)


@pytest.mark.parametrize("ended", [released, expired, session_ended])
def test_slots_stay_until_they_are_sent(ended: Callable[[Rig, int], None]) -> None:
    rig, keys = stored()
    found = rig.match(keys, session=7)
    with rig.ladder.sending(found.lease):
        ended(rig, found.lease)
        crowded(rig)
        rig.ladder.delete(rig.space.fingerprint, None)
        crowded(rig)
        assert are_unmoved(rig, found.extents)
        assert check_extents(rig.ladder, rig.space, keys, found.extents) == BLOCKS
    crowded(rig)
    assert not are_unmoved(rig, found.extents)
    check_integrity(rig.ladder)


def test_nothing_is_held_when_it_is_over_also_by_an_error() -> None:
    rig, keys = stored()
    lease = rig.match(keys).lease
    with pytest.raises(ZeroDivisionError), rig.ladder.sending(lease):
        raise ZeroDivisionError
    rig.ladder.release(lease, used=BLOCKS)
    rig.ladder.delete(rig.space.fingerprint, None)
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 0


def test_a_lease_that_has_ended_holds_nothing_more() -> None:
    rig, keys = stored()
    lease = rig.match(keys).lease
    rig.ladder.release(lease, used=0)
    with pytest.raises(LeaseExpired), rig.ladder.sending(lease):
        raise AssertionError("entered")


def test_a_part_that_was_told_stays_though_another_part_fails() -> None:
    """The first part of all blocks has come and is being sent when the second turns out to be rotten."""
    rig = Rig(space=namespace(parts=2))
    keys = rig.keys(BLOCKS)
    put(rig.ladder, rig.space, rig.root, keys)
    for frame in rig.disk.frames.values():
        payload, digest = frame.records[1][2]
        frame.records[1][2] = (b"!" + payload[1:], digest)
    rig = reopened(rig, manual=True, limits=Limits(loads_in_flight_max=1))
    news: list[Progress] = []
    request = MatchRequest(namespace=rig.space.fingerprint, keys=keys)
    lease = rig.ladder.match(request, news.append).lease
    rig.tier.run(1)
    (first_part,) = news[0].extents
    with rig.ladder.sending(lease):
        rig.tier.run()
        assert (news[-1].done, news[-1].blocks, news[-1].reason) == (True, 2, MissReason.CORRUPT)
        rig.ladder.release(lease, used=0)
        put(rig.ladder, rig.space, rig.root, rig.keys(BLOCKS, salt=5))
        assert are_unmoved(rig, (first_part,))
        check_integrity(rig.ladder)
    assert not are_unmoved(rig, (first_part,))
    check_integrity(rig.ladder)
    assert rig.length(keys[: 2 * HASH_BYTES]) == 2
