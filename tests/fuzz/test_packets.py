"""Whatever comes over a plain socket is a request, a refusal or the end; nothing else, in whatever pieces."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

from kvstore.errors import InvalidArgument
from kvstore.events import Events
from kvstore.rpc.packets import Kind, packet
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.parsing import Malformed
from kvstore.service.streams import PacketStream

ROUNDS = 500
LIMIT = 4096


class Transport:
    """Takes note of whether it may deliver."""

    reads = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def wild(dice: random.Random) -> bytes:
    """Return a few packets, most of them with some bytes changed, lost or doubled."""
    data = bytearray()
    for _ in range(dice.randint(1, 40)):
        request = pb.SessionRequest(request_id=dice.randint(0, 9))
        request.touch.keys = dice.randbytes(dice.choice((0, 32, 5000)))
        kind = dice.choice((Kind.SESSION,) * 9 + (Kind.CHUNK,))
        data += packet(kind, request.SerializeToString())
    for _ in range(dice.choice((0, 0, 1, 5))):
        place = dice.randrange(len(data))
        data[place : place + dice.choice((0, 1, 3))] = dice.randbytes(dice.choice((0, 1, 2)))
    return bytes(data)


async def told(dice: random.Random, data: bytes) -> list[object]:
    """Deliver bytes in pieces, then close; return all that was read."""
    stream, transport = PacketStream(message_bytes_max=LIMIT, events=Events()), Transport()
    stream.connection_made(cast(Any, transport))
    reading = asyncio.ensure_future(_all_of(stream))
    position = 0
    while position < len(data) and not reading.done():
        if transport.reads:
            size = dice.choice((1, 7, 24, 100, 100_000))
            stream.data_received(data[position : position + size])
            position += size
        await asyncio.sleep(0)
    stream.connection_lost(None)
    return await asyncio.wait_for(reading, 10)


async def _all_of(stream: PacketStream) -> list[object]:
    found: list[object] = []
    while True:
        try:
            request = await stream.read()
        except InvalidArgument as error:
            return [*found, error]
        if request is None:
            return found
        found.append(request)


def test_strangers_on_a_plain_socket() -> None:
    kinds: set[type] = set()
    for seed in range(ROUNDS):
        dice = random.Random(seed)
        for each in asyncio.run(told(dice, wild(dice))):
            kinds.add(type(each))
    assert kinds == {pb.SessionRequest, Malformed, InvalidArgument}
