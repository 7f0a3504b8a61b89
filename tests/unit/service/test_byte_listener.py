"""Where payload connections arrive: who is greeted, who is not, and where it listens."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.rpc.packets import (
    GREETING_BYTES_MAX,
    Header,
    Kind,
    error_from_body,
    header_of,
    packet,
    read_exactly,
)
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service import byte_listener
from kvstore.service.access import TRUSTED, Caller
from kvstore.service.byte_listener import GREETINGS_MAX, ByteListener, bind_byte_port
from kvstore.settings import ServerSettings
from tests.support.raw_payload import Raw, connected, has_ended
from tests.unit.service.test_byte_port import World, on_a_thread, place

__all__ = ["place"]  # a fixture


def trusting(token: str, peer: str) -> Caller:
    return TRUSTED


def on_a_listener(place: Path, act: Callable[[World], None], **listener: Any) -> None:
    """Play an act against a listener of its own beside a daemon in this process."""

    def beside(world: World) -> None:
        world.socket = place / "own.bytes"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(world.socket))
            listening.listen(128)
            made = ByteListener(listening, world.running.serving.payload, caller_with=trusting, **listener)
            made.start()
            try:
                act(world)
            finally:
                made.stop()

    on_a_thread(place, beside)


def greeting(**fields: object) -> bytes:
    message = pb.Greeting(protocol=1, purpose=pb.PURPOSE_PAYLOAD)
    for name, value in fields.items():
        setattr(message, name, value)
    return packet(Kind.GREETING, message.SerializeToString())


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "is not known"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "is not known"),
        (b"\x16\x03\x01" + bytes(200), "is not known"),
        (bytes(24), "kind 0 is not known"),
        (Header(Kind.GREETING, GREETING_BYTES_MAX + 1).pack(), f"the limit is {GREETING_BYTES_MAX} bytes"),
        (Header(Kind.GREETING, (1 << 32) - 1).pack(), f"the limit is {GREETING_BYTES_MAX} bytes"),
        (packet(Kind.FETCH), "a connection begins with one, got FETCH"),
        (packet(Kind.GREETING, b"\xff" * 9), "9 bytes that are no greeting"),
        (greeting(protocol=2), "speaks protocol 1, got 2"),
        (greeting(purpose=pb.PURPOSE_SESSION), "this port is for payload"),
        (greeting(purpose=0), "this port is for payload"),
    ],
)
def test_what_is_no_greeting_is_told_so(sent: bytes, words: str, place: Path) -> None:
    def act(world: World) -> None:
        with connected(world.socket) as sock:
            sock.sendall(sent)
            header = header_of(read_exactly(sock, 24), limit=1 << 20)
            assert header.kind is Kind.ERROR
            error = error_from_body(bytes(read_exactly(sock, header.size)))
            assert isinstance(error, InvalidArgument)
            assert words in str(error)
            assert has_ended(sock)
        world.stored()

    on_a_listener(place, act)


@pytest.mark.parametrize("sent", [b"", b"\1", greeting()[:23], greeting()[:-1]])
def test_who_leaves_in_mid_greeting_is_forgotten(
    sent: bytes, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def act(world: World) -> None:
        with connected(world.socket) as sock:
            sock.sendall(sent)
        world.stored()

    with caplog.at_level(logging.INFO):
        on_a_listener(place, act)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("sent", [b"", b"\1", greeting()[:-1]])
def test_who_is_slow_to_greet_is_let_go_of(sent: bytes, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteListener.__init__, "__kwdefaults__", {"tls": None, "greeting_seconds": 0.1})

    def act(world: World) -> None:
        with connected(world.socket) as sock:
            sock.sendall(sent)
            assert has_ended(sock)

    on_a_listener(place, act, greeting_seconds=0.1)


def test_of_too_many_that_do_not_greet_the_oldest_goes(place: Path) -> None:
    def act(world: World) -> None:
        silent = [connected(world.socket) for _ in range(GREETINGS_MAX)]
        try:
            with Raw(world.socket):
                assert has_ended(silent[0])
                silent[1].settimeout(0)
                with pytest.raises(BlockingIOError):
                    silent[1].recv(1)
        finally:
            for sock in silent:
                sock.close()

    on_a_listener(place, act)


def test_a_fault_in_greeting_ends_that_connection_alone(
    place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    def act(world: World) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(byte_listener, "countdown", lambda _: fail)
            with connected(world.socket) as sock:
                assert has_ended(sock)
        world.stored()

    on_a_listener(place, act)
    assert "payload greeting failed" in caplog.text


# Where it listens


def settings(**fields: object) -> ServerSettings:
    return ServerSettings(address="unix:/x", plaintext_loopback=True, **fields)  # type: ignore[arg-type]


@pytest.fixture
def free() -> Callable[[], int]:
    """Return numbers of ports that are free, as is the next one."""

    def find() -> int:
        while True:
            with socket.create_server(("127.0.0.1", 0)) as first:
                port = int(first.getsockname()[1])
                try:
                    with socket.create_server(("127.0.0.1", port + 1)):
                        return port
                except (OSError, OverflowError):
                    continue

    return find


def test_the_next_port(free: Callable[[], int]) -> None:
    port = free()
    made = bind_byte_port(settings(tcp_address=f"127.0.0.1:{port}"), f"127.0.0.1:{port}")
    assert made is not None
    with made:
        assert made.getsockname() == ("127.0.0.1", port + 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_any_port_beside_any_port(host: str) -> None:
    made = bind_byte_port(settings(tcp_address=f"{host}:0"), f"{host}:4711")
    assert made is not None
    with made:
        assert made.getsockname()[1] not in (0, 4712)


def test_off(free: Callable[[], int]) -> None:
    port = free()
    assert (
        bind_byte_port(settings(tcp_address=f"127.0.0.1:{port}", byte_port="off"), f"127.0.0.1:{port}")
        is None
    )


def test_a_port_that_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        below = f"127.0.0.1:{port - 1}"
        assert bind_byte_port(settings(tcp_address=below), below) is None
        assert "no byte port: payload goes through gRPC" in caplog.text
        named = settings(tcp_address=below, byte_port=port)
        with pytest.raises(TierUnavailable, match=rf"server\.byte_port: port {port} beside .*{below}"):
            bind_byte_port(named, below)


def test_there_is_no_port_behind_the_last(caplog: pytest.LogCaptureFixture) -> None:
    last = "127.0.0.1:65535"
    assert bind_byte_port(settings(tcp_address=last), last) is None
    assert "port 65536" in vars(caplog.records[-1])["cause"]


def test_a_thread_that_cannot_start_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("can't start new thread")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: object = None
        listener = ByteListener(listening, port, caller_with=trusting)  # type: ignore[arg-type]
        listener.start()
        with monkeypatch.context() as patch:
            patch.setattr("threading.Thread.start", fail)
            with connected(listening.getsockname()) as sock:
                assert has_ended(sock)
        listener.stop()
    assert "payload connection refused" in caplog.text
