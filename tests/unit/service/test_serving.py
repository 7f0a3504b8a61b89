"""Both listeners over a real store, in one process: health, limits, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.clock import SystemClock
from kvstore.errors import KVStoreError, Overloaded, ShuttingDown, TierUnavailable, UnknownNamespace
from kvstore.events import Events
from kvstore.rpc import wire
from kvstore.rpc.channel import CLIENT_OPTIONS
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc, data_pb2_grpc
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.gate import Gate, State
from kvstore.service.serving import Serving
from kvstore.service.store import Store
from kvstore.service.threads import Supervisor
from kvstore.settings import load
from kvstore.types import AckTier
from tests.e2e import blocks

KEYS = blocks.keys_of(3)


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


class Running:
    """A serving store and a channel to it."""

    def __init__(self, serving: Serving, store: Store, gate: Gate, channel: grpc.aio.Channel) -> None:
        self.serving = serving
        self.ladder = store.ladder
        self.gate = gate
        self.events = store.events
        self.channel = channel
        self.data = data_pb2_grpc.DataStub(channel)
        self.admin = admin_pb2_grpc.AdminStub(channel)

    async def health(self) -> int:
        """Return the overall status of the standard health service."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest())).status)

    async def becomes(self, status: int) -> None:
        """Wait for the health service to say `status`."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        async for reply in stub.Watch(health_pb2.HealthCheckRequest()):
            if reply.status == status:
                return

    async def error_of(self, call: Awaitable[Any]) -> KVStoreError:
        """Return the error that a call ends with."""
        with pytest.raises(grpc.RpcError) as caught:
            await call
        return wire.error_from_call(caught.value)


@asynccontextmanager
async def running(place: Path, **settings: object) -> AsyncIterator[Running]:
    flags = {
        "server.address": f"unix:{place}/k.sock",
        "host.arena_bytes": "16MiB",
        "host.directory": str(place),
        "ssd.enabled": False,
        **{f"server.{key}": value for key, value in settings.items()},
    }
    loaded = load(environ={}, flags=[("--set", key, value) for key, value in flags.items()])
    server, events = loaded.settings.server, Events()
    store = await asyncio.to_thread(Store.open, loaded.settings, clock=SystemClock(), events=events)
    gate = Gate(sessions_max=server.sessions_max, streams_max=server.streams_max)
    serving = Serving(store, loaded.settings, gate=gate, about=lambda: {"version": "x"})
    await serving.start()
    gate.move(State.SERVING)
    try:
        async with grpc.aio.insecure_channel(server.address, options=CLIENT_OPTIONS) as channel:
            yield Running(serving, store, gate, channel)
    finally:  # or a test that fails would take others along
        await serving.stop()
        await asyncio.to_thread(store.close, deadline_seconds=1.0)


async def only_the_header(keys: bytes) -> AsyncIterator[pb.PutRequest]:
    """Begin a put and say no more: gRPC's own error may overtake that of a call which is still written to."""
    yield next(blocks.put_requests(keys, ack=AckTier.HOST))
    await asyncio.Event().wait()


def played(place: Path, play: Callable[[Running], Awaitable[None]], **settings: object) -> None:
    async def main() -> None:
        async with running(place, **settings) as world:
            await asyncio.wait_for(play(world), 30)

    asyncio.run(main())


def open_request() -> pb.OpenRequest:
    return wire.open_to_wire(blocks.NAMESPACE, root=blocks.ROOT)


