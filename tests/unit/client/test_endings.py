"""What a client gives back when a put or a call ends in the middle."""

from __future__ import annotations

from pathlib import Path

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


def test_a_call_on_a_connection_that_has_just_ended_is_a_miss(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, LAYOUT, mapped=False)
    with Client(daemon.address, transport=Transport.FRAMED) as client:
        client.open(NAMESPACE)
        link = client.runtime.connection.current
        assert link is not None
        link.retire()
        for method in (link.stub.Fetch, link.stub.Put.future):
            with pytest.raises(TierUnavailable, match="the connection is over"):
                link.invoke(method, pb.FetchRequest(lease=1), deadline=Deadline(SystemClock(), 1.0))
    daemon.stop()
