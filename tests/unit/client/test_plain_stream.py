"""Sessions on a plain socket: what goes at once and what waits, how it ends, and how it is dialled."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, ClientLimits, Transport
from kvstore.client.deadline import Deadline
from kvstore.client.dial import Target
from kvstore.client.session import Session
from kvstore.client.streams import PacketStream, dial_plain
from kvstore.clock import SystemClock
from kvstore.errors import DeadlineExceeded, KVStoreError, PermissionRefused, TierUnavailable
from kvstore.rpc.packets import HEADER_BYTES, SOCKET_SUFFIX, Header, Kind, packet
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import error_to_wire
from tests.unit.client.conftest import LIMITS, NAMESPACE, SECONDS, keys_of, stored, until
from tests.unit.client.fake_daemon import FakeDaemon
from tests.unit.client.fake_plain import read_body, requests_of

BIG = 1 << 20
"""Keys that no socket takes at once."""


class Pair:
    """A session, and the daemon's end of its socket played by hand."""

    def __init__(self) -> None:
        ours, self.daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.over = threading.Event()
        self.orphans: list[pb.SessionReply] = []
        self.session = Session(
            PacketStream(ours), requests_max=100, on_orphan=self.orphans.append, on_end=self.over.set
        )

    def say(self, reply: pb.SessionReply) -> None:
        self.daemon.sendall(packet(Kind.SESSION, reply.SerializeToString()))

    def close(self) -> None:
        self.daemon.close()
        self.session.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair()) as made:
        yield made


def touch(keys: bytes = b"k") -> pb.SessionRequest:
    return pb.SessionRequest(touch=pb.TouchRequest(keys=keys))


def ignore(outcome: object) -> None:
    """Hear an answer that no test is about."""


def target(path: Path, **fields: Any) -> Target:
    known = {"token": "", "tls": None, "transport": Transport.AUTO, "limits": ClientLimits()}
    return Target(address=f"unix:{path}", **(known | fields))


def soon() -> Deadline:
    return Deadline(SystemClock(), 0.2)


def test_a_request_leaves_on_the_thread_that_makes_it(pair: Pair) -> None:
    pair.session.submit(touch(), ignore)
    pair.daemon.setblocking(False)  # it is there already
    assert len(pair.daemon.recv(100)) > HEADER_BYTES


def test_what_the_socket_does_not_take_waits_and_keeps_its_order(pair: Pair) -> None:
    sent = [touch(bytes([number]) * (BIG if number < 3 else 10)) for number in range(20)]
    for request in sent:
        pair.session.submit(request, ignore)  # returns, although nobody reads
    heard = requests_of(pair.daemon)
    assert [next(heard).touch.keys for _ in sent] == [request.touch.keys for request in sent]
    for number, request in enumerate(sent, start=1):
        assert request.request_id == number


def test_releases_wait_behind_what_waits(pair: Pair) -> None:
    pair.session.submit(touch(b"a" * BIG), ignore)
    pair.session.release(pb.ReleaseRequest(lease=5))
    pair.session.submit(touch(b"b"), ignore)
    heard = requests_of(pair.daemon)
    assert [next(heard).WhichOneof("verb") for _ in range(3)] == ["touch", "release", "touch"]


def test_a_daemon_that_reads_nothing_costs_a_deadline(pair: Pair) -> None:
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            pair.session.ask(touch(b"k" * BIG), 0.05)


def test_an_answer_that_comes_too_late_is_an_orphan(pair: Pair) -> None:
    with pytest.raises(DeadlineExceeded):
        pair.session.ask(touch(), 0.05)
    pair.say(pb.SessionReply(request_id=1, touch=pb.TouchReply(blocks=4)))
    until(lambda: pair.orphans)
    assert pair.orphans[0].touch.blocks == 4


