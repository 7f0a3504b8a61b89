"""The plain socket of a daemon: greetings good and bad, sessions on packets, their limits and their end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kvstore.api import MatchRequest
from kvstore.rpc import wire
from kvstore.rpc.packets import HEADER_BYTES, SOCKET_SUFFIX, Header, Kind, header_of, packet
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service import plain_socket
from kvstore.types import MatchMode
from tests.e2e import blocks
from tests.unit.service.test_serving import Running, running

TOKEN = "a-token-of-this-test"
GREETING = pb.Greeting(protocol=1, purpose=pb.PURPOSE_SESSION)


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


class Plain:
    """A client's end, played by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @staticmethod
    async def dial(place: Path) -> Plain:
        return Plain(*await asyncio.open_unix_connection(f"{place}/k.sock{SOCKET_SUFFIX}"))

    async def hear(self) -> tuple[Kind, bytes]:
        """Return the next packet."""
        header = header_of(await self._reader.readexactly(HEADER_BYTES), limit=1 << 26)
        return header.kind, await self._reader.readexactly(header.size)

    async def refusal(self) -> pb.Error:
        """Return the error that the daemon ends the connection with."""
        kind, body = await self.hear()
        assert kind is Kind.ERROR
        assert await self._reader.read() == b""
        return pb.Error.FromString(body)

    async def greet(self, greeting: pb.Greeting = GREETING) -> None:
        self.writer.write(packet(Kind.GREETING, greeting.SerializeToString()))
        kind, body = await self.hear()
        assert kind is Kind.GREETING
        assert pb.Greeting.FromString(body).protocol == 1

    async def ask(self, request_id: int, **verb: Any) -> pb.SessionReply:
        self.say(request_id, **verb)
        return await self.answer()

    def say(self, request_id: int, **verb: Any) -> None:
        request = pb.SessionRequest(request_id=request_id, **verb)
        self.writer.write(packet(Kind.SESSION, request.SerializeToString()))

    async def answer(self) -> pb.SessionReply:
        kind, body = await self.hear()
        assert kind is Kind.SESSION
        return pb.SessionReply.FromString(body)

    async def hello(self) -> pb.HelloReply:
        return (await self.ask(1, hello=pb.HelloRequest(protocol=1, client="t", want_mapping=True))).hello

    def stop_reading(self) -> None:
        """Leave in the socket what the daemon says."""
        transport: Any = self.writer.transport
        transport.pause_reading()

    async def closed(self) -> bool:
        """Wait for the daemon to close; say whether nothing came before."""
        return await self._reader.read() == b""


@asynccontextmanager
async def dialled(place: Path) -> AsyncIterator[Plain]:
    plain = await Plain.dial(place)
    try:
        yield plain
    finally:
        plain.writer.close()


def played(place: Path, play: Callable[[Running, Plain], Awaitable[None]], **settings: object) -> None:
    """Run a daemon and a connection that has not greeted yet."""

    async def main() -> None:
        async with running(place, **settings) as world, dialled(place) as plain:
            await asyncio.wait_for(play(world, plain), 30)

    asyncio.run(main())


async def without_sessions(world: Running) -> None:
    """Wait until the daemon has let go of every session."""
    for _ in range(1000):
        if not world.gate.sessions:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a session did not end")


def match(keys: bytes) -> pb.MatchRequest:
    fingerprint = blocks.NAMESPACE.fingerprint
    return wire.match_to_wire(MatchRequest(namespace=fingerprint, keys=keys, mode=MatchMode.LEASE))


def test_a_session_on_packets_is_a_session(place: Path) -> None:
    async def play(world: Running, plain: Plain) -> None:
        await plain.greet()
        hello = await plain.hello()
        assert hello.arena_path
        assert world.gate.sessions == 1
        opened = await plain.ask(2, open=wire.open_to_wire(blocks.NAMESPACE, root=blocks.ROOT))
        assert opened.open.fingerprint == blocks.NAMESPACE.fingerprint
        found = await plain.ask(3, match=match(blocks.keys_of(3)))
        assert found.match.reason == pb.MISS_REASON_NEVER_STORED
        plain.writer.write_eof()  # what a client does that has no more to say
        assert await plain.closed()
        await without_sessions(world)

    played(place, play)


def test_requests_in_pieces_and_many_at_once(place: Path) -> None:
    async def play(world: Running, plain: Plain) -> None:
        await plain.greet()
        await plain.hello()
        for byte in packet(
            Kind.SESSION, pb.SessionRequest(request_id=2, ping=pb.PingRequest()).SerializeToString()
        ):
            plain.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await plain.answer()).request_id == 2
        for number in range(3, 300):
            plain.say(number, ping=pb.PingRequest())
        assert [(await plain.answer()).request_id for _ in range(3, 300)] == list(range(3, 300))

    played(place, play)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: me", "is not known"),
        (packet(Kind.SESSION, b"x"), "begins with one, got SESSION"),
        (packet(Kind.GREETING, b"\xff\xff"), "2 bytes that are no greeting"),
        (Header(Kind.GREETING, 1 << 20).pack(), "the limit is"),
        (
            packet(Kind.GREETING, pb.Greeting(protocol=9, purpose=pb.PURPOSE_SESSION).SerializeToString()),
            "speaks protocol 1, got 9",
        ),
        (packet(Kind.GREETING, pb.Greeting(protocol=1).SerializeToString()), "purpose 0 is not served"),
    ],
)
def test_what_is_no_greeting_is_refused(place: Path, said: bytes, text: str) -> None:
    async def play(world: Running, plain: Plain) -> None:
        plain.writer.write(said)
        refusal = await plain.refusal()
        assert refusal.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert text in refusal.message
        async with dialled(place) as other:  # the daemon goes on
            await other.greet()
            await other.hello()

    played(place, play)