def test_health_and_errors_follow_the_state(place: Path) -> None:
    async def play(world: Running) -> None:
        await world.becomes(health_pb2.HealthCheckResponse.SERVING)
        await world.data.Open(open_request())
        supervisor = Supervisor(
            world.events, on_failure=lambda name: world.gate.move(State.FAILED, cause=name)
        )

        def fail() -> None:
            raise RuntimeError("tick broke")

        supervisor.start("tick", fail)
        await world.becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        error = await world.error_of(world.data.Match(blocks.match_request(KEYS)))
        assert isinstance(error, TierUnavailable)
        assert "tick failed" in str(error)
        world.gate.move(State.DRAINING)
        error = await world.error_of(world.data.Match(blocks.match_request(KEYS)))
        assert isinstance(error, ShuttingDown)
        put = world.data.Put(only_the_header(KEYS))
        assert isinstance(await world.error_of(put), ShuttingDown)
        assert not (
            await world.data.Release(pb.ReleaseRequest(lease=5, outcome=pb.RELEASE_OUTCOME_UNUSED))
        ).found
        assert (await world.admin.Status(admin_pb2.StatusRequest())).document
        assert world.events.total("kvstore_thread_failures_total", thread="tick") == 1

    played(place, play)


def test_clients_beyond_the_limit_are_told_so(place: Path) -> None:
    async def play(world: Running) -> None:
        hello = pb.SessionRequest(request_id=1, hello=pb.HelloRequest(protocol=1, client="a"))
        first = world.data.Session()
        await first.write(hello)
        assert (await first.read()).hello.session == 1
        second = world.data.Session()
        error = await world.error_of(second.read())
        assert isinstance(error, Overloaded)
        assert error.retry_after_ms > 0
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        third = world.data.Session()
        await third.write(hello)
        assert (await third.read()).hello.session == 2
        third.cancel()

    played(place, play, sessions_max=1)


def test_errors_of_the_unary_twins_keep_their_kind(place: Path) -> None:
    async def play(world: Running) -> None:
        error = await world.error_of(world.data.Match(blocks.match_request(KEYS)))
        assert isinstance(error, UnknownNamespace)
        verify = world.admin.Verify(admin_pb2.VerifyRequest(namespace=b"x" * 32))
        assert isinstance(await world.error_of(verify.read()), UnknownNamespace)
        await world.data.Open(open_request())
        reply = await world.data.Match(blocks.match_request(KEYS))
        assert reply.boot_id
        assert reply.blocks == 0

    played(place, play)


async def spoiled_order() -> AsyncIterator[pb.PutRequest]:
    requests = list(blocks.put_requests(KEYS, ack=AckTier.HOST))
    for request in (requests[0], requests[2], requests[1]):
        yield request


async def header_missing() -> AsyncIterator[pb.PutRequest]:
    yield list(blocks.put_requests(KEYS, ack=AckTier.HOST))[1]


async def header_twice() -> AsyncIterator[pb.PutRequest]:
    first = next(blocks.put_requests(KEYS, ack=AckTier.HOST))
    yield first
    yield first


async def nothing() -> AsyncIterator[pb.PutRequest]:
    return
    yield


@pytest.mark.parametrize("stream", [spoiled_order, header_missing, header_twice, nothing])
def test_a_put_out_of_order_is_refused_and_leaves_nothing(
    stream: Callable[[], AsyncIterator[pb.PutRequest]], place: Path
) -> None:
    async def play(world: Running) -> None:
        await world.data.Open(open_request())
        error = await world.error_of(world.data.Put(stream()))
        assert str(error).startswith("put: ")
        outcome = await world.data.Put(blocks.put_requests(KEYS, ack=AckTier.HOST))
        assert [run.count for run in outcome.outcomes] == [3]

    played(place, play)


def test_a_put_that_is_cut_off_keeps_no_slots(place: Path) -> None:
    async def reservations(world: Running) -> float:
        document = json.loads((await world.admin.Status(admin_pb2.StatusRequest())).document)
        return float(document["gauges"]["kvstore_reservations"])

    async def play(world: Running) -> None:
        await world.data.Open(open_request())
        requests = blocks.put_requests(KEYS, ack=AckTier.HOST)
        call = world.data.Put()
        await call.write(next(requests))
        await call.write(next(requests))
        while not await reservations(world):
            pass
        call.cancel()
        while await reservations(world):
            pass

    played(place, play)