def test_what_was_said_before_a_close_goes_out_before_the_end(pair: Pair) -> None:
    pair.session.release(pb.ReleaseRequest(lease=9))
    pair.session.close()
    assert [request.release.lease for request in requests_of(pair.daemon)] == [9]
    assert pair.daemon.recv(1) == b""


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        (b"", TierUnavailable, "the daemon ended it"),
        (b"\1\0", TierUnavailable, "broke off in a packet"),
        (packet(Kind.SESSION, b"1234567")[:-3], TierUnavailable, "broke off in a packet"),
        (b"\xff" * HEADER_BYTES, TierUnavailable, "kind 4294967295 is not known"),
        (Header(Kind.SESSION, 1 << 30).pack(), TierUnavailable, "the limit is"),
        (packet(Kind.PUT_REPLY), TierUnavailable, "a packet of kind PUT_REPLY"),
        (packet(Kind.SESSION, b"\xff\xff"), TierUnavailable, "2 bytes that are no reply"),
        (
            packet(Kind.ERROR, error_to_wire(PermissionRefused("withdrawn")).SerializeToString()),
            PermissionRefused,
            "withdrawn",
        ),
    ],
)
def test_a_stream_that_breaks_ends_the_session(
    pair: Pair, said: bytes, error: type[KVStoreError], text: str
) -> None:
    outcomes: list[object] = []
    pair.session.submit(touch(), outcomes.append)
    pair.daemon.sendall(said)
    pair.daemon.shutdown(socket.SHUT_WR)
    assert pair.over.wait(SECONDS)
    assert isinstance(outcomes[0], error)
    assert text in str(outcomes[0])
    with pytest.raises(error, match=text):
        pair.session.ask(touch(), 1.0)


def test_a_client_takes_the_plain_socket_and_makes_no_channel(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, NAMESPACE.layout, plain=True)
    assert daemon.plain is not None
    with Client(daemon.address, token="t" * 20, limits=LIMITS) as client:
        namespace = client.open(NAMESPACE)
        assert namespace.match(stored(namespace), deadline_seconds=SECONDS).blocks == 3
        link = client.runtime.connection.current
        assert link is not None
        assert link._channel is None
        assert [greeting.token for greeting in daemon.plain.greetings] == ["t" * 20]
    daemon.stop()


def test_without_a_plain_socket_there_is_grpc(tmp_path: Path) -> None:
    assert dial_plain(target(tmp_path / "nobody"), soon()) is None
    leftover = tmp_path / f"gone{SOCKET_SUFFIX}"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(leftover))
    assert dial_plain(target(tmp_path / "gone"), soon()) is None
    assert (
        dial_plain(
            Target(address="host:1", token="", tls=None, transport=Transport.AUTO, limits=LIMITS), soon()
        )
        is None
    )


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(f"{path}{SOCKET_SUFFIX}")
    sock.listen()
    return sock


def test_a_daemon_that_does_not_greet_is_not_waited_for(tmp_path: Path) -> None:
    with listening(tmp_path / "hung"), pytest.raises(DeadlineExceeded, match="no greeting"):
        dial_plain(target(tmp_path / "hung"), soon())


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"", TierUnavailable, "closed the connection"),
        (packet(Kind.END), TierUnavailable, "kind END"),
        (b"\xff" * HEADER_BYTES, TierUnavailable, "cannot be read"),
        (
            packet(Kind.ERROR, error_to_wire(PermissionRefused("no token")).SerializeToString()),
            PermissionRefused,
            "no token",
        ),
    ],
)
def test_a_greeting_that_is_refused_or_none(
    tmp_path: Path, answer: bytes, error: type[KVStoreError], text: str
) -> None:
    with listening(tmp_path / "odd") as sock:

        def refuse() -> None:
            accepted, _ = sock.accept()
            with accepted:
                read_body(accepted, Kind.GREETING)
                accepted.sendall(answer)

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(error, match=text):
            dial_plain(target(tmp_path / "odd"), Deadline(SystemClock(), SECONDS))
        thread.join()


def test_a_session_outlives_no_daemon(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, NAMESPACE.layout, plain=True)
    with Client(daemon.address, limits=LIMITS) as client:
        namespace = client.open(NAMESPACE)
        keys = keys_of(namespace, 2)
        assert namespace.match(keys, deadline_seconds=SECONDS).blocks == 0
        daemon.stop()
        until(lambda: client.runtime.connection.current is None)


def test_a_stream_that_is_over_can_be_left_to_the_parent() -> None:
    ours, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stream = PacketStream(ours)
    daemon.close()
    assert list(stream.replies()) == []
    stream.leave_to_parent()
