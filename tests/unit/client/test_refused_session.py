"""A session that is refused before its first request is said: the refusal keeps its kind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest

from kvstore.client.session import Session
from kvstore.client.streams import GrpcStream
from kvstore.errors import KVStoreError, PermissionRefused, TierUnavailable
from kvstore.rpc.stubs import DataStub
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import error_metadata


class Refusal(grpc.RpcError):
    """How a call ends that is refused as it begins."""

    def __init__(self, error: KVStoreError) -> None:
        self._error = error

    def trailing_metadata(self) -> Any:
        return error_metadata(self._error)


class RefusedCall:
    def __init__(self, error: KVStoreError) -> None:
        self._error = error

    def __iter__(self) -> Iterator[pb.SessionReply]:
        raise Refusal(self._error)

    def cancel(self) -> None:
        """There is nothing to cancel."""


class RefusingStub:
    def __init__(self, error: KVStoreError) -> None:
        self._error = error

    def Session(self, requests: object, metadata: object = None) -> RefusedCall:
        return RefusedCall(self._error)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(PermissionRefused("a valid token is needed"), PermissionRefused), (KVStoreError("x"), TierUnavailable)],
)
def test_the_refusal_keeps_its_kind(error: KVStoreError, raised: type[KVStoreError]) -> None:
    over = threading.Event()
    stream = GrpcStream(cast(DataStub, RefusingStub(error)), metadata=())
    session = Session(stream, requests_max=4, on_orphan=lambda reply: None, on_end=over.set)
    assert over.wait(10)
    with pytest.raises(raised, match=str(error)):
        session.ask(pb.SessionRequest(ping=pb.PingRequest()), 1.0)
    session.close()
