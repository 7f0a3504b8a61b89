"""What a token lets its bearer do, and what a bearer may take up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.errors import Overloaded, PermissionRefused
from kvstore.hashing import chain_root
from kvstore.namespace import Namespace
from kvstore.rpc import wire
from kvstore.rpc.channel import bearer
from kvstore.rpc.v1 import admin_pb2
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service import access
from tests.e2e import blocks
from tests.fuzz.probes import SPACES, TOKENS, keys_of, put_of, tokens_file
from tests.unit.service.test_serving import Running, place, played

__all__ = ["place"]  # a fixture
ACME = bearer(TOKENS["acme"])


def with_tokens(place: Path, play: Callable[[Running], Awaitable[None]], **settings: object) -> None:
    """Play against a daemon whose socket asks for the tokens of both tenants."""
    file = tokens_file(place / "tokens.toml")
    played(place, play, socket_tokens=True, tokens_file=str(file), **settings)


def open_request(space: Namespace) -> pb.OpenRequest:
    return wire.open_to_wire(space, root=chain_root(space.fingerprint))


def test_health_is_asked_without_a_token_and_watched_with_one(place: Path) -> None:
    async def play(world: Running) -> None:
        stub = health_pb2_grpc.HealthStub(world.channel)
        assert await world.health() == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        reply = await stub.Watch(health_pb2.HealthCheckRequest(), metadata=ACME).read()
        assert reply.status == health_pb2.HealthCheckResponse.SERVING

    with_tokens(place, play)


def test_a_refusal_keeps_its_kind(place: Path) -> None:
    async def play(world: Running) -> None:
        error = await world.error_of(world.admin.Status(admin_pb2.StatusRequest(), metadata=ACME))
        assert isinstance(error, PermissionRefused)
        assert "an administrator's token is needed" in str(error)
        error = await world.error_of(world.data.Open(open_request(SPACES["acme"])))
        assert isinstance(error, PermissionRefused)
        assert world.events.total("kvstore_rpc_refusals_total") == 2

    with_tokens(place, play)


def test_a_tenant_may_open_so_many_namespaces(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "TENANT_NAMESPACES_MAX", 2)

    async def play(world: Running) -> None:
        spaces = [replace(SPACES["acme"], model=f"model-{number}") for number in range(3)]
        for space in (*spaces[:2], spaces[0]):
            await world.data.Open(open_request(space), metadata=ACME)
        error = await world.error_of(world.data.Open(open_request(spaces[2]), metadata=ACME))
        assert isinstance(error, Overloaded)
        assert "the limit is 2 namespaces of a tenant, got one more" in str(error)
        await world.data.Open(open_request(SPACES["bolt"]), metadata=bearer(TOKENS["bolt"]))

    with_tokens(place, play)


async def refused_in_time(call: Callable[[], Awaitable[object]]) -> Exception:
    """Repeat a call until it is refused: however slow the machine, the bucket is empty at some time."""
    for _ in range(1000):
        try:
            await call()
        except grpc.RpcError as error:
            refusal = wire.error_from_call(error)
            if isinstance(refusal, Overloaded):  # gRPC's own error may overtake that of a put it still sends
                return refusal
    raise AssertionError("never refused")


def test_a_rate_is_of_the_token_whatever_the_call(place: Path) -> None:
    async def play(world: Running) -> None:
        request = open_request(SPACES["acme"])
        error = await refused_in_time(lambda: world.data.Open(request, metadata=ACME))
        assert isinstance(error, Overloaded)
        assert error.retry_after_ms > 0
        await world.data.Open(open_request(SPACES["bolt"]), metadata=bearer(TOKENS["bolt"]))
        keys = keys_of("acme")
        messages = put_of("acme", keys, data=lambda block: blocks.payload(keys, block))
        assert isinstance(
            await refused_in_time(lambda: world.data.Put(iter(messages), metadata=ACME)), Overloaded
        )
        release = pb.ReleaseRequest(lease=1, outcome=pb.RELEASE_OUTCOME_UNUSED)
        assert not (await world.data.Release(release, metadata=ACME)).found

    with_tokens(place, play, token_requests_per_second=2)
