"""What a client gives back when a put or a call ends in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, OpenNamespace, Transport
from kvstore.client.deadline import Deadline
from kvstore.clock import SystemClock
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import MissReason
from tests.unit.client.conftest import LAYOUT, NAMESPACE, SECONDS, keys_of, payload
from tests.unit.client.fake_daemon import FakeDaemon


def test_a_refused_commit_gives_its_slots_back(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    refusal = pb.Error(code=pb.ERROR_CODE_OVERLOADED, message="too much is unfinished")
    daemon.scripts["commit"] = lambda request: {"error": refusal}
    put = namespace.put(namespace.root, keys_of(namespace, 3), payload(3), deadline_seconds=SECONDS)
    assert (put.stored, put.reason) == (0, MissReason.THROTTLED)
    assert daemon.waits_for("abort")[0].reservation == 5


def test_a_wrong_commit_gives_its_slots_back(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    refusal = pb.Error(code=pb.ERROR_CODE_INVALID_ARGUMENT, message="no digest for block 1")
    daemon.scripts["commit"] = lambda request: {"error": refusal}
    with pytest.raises(InvalidArgument, match="no digest"):
        namespace.put(namespace.root, keys_of(namespace, 3), payload(3), deadline_seconds=SECONDS)
    assert daemon.waits_for("abort")[0].reservation == 5


def test_a_commit_that_is_not_answered_in_time_is_followed_by_an_abort(
    daemon: FakeDaemon, namespace: OpenNamespace
) -> None:
    daemon.scripts["commit"] = lambda request: None
    put = namespace.put(namespace.root, keys_of(namespace, 3), payload(3), deadline_seconds=0.3)
    assert put.reason is MissReason.DEADLINE
    assert daemon.waits_for("abort")[0].reservation == 5


def test_a_failure_inside_the_daemon_is_a_miss(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    for verb in ("match", "prefetch", "reserve"):
        daemon.scripts[verb] = lambda _: {"error": pb.Error(code=pb.ERROR_CODE_INTERNAL, message="a bug")}
    keys = keys_of(namespace, 2)
    assert namespace.match(keys, deadline_seconds=SECONDS).reason is MissReason.TIER_DOWN
    assert namespace.prefetch(keys, deadline_seconds=1.0).reason is MissReason.TIER_DOWN
    put = namespace.put(namespace.root, keys, payload(2), deadline_seconds=SECONDS)
    assert put.reason is MissReason.TIER_DOWN


def test_a_reason_of_a_later_daemon_is_no_mistake_of_the_callers(
    daemon: FakeDaemon, namespace: OpenNamespace
) -> None:
    later: Any = 99
    daemon.scripts["prefetch"] = lambda _: {"prefetch": pb.PrefetchReply(blocks=1, reason=later)}
    daemon.scripts["match"] = lambda _: {"match": pb.MatchReply(blocks=1, lease=77, reason=later)}
    daemon.scripts["list"] = lambda _: {"list": pb.ListReply(runs=[pb.RunInfo(keys=b"x")])}
    keys = keys_of(namespace, 2)
    assert namespace.prefetch(keys, deadline_seconds=1.0).reason is MissReason.DAEMON_GONE
    assert namespace.match(keys, deadline_seconds=SECONDS).reason is MissReason.DAEMON_GONE
    assert daemon.waits_for("release")[0].lease == 77
    with pytest.raises(TierUnavailable, match="list: the daemon's answer cannot be read"):
        namespace.list()


def test_a_call_on_a_connection_that_has_just_ended_is_a_miss(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, LAYOUT, mapped=False)
    with Client(daemon.address, transport=Transport.FRAMED) as client:
        client.open(NAMESPACE)
        link = client.runtime.connection.current
        assert link is not None
        stub = link.stub()
        link.retire()
        with pytest.raises(TierUnavailable):
            link.stub()
        for method in (stub.Fetch, stub.Put.future):
            with pytest.raises(TierUnavailable, match="the connection is over"):
                link.invoke(method, pb.FetchRequest(lease=1), deadline=Deadline(SystemClock(), 1.0))
    daemon.stop()