def test_who_says_nothing_is_not_waited_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_socket, "GREETING_SECONDS", 0.05)

    async def play(world: Running, plain: Plain) -> None:
        plain.writer.write(packet(Kind.GREETING, GREETING.SerializeToString())[:10])
        assert await plain.closed()

    played(place, play)


def test_greetings_have_a_limit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_socket, "GREETINGS_MAX", 1)

    async def play(world: Running, plain: Plain) -> None:
        await asyncio.sleep(0.05)  # the first one is being waited for
        async with dialled(place) as other:
            assert (await other.refusal()).code == pb.ERROR_CODE_OVERLOADED
        await plain.greet()

    played(place, play)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (packet(Kind.SESSION, b"\xff\xff"), "no message of this call"),
        (packet(Kind.FETCH), "kind FETCH, SESSION was expected"),
        (b"\0" * HEADER_BYTES, "kind 0 is not known"),
        (Header(Kind.SESSION, 1 << 30).pack(), "the limit is"),
    ],
)
def test_what_is_no_request_ends_the_session(place: Path, said: bytes, text: str) -> None:
    async def play(world: Running, plain: Plain) -> None:
        await plain.greet()
        await plain.hello()
        plain.writer.write(said)
        refusal = await plain.refusal()
        assert refusal.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert text in refusal.message
        await without_sessions(world)

    played(place, play)


def test_sessions_have_a_limit(place: Path) -> None:
    async def play(world: Running, plain: Plain) -> None:
        await plain.greet()
        await plain.hello()
        async with dialled(place) as other:
            await other.greet()
            refusal = await other.refusal()
            assert refusal.code == pb.ERROR_CODE_OVERLOADED
            assert "1 sessions at a time" in refusal.message

    played(place, play, sessions_max=1)


def test_who_does_not_read_is_not_read_from_and_holds_up_nobody(place: Path) -> None:
    async def play(world: Running, plain: Plain) -> None:
        await plain.greet()
        await plain.hello()
        await plain.ask(2, open=wire.open_to_wire(blocks.NAMESPACE, root=blocks.ROOT))
        plain.stop_reading()
        request = match(blocks.keys_of(3))
        number = 2
        while plain.writer.transport.get_write_buffer_size() < 1 << 20:
            number += 1
            plain.say(number, match=request)
            await asyncio.sleep(0)
        async with dialled(place) as other:
            await other.greet()
            await other.hello()
            assert (await other.ask(2, ping=pb.PingRequest())).request_id == 2
            assert world.gate.sessions == 2
        plain.writer.transport.abort()
        await without_sessions(world)

    played(place, play)


def test_a_token_is_needed_where_grpc_needs_one(place: Path) -> None:
    async def play(world: Running, plain: Plain) -> None:
        plain.writer.write(packet(Kind.GREETING, GREETING.SerializeToString()))
        assert (await plain.refusal()).code == pb.ERROR_CODE_PERMISSION_REFUSED
        async with dialled(place) as other:
            await other.greet(pb.Greeting(protocol=1, purpose=pb.PURPOSE_SESSION, token=TOKEN))
            assert not (await other.hello()).arena_path
        assert world.events.total("kvstore_rpc_refusals_total") == 1

    played(place, play, socket_tokens=True, token=TOKEN)


def test_a_daemon_that_stops_ends_its_sessions_and_removes_the_file(place: Path) -> None:
    async def main() -> None:
        async with running(place), dialled(place) as plain:
            await plain.greet()
            await plain.hello()
            ends = asyncio.ensure_future(plain.closed())
        assert await asyncio.wait_for(ends, 30)

    asyncio.run(main())
    assert not list(place.glob("*.sock*"))


def test_a_leftover_goes_and_what_is_no_socket_stays(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = place / f"k.sock{SOCKET_SUFFIX}"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def greets(world: Running, plain: Plain) -> None:
        await plain.greet()
        await plain.hello()

    played(place, greets)
    path.write_text("mine")

    async def without() -> None:
        with caplog.at_level(logging.WARNING):
            async with running(place) as world:
                await world.data.Open(wire.open_to_wire(blocks.NAMESPACE, root=blocks.ROOT))
        assert "no plain socket" in caplog.text
        assert path.read_text() == "mine"

    asyncio.run(without())
