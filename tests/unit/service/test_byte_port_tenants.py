"""Payload connections of tenants: whose they are, what they may reach, how many of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.api import ReserveRequest
from kvstore.errors import (
    KVStoreError,
    LeaseExpired,
    Overloaded,
    PermissionRefused,
)
from kvstore.hashing import block_hashes, chain_root
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.rpc import wire
from kvstore.rpc.channel import CHUNK_BYTES_MAX
from kvstore.rpc.packets import Kind
from kvstore.service.byte_fetch import BATCH_BYTES
from kvstore.types import AckTier
from tests.e2e import blocks
from tests.fuzz.probes import SPACES, TOKENS, keys_of, put_of, root_of, tokens_file
from tests.support.raw_payload import outcomes
from tests.unit.service.test_byte_port import BLOCK, World, on_a_thread
from tests.unit.service.test_serving import place

__all__ = ["place"]  # a fixture


def with_tokens(place: Path, act: Callable[[World], None], **settings: object) -> None:
    """Play against a daemon whose socket asks for the tokens of both tenants."""

    def opened(world: World) -> None:
        for tenant, space in SPACES.items():
            world.ladder.open(space, root=root_of(tenant))
        act(world)

    file = tokens_file(place / "tokens.toml")
    on_a_thread(place, opened, socket_tokens=True, tokens_file=str(file), **settings)


def stored_by_acme(world: World) -> int:
    """Put the prompt as acme and return a lease on it."""
    keys = keys_of("acme")
    with world.raw(token=TOKENS["acme"]) as acme:
        reply = acme.put(put_of("acme", keys, data=lambda block: blocks.payload(keys, block)))
        assert outcomes(reply) == [("stored_host", 8)]
    return world.lease(keys, SPACES["acme"].fingerprint)


@pytest.mark.parametrize("token", ["", "wrong-token-of-20-characters", "\N{SNOWMAN}" * 20])
def test_without_a_valid_token_there_is_no_greeting(token: str, place: Path) -> None:
    def act(world: World) -> None:
        with pytest.raises(PermissionRefused, match="a valid token is needed"):
            world.raw(token=token)
        assert world.events.total("kvstore_rpc_refusals_total") == 1

    with_tokens(place, act)


def test_a_lease_of_another_tenant_is_like_one_that_has_ended(place: Path) -> None:
    def act(world: World) -> None:
        lease = stored_by_acme(world)
        with world.raw(token=TOKENS["bolt"]) as bolt:
            said = []
            for number in (lease, lease + 2):
                with pytest.raises(LeaseExpired) as caught:
                    bolt.fetch(number)
                said.append(str(caught.value).replace(f"{number:#x}", ""))
            assert said[0] == said[1]
            foreign = put_of("acme", keys_of("acme"), data=lambda block: b"x" * BLOCK)
            with pytest.raises(PermissionRefused, match="not open here for this token"):
                bolt.put(foreign)
        with world.raw(token=TOKENS["acme"]) as acme:
            assert len(acme.fetch(lease)) == 8

    with_tokens(place, act)


def test_a_token_that_is_withdrawn_ends_its_connections_at_their_next_request(place: Path) -> None:
    def act(world: World) -> None:
        lease = stored_by_acme(world)
        with world.raw(token=TOKENS["acme"]) as acme, world.raw(token=TOKENS["bolt"]) as bolt:
            assert len(acme.fetch(lease)) == 8
            file = place / "tokens.toml"
            file.write_text(file.read_text().replace(TOKENS["acme"], "another-token-of-acme-now"))
            tokens = world.running.serving._tokens
            assert tokens is not None
            assert tokens.reload()
            with pytest.raises(PermissionRefused, match="no longer valid"):
                acme.fetch(lease)
            assert acme.has_ended()
            with pytest.raises(LeaseExpired):
                bolt.fetch(lease)

    with_tokens(place, act)


def test_streams_of_one_token_have_a_limit(place: Path) -> None:
    def act(world: World) -> None:
        first = put_of("acme", keys_of("acme"), data=lambda block: b"")[0]
        with world.raw(token=TOKENS["acme"]) as one, world.raw(token=TOKENS["acme"]) as two:
            one.begin_put(first)
            with pytest.raises(Overloaded, match="streams of this connection: the limit is 1 at a time"):
                two.fetch(1)
            with world.raw(token=TOKENS["bolt"]) as bolt, pytest.raises(LeaseExpired):
                bolt.fetch(1)

    with_tokens(place, act, connection_streams_max=1)


def test_requests_of_one_token_have_a_rate(place: Path) -> None:
    def act(world: World) -> None:
        with world.raw(token=TOKENS["acme"]) as acme:
            seen = set()
            for _ in range(100):
                with pytest.raises(KVStoreError) as caught:
                    acme.fetch(1)
                seen.add(type(caught.value))
            assert seen == {LeaseExpired, Overloaded}

    with_tokens(place, act, token_requests_per_second=5)


def test_random_bytes_of_a_slot_do_not_leave_with_a_short_record(place: Path) -> None:
    """A record shorter than its slot: what the slot held behind it stays where it is."""

    def act(world: World) -> None:
        world.stored()
        world.ladder.delete(blocks.NAMESPACE.fingerprint, None)
        keys = blocks.keys_of(3, seed=2)
        first, *_ = blocks.put_requests(keys, ack=AckTier.HOST)
        del first.header.digests[:]
        first.header.digests.add(part=0, first=0, lengths=np.full(3, 100, "<u4").tobytes())
        with world.raw() as raw:
            raw.begin_put(first)
            for block in range(3):
                raw.chunk(b"s" * 100, block=block)
            raw.send(Kind.END)
            assert outcomes(raw.put_reply()) == [("stored_host", 3)]
            assert raw.fetch(world.lease(keys)) == dict.fromkeys(range(3), b"s" * 100)

    on_a_thread(place, act)


def test_a_record_larger_than_a_batch_comes_in_chunks(place: Path) -> None:
    size = 2 * BATCH_BYTES + 5
    layout = Layout.single(dtype="u8", bytes_max=size, layers=1, segments=1)
    space = Namespace(model="large", weights="v1", layout=layout, block_tokens=16)
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes()
    root = chain_root(space.fingerprint)
    keys = block_hashes(root, list(range(16)), block_tokens=16)

    def act(world: World) -> None:
        world.ladder.open(space, root=root)
        reserve = ReserveRequest(namespace=space.fingerprint, parent=root, keys=keys)
        with world.raw() as raw:
            raw.begin_put(wire.put_header_to_wire(reserve, [], ack=AckTier.HOST))
            for offset in range(0, size, CHUNK_BYTES_MAX):
                raw.chunk(data[offset : offset + CHUNK_BYTES_MAX], offset=offset)
            raw.send(Kind.END)
            assert outcomes(raw.put_reply()) == [("stored_host", 1)]
            raw.begin_fetch(world.lease(keys, space.fingerprint))
            chunks: list[tuple[int, bytes]] = []
            while (packet := raw.receive())[0].kind is not Kind.END:
                if packet[0].kind is Kind.CHUNK:
                    chunks.append((packet[0].offset, packet[1]))
            assert [offset for offset, _ in chunks] == [0, BATCH_BYTES, 2 * BATCH_BYTES]
            assert b"".join(piece for _, piece in chunks) == data

    on_a_thread(place, act)
