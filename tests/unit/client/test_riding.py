"""Releases ride on the next match, or go by themselves a moment later; none is lost, none is overtaken."""

from __future__ import annotations

from kvstore.client import Client, OpenNamespace
from kvstore.client.session import RIDERS_MAX
from kvstore.rpc.v1 import data_pb2 as pb
from tests.unit.client.conftest import LIMITS, NAMESPACE, SECONDS, stored, until
from tests.unit.client.fake_daemon import FakeDaemon


def released(daemon: FakeDaemon) -> int:
    """Return how many releases the daemon has heard, riding and alone."""
    seen: list[pb.SessionRequest] = list(daemon.seen)
    alone = [request for request in seen if request.WhichOneof("verb") == "release"]
    return len(alone) + sum(len(request.match.release) for request in seen)


def test_a_release_that_finds_no_match_goes_alone(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    match = namespace.match(stored(namespace), deadline_seconds=SECONDS)
    for count in (1, 2):  # the second one finds the sender asleep
        namespace.release(match, used=3)
        assert len(daemon.waits_for("release", count)) == count


def test_nothing_overtakes_a_release(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = stored(namespace)
    for _ in range(20):
        match = namespace.match(keys, deadline_seconds=SECONDS)
        before = released(daemon)
        namespace.release(match, used=3)
        namespace.match(keys, deadline_seconds=SECONDS)
        assert released(daemon) == before + 1
        namespace.release(match, used=3)
        namespace.touch(keys, deadline_seconds=SECONDS)
        assert released(daemon) == before + 2


def test_more_releases_than_a_match_takes_along(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = stored(namespace)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    for _ in range(3 * RIDERS_MAX):
        namespace.release(match, used=3)
    namespace.match(keys, deadline_seconds=SECONDS)
    assert released(daemon) == 3 * RIDERS_MAX


def test_what_was_released_before_a_close_goes_out(daemon: FakeDaemon) -> None:
    with Client(daemon.address, limits=LIMITS) as client:
        namespace = client.open(NAMESPACE)
        match = namespace.match(stored(namespace), deadline_seconds=SECONDS)
        namespace.release(match, used=3)
    until(lambda: released(daemon) == 1)
