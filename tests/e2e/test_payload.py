"""Payload on sockets of its own against a real daemon: TCP, TLS, a daemon that dies or hangs."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Client, ClientLimits, OpenNamespace, TlsFiles, Transport
from kvstore.client.link import Link
from kvstore.client.receiving import Receiver
from kvstore.errors import PermissionRefused, TierUnavailable
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.rpc.packets import greet
from kvstore.rpc.pipe import Pipe
from kvstore.rpc.v1 import admin_pb2
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import MissReason
from tests.e2e import certificates
from tests.e2e.served import Home, Served, Wire, refused
from tests.support.raw_payload import Raw, connected, has_ended

BLOCK, BLOCKS = 1 << 20, 24
"""Far more than the sockets between both ends hold."""
SPACE = Namespace(
    model="large",
    weights="v1",
    layout=Layout.single(dtype="u8", bytes_max=BLOCK, layers=1, segments=1),
    block_tokens=16,
)
TOKEN = "a-token-of-20-characters"
SECONDS = 20.0
LIMITS = ClientLimits(plaintext_on_loopback=True, breaker_seconds=0.1, breaker_seconds_max=0.1)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason for another way."""
    monkeypatch.setattr("kvstore.client.payload.DIAL_SECONDS", SECONDS)


def token_flags(home: Home) -> list[str]:
    file = home.root / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return ["--set", f"server.token_file={file}"]


def tcp_flags(home: Home) -> list[str]:
    return ["--tcp", "127.0.0.1:0", "--set", "server.plaintext_loopback=true", *token_flags(home)]


def link_of(client: Client) -> Link:
    link = client.runtime.connection.current
    assert link is not None
    return link


def prompt(namespace: OpenNamespace) -> tuple[bytes, np.ndarray[tuple[int, int], np.dtype[np.uint8]]]:
    keys = namespace.hashes(list(range(16 * BLOCKS)))
    return keys, np.random.default_rng(3).integers(0, 256, (BLOCKS, BLOCK), dtype=np.uint8)


def comes_back(client: Client) -> None:
    """Put and get everything."""
    namespace = client.open(SPACE)
    keys, source = prompt(namespace)
    assert namespace.put(namespace.root, keys, source, deadline_seconds=SECONDS).present == BLOCKS
    into = np.zeros_like(source)
    assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == BLOCKS
    assert np.array_equal(into, source)


def status(home: Home) -> Any:
    with Wire(home.address) as tool:
        return json.loads(tool.admin.Status(admin_pb2.StatusRequest()).document)


def gauge(home: Home, name: str) -> float:
    return float(status(home)["gauges"][name])


def sent(home: Home) -> float:
    """Return how many bytes of payload the daemon has sent."""
    counters = status(home)["counters"]
    return float(sum(value for name, value in counters.items() if "framed_bytes" in name and "out" in name))


@pytest.mark.parametrize("port", ["next", "off"])
def test_of_a_window_only_its_blocks_travel(home: Home, port: str) -> None:
    with (
        Served(home, *tcp_flags(home), "--set", f"server.byte_port={port}") as daemon,
        Client(daemon.fact("tcp"), token=TOKEN, limits=LIMITS) as client,
    ):
        comes_back(client)
        namespace = client.open(SPACE)
        keys, source = prompt(namespace)
        match = namespace.match(keys, deadline_seconds=SECONDS)
        before = sent(home)
        into = np.zeros((5, BLOCK), np.uint8)
        fetched = namespace.fetch(match, into, first=7, blocks=5, deadline_seconds=SECONDS)
        assert fetched.blocks == 5
        assert np.array_equal(into, source[7:12])
        assert sent(home) - before == into.nbytes
        assert len(link_of(client).payload) == (port == "next"), "the connection serves again"


def test_over_tcp_it_has_a_port_of_its_own(home: Home) -> None:
    with Served(home, *tcp_flags(home)) as daemon:
        said = daemon.fact("payload")
        assert said.startswith("port ")
        with Client(daemon.fact("tcp"), token=TOKEN, limits=LIMITS) as client:
            comes_back(client)
            assert len(link_of(client).payload) == 1
        with pytest.raises(PermissionRefused):
            Raw(("127.0.0.1", int(said.removeprefix("port "))), token="another-token-of-20-characters")


def test_a_port_that_is_off_leaves_grpc(home: Home) -> None:
    with Served(home, *tcp_flags(home), "--set", "server.byte_port=off") as daemon:
        assert daemon.fact("payload") == "in gRPC: no byte port"
        with Client(daemon.fact("tcp"), token=TOKEN, limits=LIMITS) as client:
            comes_back(client)
            assert len(link_of(client).payload) == 0


