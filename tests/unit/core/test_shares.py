"""One client's flood takes its own share and no more."""

from __future__ import annotations

import pytest

from kvstore.api import MatchAnswer, MatchRequest, ReserveAnswer, ReserveRequest
from kvstore.core.limits import Limits
from kvstore.core.shares import FairQueue, Share
from kvstore.errors import Overloaded
from kvstore.types import PutOutcome
from tests.support.driver import put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig

FLOOD, QUIET = 1, 2


def match(rig: Rig, keys: bytes, session: int) -> MatchAnswer:
    return rig.ladder.match(MatchRequest(namespace=rig.space.fingerprint, keys=keys, session=session))


def reserve(rig: Rig, keys: bytes, session: int) -> ReserveAnswer:
    request = ReserveRequest(namespace=rig.space.fingerprint, parent=rig.root, keys=keys, session=session)
    return rig.ladder.reserve(request)


def outcomes(answer: ReserveAnswer) -> list[tuple[PutOutcome, int]]:
    return [(run.outcome, run.count) for run in answer.outcomes]


def test_a_share_counts_per_session() -> None:
    share = Share("things", limit=3)
    share.take(FLOOD, 3)
    with pytest.raises(Overloaded, match=r"session 1: the limit is 3 things of one client, 3 are held"):
        share.check(FLOOD)
    share.check(QUIET)
    share.give(FLOOD, 1)
    share.check(FLOOD)
    share.give(FLOOD, 2)
    assert not len(share)


def test_tools_without_a_session_have_no_share() -> None:
    share = Share("things", limit=1)
    share.take(0, 100)
    share.check(0)
    assert not len(share)


def test_prefetches_of_one_client_are_limited_and_end_with_it() -> None:
    limits = Limits(session_prefetches_max=2, loads_in_flight_max=1, load_bytes=1)
    rig = Rig()
    keys = [rig.keys(2, salt=salt) for salt in range(4)]
    for some in keys:
        put(rig.ladder, rig.space, rig.root, some)
    rig.ladder.close(deadline_seconds=0.0)
    rig = Rig(disk=rig.disk, space=rig.space, limits=limits, manual=True)

    def prefetch(some: bytes, session: int) -> int:
        space = rig.space.fingerprint
        return rig.ladder.prefetch(space, some, deadline_seconds=60.0, session=session).prefetch

    first, _ = prefetch(keys[0], FLOOD), prefetch(keys[1], FLOOD)
    with pytest.raises(Overloaded, match="2 prefetches of one client, 2 are held"):
        prefetch(keys[2], FLOOD)
    assert prefetch(keys[3], QUIET)
    rig.ladder.cancel(first)
    assert prefetch(keys[2], FLOOD)
    rig.ladder.end_session(FLOOD)
    assert rig.ladder.gauges()["kvstore_prefetches"] == 1
    assert prefetch(keys[0], FLOOD)


def test_sessions_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.append(item, session=ord(item[0]))
    queue.remove("a2", session=ord("a"))
    assert [queue.popleft() for _ in range(len(queue))] == ["a1", "b1", "c1", "a3", "c2"]
    assert not queue


def test_leases_of_one_client_are_limited() -> None:
    rig = Rig(limits=Limits(session_leases_max=2))
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys)
    held = [match(rig, keys, FLOOD).lease for _ in range(2)]
    with pytest.raises(Overloaded, match="2 leases of one client, 2 are held"):
        match(rig, keys, FLOOD)
    assert match(rig, keys, QUIET).blocks == 3
    rig.ladder.release(held[0], used=0)
    assert match(rig, keys, FLOOD).blocks == 3
    rig.ladder.end_session(FLOOD)
    rig.ladder.end_session(QUIET)
    assert rig.ladder.gauges()["kvstore_leases"] == 0
    assert match(rig, keys, FLOOD).blocks == 3


def test_reservations_of_one_client_are_limited() -> None:
    rig = Rig(limits=Limits(session_reservations_max=2))
    first = reserve(rig, rig.keys(1, salt=1), FLOOD)
    reserve(rig, rig.keys(1, salt=2), FLOOD)
    with pytest.raises(Overloaded, match="2 reservations of one client"):
        reserve(rig, rig.keys(1, salt=3), FLOOD)
    assert reserve(rig, rig.keys(1, salt=3), QUIET).reservation
    rig.ladder.abort(first.reservation)
    assert reserve(rig, rig.keys(1, salt=4), FLOOD).reservation


