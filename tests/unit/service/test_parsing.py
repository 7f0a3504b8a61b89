"""Bytes that are no message: refused with a reason on every kind of call, and the log stays clean."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.errors import DeadlineExceeded, InvalidArgument
from kvstore.rpc.v1 import data_pb2 as pb
from tests.unit.service.test_serving import Running, place, played

__all__ = ["place"]  # a fixture
BROKEN = b"\x11\x00\x00"


def calls_of(channel: Any) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return a call of each kind that sends broken bytes."""
    unary = channel.unary_unary("/kvstore.v1.Data/Match")
    fetch = channel.unary_stream("/kvstore.v1.Data/Fetch")
    verify = channel.unary_stream("/kvstore.v1.Admin/Verify")
    put = channel.stream_unary("/kvstore.v1.Data/Put")
    session = channel.stream_stream("/kvstore.v1.Data/Session")
    return {
        "unary": lambda: unary(BROKEN),
        "fetch": lambda: fetch(BROKEN).read(),
        "verify": lambda: verify(BROKEN).read(),
        "put": lambda: put(iter([BROKEN])),
        "session": lambda: session(iter([BROKEN])).read(),
    }


@pytest.mark.parametrize("kind", ["unary", "fetch", "verify", "put", "session"])
def test_bytes_that_are_no_message(kind: str, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def play(world: Running) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            await calls_of(world.channel)[kind]()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "3 bytes that are no message of this call" in str(caught.value.details())

    with caplog.at_level(logging.WARNING):
        played(place, play)
    assert not [record for record in caplog.records if record.exc_info]


async def nothing_more(world: Running, first: pb.PutRequest | None) -> Exception:
    """Begin a put and then say nothing."""
    call = world.data.Put()
    if first is not None:
        await call.write(first)
    return await world.error_of(call)


def test_a_stream_that_says_nothing_is_ended(place: Path) -> None:
    async def play(world: Running) -> None:
        error = await nothing_more(world, None)
        assert isinstance(error, DeadlineExceeded)
        assert "the limit is 0.05 s without a message, nothing arrived" in str(error)
        error = await world.error_of(world.data.Session().read())
        assert isinstance(error, DeadlineExceeded)
        assert "until hello" in str(error)
        with world.gate.place("streams"):
            assert True

    played(place, play, stream_idle_seconds=0.05, streams_max=1)


def test_an_error_that_quotes_what_no_wire_carries(place: Path) -> None:
    async def play(world: Running) -> None:
        canonical = b'{"version": "\\ud800"}'
        session = world.data.Session()
        await session.write(pb.SessionRequest(request_id=1, hello=pb.HelloRequest(protocol=1, client="a")))
        await session.read()
        await session.write(pb.SessionRequest(request_id=2, open=pb.OpenRequest(canonical=canonical)))
        assert "version \\ud800 is unknown" in (await session.read()).error.message
        error = await world.error_of(world.data.Open(pb.OpenRequest(canonical=canonical)))
        assert isinstance(error, InvalidArgument)

    played(place, play)
