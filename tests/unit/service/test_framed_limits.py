"""What a framed put may send and hold: no more than it announced, no more than there is room for."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from kvstore.errors import InvalidArgument, Overloaded
from kvstore.rpc import wire
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import AckTier, PutOutcome
from tests.e2e import blocks
from tests.unit.service.test_serving import KEYS, Running, open_request, place, played

__all__ = ["place"]  # a fixture


def chunk(*, part: int = 0, block: int = 0, offset: int = 0, size: int = 16_384) -> pb.PutRequest:
    piece = pb.PutRequest.Chunk(part=part, block=block, offset=offset, data=bytes(size))
    return pb.PutRequest(chunk=piece)


def header() -> pb.PutRequest:
    return next(blocks.put_requests(KEYS, ack=AckTier.HOST))


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (chunk(block=3), "blocks 0..3 were announced, got block 3"),
        (chunk(part=1), "part 1: blocks 0..0 were announced, got block 0"),
        (chunk(size=20_001), "at most 20000 bytes a block, got 20001 at offset 0"),
        (chunk(offset=19_999, size=2), "got 2 at offset 19999"),
        (chunk(size=0), "a chunk has 1..1048576 bytes, got 0"),
        (chunk(size=(1 << 20) + 1), "a chunk has 1..1048576 bytes, got 1048577"),
    ],
)
def test_a_chunk_beyond_what_was_announced(piece: pb.PutRequest, words: str, place: Path) -> None:
    async def play(world: Running) -> None:
        await world.data.Open(open_request())
        error = await world.error_of(world.data.Put(iter([header(), piece])))
        assert isinstance(error, InvalidArgument)
        assert words in str(error)

    played(place, play)


def test_bytes_that_nobody_waits_for_are_counted_too(place: Path) -> None:
    async def play(world: Running) -> None:
        await world.data.Open(open_request())
        first = list(blocks.put_requests(KEYS[:32], ack=AckTier.HOST))
        await world.data.Put(iter(first))
        # Block 0 is a duplicate: its chunks are dropped, but not for ever.
        flood = [chunk(size=20_000) for _ in range(4)]
        error = await world.error_of(world.data.Put(iter([header(), *flood])))
        assert isinstance(error, InvalidArgument)
        assert "put: 60000 bytes were announced, got 80000" in str(error)

    played(place, play)


def test_a_header_beyond_the_room_for_puts(place: Path) -> None:
    async def play(world: Running) -> None:
        await world.data.Open(open_request())
        message = header()
        message.header.digests.add(part=0, digests=bytes(5 << 20))
        error = await world.error_of(world.data.Put(iter([message])))
        assert isinstance(error, Overloaded)
        assert "framed puts: the limit is 4194304 bytes at a time, 0 are held, got 52" in str(error)
        outcome = await world.data.Put(blocks.put_requests(KEYS, ack=AckTier.HOST))
        assert [run.count for run in outcome.outcomes] == [3]

    played(place, play, put_bytes_max="4MiB")


def test_a_message_beyond_the_limit_is_refused_with_both_sizes(place: Path) -> None:
    async def play(world: Running) -> None:
        big = pb.RenewRequest(leases=[1] * 600_000, lease_seconds=1.0)
        with pytest.raises(grpc.RpcError) as caught:
            await world.data.Renew(big)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "vs. 4194304" in str(caught.value.details())

    played(place, play, message_bytes_max="4MiB")


def test_streams_of_one_connection_have_a_limit(place: Path) -> None:
    tokens = place / "tokens.toml"
    tokens.write_text('[[tokens]]\nrole = "admin"\ntoken = "admin-token-of-20-characters"\n')
    tokens.chmod(0o600)
    metadata = (("authorization", "Bearer admin-token-of-20-characters"),)

    async def play(world: Running) -> None:
        await world.data.Open(open_request(), metadata=metadata)
        first = world.data.Put(metadata=metadata)
        await first.write(header())
        await first.write(chunk())
        while world.events.total("kvstore_framed_bytes_total", direction="in") == 0:
            await world.data.Renew(pb.RenewRequest(leases=[1], lease_seconds=1.0), metadata=metadata)
        error = await world.error_of(world.data.Put(iter([header()]), metadata=metadata))
        assert isinstance(error, Overloaded)
        assert "streams of this connection: the limit is 1 at a time, got one more" in str(error)
        first.cancel()

    played(place, play, connection_streams_max=1, socket_tokens=True, tokens_file=str(tokens))


def test_puts_of_the_unix_socket_have_one_clients_share_of_the_arena(place: Path) -> None:
    async def play(world: Running) -> None:
        await world.data.Open(open_request())
        reply = await world.data.Put(blocks.put_requests(blocks.keys_of(20), ack=AckTier.HOST))
        counts = {run.outcome: run.count for run in wire.outcomes_from_wire(reply.outcomes)}
        assert set(counts) == {PutOutcome.STORED_HOST, PutOutcome.THROTTLED}
        # Of 16 MiB, at 5 pages of 4 KiB a block.
        assert 6 <= counts[PutOutcome.STORED_HOST] <= 8

    played(place, play, session_arena_percent=1)
