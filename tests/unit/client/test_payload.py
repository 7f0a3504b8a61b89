"""Payload connections of a client: kept, found dead, refused; and what a daemon may do to them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.client import Client, ClientLimits, Match, OpenNamespace, Transport
from kvstore.client.link import Link
from kvstore.errors import (
    InvalidArgument,
    KVStoreError,
    LeaseExpired,
    Overloaded,
    PermissionRefused,
    ShuttingDown,
)
from kvstore.rpc.packets import Header, Kind, packet
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import HASH_BYTES, MissReason
from tests.unit.client.conftest import (
    LIMITS,
    NAMESPACE,
    SECONDS,
    empty,
    keys_of,
    payload,
    stored,
    until,
)
from tests.unit.client.fake_daemon import FakeDaemon
from tests.unit.client.fake_port import SUFFIX, FakePort, error

FETCH, PUT = Kind.FETCH, Kind.PUT


@pytest.fixture(autouse=True)
def suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.payload.SOCKET_SUFFIX", SUFFIX)


@pytest.fixture
def port(daemon: FakeDaemon) -> Iterator[FakePort]:
    made = FakePort(daemon)
    yield made
    made.stop()


@pytest.fixture
def client(port: FakePort) -> Iterator[Client]:
    with Client(port.daemon.address, transport=Transport.FRAMED, limits=LIMITS) as connected:
        yield connected


def link_of(client: Client) -> Link:
    link = client.runtime.connection.current
    assert link is not None
    return link


def got(
    namespace: OpenNamespace, blocks: int = 3, *, seconds: float = SECONDS
) -> tuple[int, MissReason | None]:
    into = empty(blocks)
    fetched = namespace.get(keys_of(namespace, blocks), into, deadline_seconds=seconds)
    assert np.array_equal(into[: fetched.blocks], payload(blocks)[: fetched.blocks])
    return fetched.blocks, fetched.reason


def test_one_connection_serves_one_request_after_the_other(port: FakePort, namespace: OpenNamespace) -> None:
    stored(namespace)
    assert [got(namespace) for _ in range(3)] == [(3, None)] * 3
    assert port.requests == [PUT, FETCH, FETCH, FETCH]
    assert len(port.greetings) == 1
    assert port.greetings[0].purpose == pb.PURPOSE_PAYLOAD


def test_a_put_sends_only_what_is_wanted(port: FakePort, namespace: OpenNamespace) -> None:
    stored(namespace)
    chunks: list[int] = []
    inner = port._put_messages

    def count(sock: socket.socket, header: pb.PutRequest.Header) -> Iterator[pb.PutRequest]:
        for message in inner(sock, header):
            if message.WhichOneof("message") == "chunk":
                chunks.append(message.chunk.block)
            yield message

    port._put_messages = count  # type: ignore[method-assign]
    keys = keys_of(namespace, 5)
    put = namespace.put(namespace.root, keys, payload(5), deadline_seconds=SECONDS)
    assert (put.stored, put.present) == (2, 5)
    assert chunks == [3, 4]
    again = namespace.put(namespace.root, keys, payload(5), deadline_seconds=SECONDS)
    assert (again.stored, again.present) == (0, 5)
    assert len(port.greetings) == 1, "a put of which nothing was wanted leaves the connection in order"


def test_requests_at_a_time_have_a_connection_each(port: FakePort, namespace: OpenNamespace) -> None:
    stored(namespace)
    meet = threading.Barrier(3, timeout=SECONDS)

    def together(sock: socket.socket, header: Header, body: bytes) -> bool:
        meet.wait()
        return port.serve(sock, header, body)

    port.answer = together
    into = [empty(3) for _ in range(3)]
    tickets = [namespace.submit_get(keys_of(namespace, 3), each, deadline_seconds=SECONDS) for each in into]
    assert [ticket.result(SECONDS).blocks for ticket in tickets] == [3, 3, 3]
    assert len(port.greetings) == 3
    port.answer = port.serve
    got(namespace)
    assert len(port.greetings) == 3


def test_a_connection_that_died_while_it_rested_costs_nothing(
    port: FakePort, namespace: OpenNamespace
) -> None:
    stored(namespace)
    port.hang_up()
    assert got(namespace) == (3, None)
    assert len(port.greetings) == 2


def test_a_kept_connection_that_ends_at_the_request_is_replaced(
    port: FakePort, namespace: OpenNamespace
) -> None:
    """The daemon may close a connection that rests at the moment when a request is on its way."""
    stored(namespace)

    def once(sock: socket.socket, header: Header, body: bytes) -> bool:
        port.answer = port.serve
        return False

    port.answer = once
    assert got(namespace) == (3, None)
    assert port.requests == [PUT, FETCH, FETCH]
    assert len(port.greetings) == 2


def test_a_new_connection_that_ends_at_the_request_is_a_miss(
    port: FakePort, namespace: OpenNamespace
) -> None:
    stored(namespace)
    port.hang_up()
    port.answer = lambda *_: False
    assert got(namespace) == (0, MissReason.DAEMON_GONE)
    port.answer = port.serve
    assert got(namespace) == (3, None)


def test_what_ends_early_ends_its_connection(port: FakePort, namespace: OpenNamespace) -> None:
    """Two blocks of a lease on three: the third need not be received."""
    keys = stored(namespace)

    def never_ending(sock: socket.socket, header: Header, body: bytes) -> bool:
        names = [keys[i : i + HASH_BYTES] for i in range(0, len(keys), HASH_BYTES)]
        extent = port.daemon.extent(names[:2])
        sock.sendall(port.progress(done=False, blocks=3, extents=(extent,)))
        for block in range(2):
            data = payload(3)[block].tobytes()
            sock.sendall(Header(Kind.CHUNK, len(data), 0, block).pack() + data)
        return sock.recv(1) != b""

    port.answer = never_ending
    match = namespace.match(keys, deadline_seconds=SECONDS)
    assert namespace.fetch(match, empty(3), blocks=2, deadline_seconds=SECONDS).blocks == 2
    until(lambda: port.connections[0].fileno() < 0)
    port.answer = port.serve
    assert got(namespace) == (3, None)


def test_rows_with_gaps_and_layers(port: FakePort, namespace: OpenNamespace) -> None:
    source = payload(3)
    keys = keys_of(namespace, 3)
    layers = [source[:, i : i + 2000].copy() for i in range(0, 8000, 2000)]
    assert namespace.put(namespace.root, keys, layers, deadline_seconds=SECONDS).stored == 3
    wide = np.zeros((3, 16_000), np.uint8)
    assert namespace.get(keys, wide[:, ::2], deadline_seconds=SECONDS).blocks == 3
    assert np.array_equal(wide[:, ::2], source)
    assert not wide[:, 1::2].any()
    into = [np.zeros((3, 2000), np.uint8) for _ in range(4)]
    assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 3
    assert np.array_equal(np.concatenate(into, axis=1), source)
    assert port.requests == [PUT, FETCH, FETCH]


def test_a_put_out_of_rows_with_gaps(port: FakePort, namespace: OpenNamespace) -> None:
    wide = np.repeat(payload(3), 2, axis=1)
    keys = keys_of(namespace, 3)
    assert namespace.put(namespace.root, keys, wide[:, ::2], deadline_seconds=SECONDS).stored == 3
    assert got(namespace) == (3, None)


@pytest.mark.parametrize("chunk_bytes", [1, 999, 8000, 1 << 20])
def test_chunks_of_any_size(port: FakePort, chunk_bytes: int) -> None:
    limits = ClientLimits(chunk_bytes=chunk_bytes)
    with Client(port.daemon.address, transport=Transport.FRAMED, limits=limits) as client:
        namespace = client.open(NAMESPACE)
        layers = [payload(1)[:, i : i + 2000].copy() for i in range(0, 8000, 2000)]
        keys = keys_of(namespace, 1)
        assert namespace.put(namespace.root, keys, layers, deadline_seconds=SECONDS).stored == 1
        into = empty(1)
        assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 1
        assert np.array_equal(into, payload(1))


def test_news_of_a_lease_taken_elsewhere_comes_this_way(port: FakePort) -> None:
    with Client(port.daemon.address, limits=LIMITS) as client:
        assert client.ping(SECONDS) >= 0
        assert client.transport is Transport.MAPPED
        namespace = client.open(NAMESPACE)
        keys = stored(namespace)
        match = namespace.match(keys, deadline_seconds=SECONDS)
        elsewhere = Match(blocks=3, lease=match.lease, ready=False)
        into = empty(3)
        assert namespace.fetch(elsewhere, into, deadline_seconds=SECONDS).blocks == 3
        assert np.array_equal(into, payload(3))
        assert port.requests == [FETCH]


# What a daemon may do


def nonsense(sock: socket.socket, port: FakePort) -> None:
    sock.sendall(b"\xff" * 24)


def wrong_kind(sock: socket.socket, port: FakePort) -> None:
    sock.sendall(packet(Kind.GREETING))


def no_message(sock: socket.socket, port: FakePort) -> None:
    sock.sendall(packet(Kind.PROGRESS, b"\xff" * 9))


def unannounced(sock: socket.socket, port: FakePort) -> None:
    sock.sendall(port.progress(blocks=3) + Header(Kind.CHUNK, 4, 0, 1).pack() + b"abcd")


def too_long(sock: socket.socket, port: FakePort) -> None:
    extent = port.daemon.extent(list(port.daemon.blocks))
    sock.sendall(port.progress(blocks=3, extents=(extent,)) + Header(Kind.CHUNK, 8001).pack() + bytes(8001))


def a_gap(sock: socket.socket, port: FakePort) -> None:
    extent = port.daemon.extent(list(port.daemon.blocks))
    sock.sendall(port.progress(blocks=3, extents=(extent,)) + Header(Kind.CHUNK, 4, 0, 0, 4).pack() + b"abcd")


def half_a_header(sock: socket.socket, port: FakePort) -> None:
    sock.sendall(packet(Kind.END)[:20])


def half_a_block(sock: socket.socket, port: FakePort) -> None:
    extent = port.daemon.extent(list(port.daemon.blocks))
    sock.sendall(port.progress(blocks=3, extents=(extent,)) + Header(Kind.CHUNK, 8000).pack() + bytes(4000))


@pytest.mark.parametrize(
    "says",
    [nonsense, wrong_kind, no_message, unannounced, too_long, a_gap, half_a_header, half_a_block],
)
def test_a_fetch_that_cannot_be_read_is_a_miss_and_its_connection_is_over(
    says: Callable[[socket.socket, FakePort], None], port: FakePort, namespace: OpenNamespace
) -> None:
    stored(namespace)

    def say(sock: socket.socket, header: Header, body: bytes) -> bool:
        says(sock, port)
        return False

    port.answer = say
    assert got(namespace) == (0, MissReason.DAEMON_GONE)
    port.answer = port.serve
    assert got(namespace) == (3, None)
    # What broke before a header was whole was tried again: it was a kept connection.
    assert len(port.greetings) == (3 if says is half_a_header else 2)


@pytest.mark.parametrize("says", [nonsense, wrong_kind, no_message, half_a_header])
def test_a_put_whose_answer_cannot_be_read_is_a_miss(
    says: Callable[[socket.socket, FakePort], None], port: FakePort, namespace: OpenNamespace
) -> None:
    def say(sock: socket.socket, header: Header, body: bytes) -> bool:
        says(sock, port)
        return False

    port.answer = say
    put = namespace.put(namespace.root, keys_of(namespace, 3), payload(3), deadline_seconds=SECONDS)
    assert (put.stored, put.reason) == (0, MissReason.DAEMON_GONE)
    port.answer = port.serve
    stored(namespace)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (LeaseExpired("lease 77"), MissReason.EVICTED),
        (Overloaded("full"), MissReason.THROTTLED),
        (ShuttingDown("ends"), MissReason.DAEMON_GONE),
    ],
)
def test_an_error_is_what_the_daemon_says_and_the_connection_goes_on(
    failure: KVStoreError, reason: MissReason, port: FakePort, namespace: OpenNamespace
) -> None:
    stored(namespace)

    def refuse(sock: socket.socket, header: Header, body: bytes) -> bool:
        sock.sendall(error(failure))
        return True

    port.answer = refuse
    assert got(namespace) == (0, reason)
    put = namespace.put(namespace.root, keys_of(namespace, 3), payload(3), deadline_seconds=SECONDS)
    assert put.reason is reason
    port.answer = port.serve
    assert got(namespace) == (3, None)
    assert len(port.greetings) == 1


def test_a_put_that_is_refused_in_its_midst_says_why(port: FakePort, namespace: OpenNamespace) -> None:
    def refuse(sock: socket.socket, header: Header, body: bytes) -> bool:
        reserved = port.daemon.reserve(pb.PutRequest.Header.FromString(body).reserve.keys)
        from kvstore.rpc import wire

        first = pb.PutReply(outcomes=wire.outcomes_to_wire(reserved.outcomes))
        sock.sendall(packet(Kind.PUT_REPLY, first.SerializeToString()))
        sock.sendall(error(Overloaded("the disk is slow")))
        return False

    port.answer = refuse
    keys = keys_of(namespace, 64)
    put = namespace.put(namespace.root, keys, payload(64), deadline_seconds=SECONDS)
    assert (put.stored, put.reason) == (0, MissReason.THROTTLED)


def test_a_daemon_that_says_nothing_is_a_miss_at_the_deadline(
    port: FakePort, namespace: OpenNamespace
) -> None:
    stored(namespace)
    over = threading.Event()

    def hang(sock: socket.socket, header: Header, body: bytes) -> bool:
        over.wait(SECONDS)
        return False

    port.answer = hang
    match = namespace.match(keys_of(namespace, 3), deadline_seconds=SECONDS)
    fetched = namespace.fetch(match, empty(3), deadline_seconds=0.1)
    assert (fetched.blocks, fetched.reason) == (0, MissReason.DEADLINE)
    put = namespace.put(namespace.root, keys_of(namespace, 3), payload(3), deadline_seconds=0.1)
    assert put.reason is MissReason.DEADLINE
    over.set()


def test_closing_ends_a_fetch_under_way(port: FakePort, client: Client, namespace: OpenNamespace) -> None:
    stored(namespace)
    asked, over = threading.Event(), threading.Event()

    def hang(sock: socket.socket, header: Header, body: bytes) -> bool:
        asked.set()
        over.wait(SECONDS)
        return False

    port.answer = hang
    match = namespace.match(keys_of(namespace, 3), deadline_seconds=SECONDS)
    ticket = namespace.submit_fetch(match, empty(3), deadline_seconds=SECONDS)
    assert asked.wait(SECONDS)
    link_of(client).retire()
    assert ticket.result(SECONDS).reason is MissReason.DAEMON_GONE
    over.set()


# Where there is no port, or none to speak of


def test_without_a_port_payload_goes_through_grpc(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(daemon.address, transport=Transport.FRAMED, limits=LIMITS) as client:
        namespace = client.open(NAMESPACE)
        stored(namespace)
        assert [got(namespace), got(namespace)] == [(3, None)] * 2
    assert caplog.text.count("payload goes through gRPC") == 1


@pytest.mark.parametrize("says", ["something else", "that it is of another kind"])
def test_a_port_that_does_not_greet_is_not_asked_again(
    says: str, port: FakePort, namespace: OpenNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    port.greeting = error(InvalidArgument("greeting: no")) if "kind" in says else b"\xff" * 24
    stored(namespace)
    assert got(namespace) == (3, None)
    assert not port.requests
    assert len(port.greetings) == (1 if "kind" in says else 2), "who speaks nonsense may be ending"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(Overloaded("full"), MissReason.THROTTLED), (ShuttingDown("x"), MissReason.DAEMON_GONE)],
)
def test_a_greeting_that_is_refused_for_now_is_a_miss(
    failure: KVStoreError, reason: MissReason, port: FakePort, namespace: OpenNamespace
) -> None:
    greeting, port.greeting = port.greeting, error(failure)
    put = namespace.put(namespace.root, keys_of(namespace, 3), payload(3), deadline_seconds=SECONDS)
    assert put.reason is reason
    port.greeting = greeting
    stored(namespace)
    assert port.requests == [PUT]


def test_a_token_that_is_refused_is_raised(port: FakePort, namespace: OpenNamespace) -> None:
    port.greeting = error(PermissionRefused("token"))
    with pytest.raises(PermissionRefused):
        namespace.put(namespace.root, keys_of(namespace, 3), payload(3), deadline_seconds=SECONDS)


def test_a_port_that_hangs_in_its_greeting_does_not_take_the_deadline_with_it(
    port: FakePort, namespace: OpenNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.payload.DIAL_SECONDS", 0.05)
    greeting, port.greeting = port.greeting, b""
    stored(namespace)
    assert not port.requests
    port.greeting = greeting
    assert got(namespace) == (3, None)
    assert port.requests == [FETCH]


def test_retired_links_leave_no_connections_behind(
    port: FakePort, client: Client, namespace: OpenNamespace
) -> None:
    stored(namespace)
    link_of(client).retire()
    until(lambda: port.connections[0].fileno() < 0)