def test_a_port_that_was_named_and_is_taken_is_an_error(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, complaint = refused(home, *tcp_flags(home), "--set", f"server.byte_port={port}")
    assert code == 1
    assert f"server.byte_port: port {port} beside server.tcp_address" in complaint


def test_a_port_that_is_no_port_is_an_error(home: Home) -> None:
    code, complaint = refused(home, *tcp_flags(home), "--set", "server.byte_port=70000")
    assert code == 2
    assert "expected a port (1 to 65535), next or off" in complaint


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_it_is_secured_as_the_other_port_is(home: Home) -> None:
    ours, others = (certificates.authority(home.root, name) for name in ("ours", "others"))
    server, client = (certificates.signed(home.root, name, ours) for name in ("server", "client"))
    stranger = certificates.signed(home.root, "stranger", others)
    paths = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": ours.cert}
    flags = [part for name, path in paths.items() for part in ("--set", f"server.{name}={path}")]
    with Served(home, "--tcp", "localhost:0", *flags, *token_flags(home)) as daemon:
        files = TlsFiles(str(ours.cert), str(client.cert), str(client.key))
        with Client(daemon.fact("tcp"), token=TOKEN, tls=files, limits=LIMITS) as good:
            comes_back(good)
            assert len(link_of(good).payload) == 1
        port = int(daemon.fact("payload").removeprefix("port "))
        for mine in (None, stranger):
            assert not _is_let_in(port, ours.cert, mine)
        assert _is_let_in(port, ours.cert, client)
        with pytest.raises(ssl.SSLError):
            _is_let_in(port, others.cert, client)
        with connected(("localhost", port)) as plain:
            plain.sendall(b"\1" * 64)
            while not has_ended(plain):  # an alert comes first
                pass


def _is_let_in(port: int, authority: Path, mine: certificates.Certificate | None) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    if mine is not None:
        context.load_cert_chain(mine.cert, mine.key)
    with (
        connected(("localhost", port)) as sock,
        context.wrap_socket(sock, server_hostname="localhost") as tls,
    ):
        try:
            # Under TLS 1.3 a client hears of its certificate only when it reads.
            greet(tls, pb.PURPOSE_PAYLOAD, token=TOKEN)
        except (ssl.SSLError, ConnectionError, TierUnavailable):
            return False
        return True


# In the midst


class After:
    """Sends the daemon a signal when something has happened for the fifth time."""

    def __init__(self, daemon: Served, number: signal.Signals) -> None:
        self._daemon = daemon
        self._number = number
        self.count = 0

    def noting(self, act: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: object, **kwargs: object) -> None:
            act(*args, **kwargs)
            self.count += 1
            if self.count == 5:
                self._daemon.send(self._number)
                if self._number is signal.SIGKILL:
                    self._daemon.wait()

        return noted


FALLS = [(signal.SIGSTOP, MissReason.DEADLINE, 1.0), (signal.SIGKILL, MissReason.DAEMON_GONE, SECONDS)]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize(("number", "reason", "seconds"), FALLS)
def test_a_daemon_that_falls_in_the_midst_of_a_fetch(
    number: signal.Signals,
    reason: MissReason,
    seconds: float,
    transport: str,
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Served(home, *tcp_flags(home)) as daemon:
        address, token = (home.address, "") if transport == "unix" else (daemon.fact("tcp"), TOKEN)
        with Client(address, token=token, limits=LIMITS, transport=Transport.FRAMED) as client:
            comes_back(client)
            namespace = client.open(SPACE)
            keys, source = prompt(namespace)
            match = namespace.match(keys, deadline_seconds=SECONDS)
            into = np.zeros_like(source)
            after = After(daemon, number)
            with monkeypatch.context() as patch:
                patch.setattr(Receiver, "arrived_whole", after.noting(Receiver.arrived_whole))
                fetched = namespace.fetch(match, into, deadline_seconds=seconds)
            assert after.count >= 5
            assert fetched.reason is reason
            assert 5 <= fetched.blocks < BLOCKS
            assert np.array_equal(into[: fetched.blocks], source[: fetched.blocks])
            if number is signal.SIGSTOP:
                daemon.send(signal.SIGCONT)
                assert namespace.fetch(match, into, deadline_seconds=SECONDS).blocks == BLOCKS
                assert np.array_equal(into, source)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize(("number", "reason", "seconds"), FALLS)
def test_a_daemon_that_falls_in_the_midst_of_a_put(
    number: signal.Signals,
    reason: MissReason,
    seconds: float,
    transport: str,
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Served(home, *tcp_flags(home)) as daemon:
        address, token = (home.address, "") if transport == "unix" else (daemon.fact("tcp"), TOKEN)
        with Client(address, token=token, limits=LIMITS, transport=Transport.FRAMED) as client:
            namespace = client.open(SPACE)
            keys, source = prompt(namespace)
            after = After(daemon, number)
            with monkeypatch.context() as patch:
                patch.setattr(Pipe, "write", after.noting(Pipe.write))
                put = namespace.put(namespace.root, keys, source, deadline_seconds=seconds)
            assert (put.present, put.reason) == (0, reason)
            if number is signal.SIGSTOP:
                daemon.send(signal.SIGCONT)
                # The client has closed the connection: the slots are lent again.
                comes_back(client)
                assert gauge(home, "kvstore_reservations") == 0


def test_a_daemon_that_stops_in_order_in_the_midst_of_a_fetch(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way may end within a moment, or is ended; the daemon goes in time in either case."""
    with Served(home) as daemon, Client(home.address, transport=Transport.FRAMED) as client:
        comes_back(client)
        namespace = client.open(SPACE)
        keys, source = prompt(namespace)
        match = namespace.match(keys, deadline_seconds=SECONDS)
        into = np.zeros_like(source)
        after = After(daemon, signal.SIGTERM)
        with monkeypatch.context() as patch:
            patch.setattr(Receiver, "arrived_whole", after.noting(Receiver.arrived_whole))
            fetched = namespace.fetch(match, into, deadline_seconds=SECONDS)
        assert after.count >= 5
        assert fetched.reason in (None, MissReason.DAEMON_GONE)
        assert np.array_equal(into[: fetched.blocks], source[: fetched.blocks])
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.log
