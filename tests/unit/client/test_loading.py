"""Blocks that come later than the answer to their match: news in any order, late, broken off or wrong."""

from __future__ import annotations

import numpy as np

from kvstore.client import OpenNamespace
from kvstore.rpc import wire
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import HASH_BYTES, MissReason
from tests.unit.client.conftest import LAYOUT, SECONDS, empty, payload, stored, until
from tests.unit.client.fake_daemon import Answer, FakeDaemon


def loading(daemon: FakeDaemon) -> list[int]:
    """Make matches answer before their blocks are there; return where their request ids are noted."""
    numbers: list[int] = []

    def answer(request: pb.SessionRequest) -> Answer:
        numbers.append(request.request_id)
        found = daemon.match(request.match.keys)
        reply = wire.match_answer_to_wire(found, layout=LAYOUT)
        reply.ready = False
        del reply.extents[:]
        return {"match": reply}

    daemon.scripts["match"] = answer
    return numbers


def test_blocks_are_copied_as_they_come_in_any_order(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys, into = stored(namespace), empty(3)
    numbers = loading(daemon)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    assert (match.blocks, match.ready) == (3, False)
    ticket = namespace.submit_fetch(match, into, deadline_seconds=SECONDS)
    daemon.send(numbers[0], progress=daemon.progress(keys, first=1, count=2, done=False, blocks=3))
    until(lambda: into[2].any())
    assert not ticket.poll()
    daemon.send(numbers[0], progress=daemon.progress(keys, first=0, count=1, done=True, blocks=3))
    assert ticket.result(SECONDS).blocks == 3
    assert np.array_equal(into, payload(3))


def test_news_may_come_before_the_answer(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys, into = stored(namespace), empty(3)

    def answer(request: pb.SessionRequest) -> Answer:
        event = daemon.progress(keys, first=0, count=3, done=True, blocks=3)
        daemon.send(request.request_id, progress=event)
        reply = wire.match_answer_to_wire(daemon.match(keys), layout=LAYOUT)
        reply.ready = False
        del reply.extents[:]
        return {"match": reply}

    daemon.scripts["match"] = answer
    assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 3
    assert np.array_equal(into, payload(3))


def test_a_load_that_fails_shortens_the_fetch(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = stored(namespace)
    numbers = loading(daemon)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    event = daemon.progress(keys, first=0, count=1, done=True, blocks=1)
    event.reason = pb.MISS_REASON_TIER_DOWN
    daemon.send(numbers[0], progress=event)
    fetched = namespace.fetch(match, empty(3), deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (1, MissReason.TIER_DOWN)


def test_a_fetch_ends_at_its_deadline_with_what_it_has(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = stored(namespace)
    numbers = loading(daemon)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    daemon.send(numbers[0], progress=daemon.progress(keys, first=0, count=2, done=False, blocks=3))
    fetched = namespace.fetch(match, empty(3), deadline_seconds=0.1)
    assert (fetched.blocks, fetched.reason) == (2, MissReason.DEADLINE)


def test_a_fetch_whose_session_breaks_keeps_what_it_has(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = stored(namespace)
    numbers = loading(daemon)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    into = empty(3)
    ticket = namespace.submit_fetch(match, into, deadline_seconds=SECONDS)
    daemon.send(numbers[0], progress=daemon.progress(keys, first=0, count=2, done=False, blocks=3))
    until(lambda: into[1].any())
    daemon._sessions[-1].put(None)
    fetched = ticket.result(SECONDS)
    assert (fetched.blocks, fetched.reason) == (2, MissReason.DAEMON_GONE)


def test_a_slot_that_changed_hands_is_evicted_not_corrupt(
    daemon: FakeDaemon, namespace: OpenNamespace
) -> None:
    keys = stored(namespace)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    slot = daemon.blocks[keys[HASH_BYTES : 2 * HASH_BYTES]][0]
    daemon.arena.generations[slot] += 1
    fetched = namespace.fetch(match, empty(3), deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (1, MissReason.EVICTED)


def test_a_lease_from_elsewhere_can_be_fetched(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    from kvstore.client import Match

    stored(namespace)
    into = empty(3)
    fetched = namespace.fetch(Match(blocks=3, lease=77, ready=False), into, deadline_seconds=SECONDS)
    assert fetched.blocks == 3
    assert np.array_equal(into, payload(3))
