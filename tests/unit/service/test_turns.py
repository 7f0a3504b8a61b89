"""A client with many sessions has one turn, like everybody else."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import Overloaded
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.turns import Turn, Turns
from tests.unit.service.test_session import Stream, World, played


def test_sessions_of_a_client_are_counted_and_limited() -> None:
    turns = Turns(sessions_max=2)
    first = turns.join("a")
    assert turns.join("a") is first
    with pytest.raises(Overloaded, match="the limit is 2 of one client, a has 2"):
        turns.join("a")
    other = turns.join("b")
    turns.leave(first)
    assert turns.join("a") is first
    turns.leave(first)
    turns.leave(first)
    turns.leave(other)
    assert not len(turns)


def test_others_get_in_between_the_sessions_of_a_flood() -> None:
    served: list[str] = []

    async def session(turn: Turn, name: str, requests: int) -> None:
        for _ in range(requests):
            async with turn.quick():
                served.append(name)
            await asyncio.sleep(0)

    async def main() -> None:
        turns = Turns()
        flood = [turns.join("flood") for _ in range(20)]
        quiet = turns.join("quiet")
        sessions = [session(turn, "flood", 10) for turn in flood]
        await asyncio.gather(*sessions, session(quiet, "quiet", 5))

    asyncio.run(main())
    assert served.count("flood") == 200
    last = max(index for index, name in enumerate(served) if name == "quiet")
    assert last < 20, "of 205 requests the five quiet ones come early"


def test_a_session_leaves_its_turn() -> None:
    world = World()

    async def play(stream: Stream) -> None:
        await stream.greet()
        again = await stream.ask(3, hello=pb.HelloRequest(protocol=1, client="another name"))
        assert again.WhichOneof("answer") == "hello"
        assert len(world.gate.turns) == 1

    played(world, play)
    assert not len(world.gate.turns)


def test_a_long_verb_does_not_hold_up_the_quick_ones() -> None:
    order: list[str] = []

    async def main() -> None:
        turns = Turns()
        turn = turns.join("a")
        turns.join("a")
        release = asyncio.Event()

        async def long() -> None:
            async with turn.long():
                await release.wait()
                order.append("long")

        waiting = asyncio.ensure_future(long())
        await asyncio.sleep(0)
        async with turn.quick():
            order.append("quick")
        release.set()
        await waiting

    asyncio.run(main())
    assert order == ["quick", "long"]
