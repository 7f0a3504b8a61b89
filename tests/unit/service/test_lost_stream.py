"""A framed stream whose client leaves between two messages is the client's end, not a fault of the daemon."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import grpc.aio
import pytest

from kvstore.events import Events
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.framed import Framed
from kvstore.service.servicer import DataServicer


class Leaving:
    """Fetches that find the stream gone when they write."""

    async def fetch(self, *_: object) -> None:
        raise grpc.aio.InternalError("the stream is closed")


def test_a_client_that_leaves_is_no_failed_call(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    nothing: Any = None
    servicer = DataServicer(nothing, cast(Framed, Leaving()), sessions=nothing, events=events)
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        asyncio.run(servicer.Fetch(pb.FetchRequest(), nothing))
    assert events.total("kvstore_rpc_errors_total") == 0
    assert not caplog.records