def test_a_client_reserves_its_share_of_the_arena_and_others_the_rest() -> None:
    rig = Rig(pages=64, limits=Limits(session_reserved_share=0.6))
    usable = rig.ladder._catalog.slabs.usable_pages
    share = int(0.6 * usable)
    granted = reserve(rig, rig.keys(usable), FLOOD)
    assert outcomes(granted) == [(PutOutcome.RESERVED, share), (PutOutcome.THROTTLED, usable - share)]
    with pytest.raises(Overloaded, match=f"the limit is {share} reserved pages of one client, {share} are"):
        reserve(rig, rig.keys(1, salt=1), FLOOD)
    rest = usable - share
    assert outcomes(reserve(rig, rig.keys(rest, salt=2), QUIET)) == [(PutOutcome.RESERVED, rest)]
    check_integrity(rig.ladder)


def test_a_late_writers_slots_stay_in_its_share_until_they_are_free() -> None:
    rig = Rig(pages=64, limits=Limits(session_reserved_share=0.5))
    share = rig.ladder._catalog.slabs.usable_pages // 2
    rig.alive.add(FLOOD)
    number = reserve(rig, rig.keys(share), FLOOD).reservation
    rig.clock.advance(61.0)
    rig.ladder.tick()
    assert rig.ladder.gauges()["kvstore_quarantined_slots"] == share
    with pytest.raises(Overloaded, match="reserved pages"):
        reserve(rig, rig.keys(1, salt=1), FLOOD)
    assert rig.ladder.abort(number)
    assert reserve(rig, rig.keys(1, salt=1), FLOOD).reservation
    rig.alive.clear()
    rig.ladder.end_session(FLOOD)
    rig.ladder.tick()
    assert len(rig.ladder._putting._pages) == 0


def test_loads_of_a_quiet_client_do_not_wait_behind_a_flood() -> None:
    before = Rig()
    flood = [before.keys(4, salt=salt) for salt in range(8)]
    quiet = before.keys(2, salt=99)
    for keys in (*flood, quiet):
        put(before.ladder, before.space, before.root, keys)
    rig = Rig(disk=before.disk, manual=True, limits=Limits(load_bytes=1, loads_in_flight_max=2))
    for keys in flood:
        match(rig, keys, FLOOD)
    assert rig.ladder.gauges()["kvstore_loads_queued"] == 30
    found = match(rig, quiet, QUIET)
    assert not found.ready
    for _ in range(3):
        rig.tier.run(2)
    assert rig.ladder.watch(found.lease).done
    assert rig.ladder.gauges()["kvstore_loads_queued"] > 20
    rig.ladder.end_session(FLOOD)
    assert rig.ladder.gauges()["kvstore_loads_queued"] == 0
    rig.tier.run()
    check_integrity(rig.ladder)


def test_waiting_loads_of_one_client_are_limited() -> None:
    before = Rig()
    keys = [before.keys(4, salt=salt) for salt in range(3)]
    for each in keys:
        put(before.ladder, before.space, before.root, each)
    limits = Limits(load_bytes=1, loads_in_flight_max=1, session_loads_max=4)
    rig = Rig(disk=before.disk, manual=True, limits=limits)
    match(rig, keys[0], FLOOD)
    match(rig, keys[1], FLOOD)
    with pytest.raises(Overloaded, match="the limit is 4 waiting loads"):
        match(rig, keys[2], FLOOD)
    assert match(rig, keys[2], QUIET).blocks == 4


def test_a_load_that_two_want_comes_in_the_turn_of_the_one_who_waits_less() -> None:
    before = Rig()
    flood = [before.keys(4, salt=salt) for salt in range(4)]
    for keys in flood:
        put(before.ladder, before.space, before.root, keys)
    rig = Rig(disk=before.disk, manual=True, limits=Limits(load_bytes=1, loads_in_flight_max=1))
    for keys in flood:
        match(rig, keys, FLOOD)
    found = match(rig, flood[-1], QUIET)
    for _ in range(9):
        rig.tier.run(1)
    assert rig.ladder.watch(found.lease).done
