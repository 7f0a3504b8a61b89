"""Two tenants on one daemon over TLS: who is let in, what each can reach, and how tokens change."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore.client import Client, ClientLimits, Transport
from kvstore.errors import PermissionRefused
from kvstore.rpc import wire
from kvstore.rpc.channel import bearer
from kvstore.rpc.packets import SOCKET_SUFFIX
from kvstore.rpc.v1 import admin_pb2
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import MatchMode
from tests.e2e import blocks, certificates
from tests.e2e.served import Home, Served, Wire, refused
from tests.fuzz import probes
from tests.fuzz.probes import SPACES, STORED, TOKENS

ADMIN = "admin-token-of-20-characters"
PROBES = 100
WAYS = {"packets": (), "streams": ("--set", "server.byte_port=off")}
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def tokens_flags(home: Home) -> list[str]:
    """Write a tokens file with both tenants and an administrator; return the flag that names it."""
    file = probes.tokens_file(home.root / "tokens.toml")
    file.write_text(f'{file.read_text()}[[tokens]]\nrole = "admin"\ntoken = "{ADMIN}"\n')
    return ["--set", f"server.tokens_file={file}"]


def plain_flags(home: Home) -> list[str]:
    """Return the flags of a TCP port on loopback without TLS."""
    return ["--tcp", "127.0.0.1:0", "--set", "server.plaintext_loopback=true", *tokens_flags(home)]


@contextmanager
def as_tenant(
    address: str, tenant: str, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[Wire]:
    with Wire(address, metadata=bearer(TOKENS[tenant]), credentials=credentials) as client:
        space = SPACES[tenant]
        request = wire.open_to_wire(space, root=probes.root_of(tenant))
        client.data.Open(request, metadata=client.metadata)
        yield client


def stored_by_acme(client: Wire) -> bytes:
    """Put the prompt as acme; return its keys."""
    keys = probes.keys_of("acme")
    messages = probes.put_of("acme", keys, data=lambda block: blocks.payload(keys, block))
    client.data.Put(iter(messages), metadata=client.metadata)
    return keys


def match(client: Wire, tenant: str, keys: bytes) -> pb.MatchReply:
    return client.data.Match(probes._match(tenant, keys, MatchMode.LEASE), metadata=client.metadata)


def code_of(call: object) -> grpc.StatusCode:
    assert callable(call)
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code = caught.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def test_certificates_of_clients_are_required_and_of_the_right_authority(home: Home) -> None:
    ours, others = (certificates.authority(home.root, name) for name in ("ours", "others"))
    server, client = (certificates.signed(home.root, name, ours) for name in ("server", "client"))
    stranger = certificates.signed(home.root, "stranger", others)
    paths = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": ours.cert}
    flags = [part for name, path in paths.items() for part in ("--set", f"server.{name}={path}")]
    with Served(home, "--tcp", "localhost:0", *flags, *tokens_flags(home)) as daemon:
        address = daemon.fact("tcp")
        good = client.credentials(ours)
        with as_tenant(address, "acme", good) as acme, as_tenant(address, "bolt", good) as bolt:
            keys = stored_by_acme(acme)
            lease = match(acme, "acme", keys).lease
            for number in range(PROBES):
                assert match(bolt, "bolt", keys).blocks == 0
                assert code_of(lambda: match(bolt, "acme", keys)) is grpc.StatusCode.PERMISSION_DENIED
                fetch = pb.FetchRequest(lease=lease + number % 2, payload=True)
                assert code_of(lambda f=fetch: list(bolt.data.Fetch(f, metadata=bolt.metadata))) is (
                    grpc.StatusCode.ABORTED
                )
            got = {
                r.chunk.block: r.chunk.data
                for r in acme.data.Fetch(pb.FetchRequest(lease=lease, payload=True), metadata=acme.metadata)
                if r.WhichOneof("message") == "chunk"
            }
            assert got == {block: blocks.payload(keys, block) for block in range(STORED)}
        without = grpc.ssl_channel_credentials(ours.cert.read_bytes())
        for credentials in (without, stranger.credentials(ours), client.credentials(others), None):
            with Wire(address, metadata=bearer(TOKENS["acme"]), credentials=credentials) as refusee:
                assert code_of(refusee.hello) is grpc.StatusCode.UNAVAILABLE


def test_a_tenant_reaches_its_own_and_nothing_of_the_administration(home: Home) -> None:
    with Served(home, *plain_flags(home)) as daemon:
        address = daemon.fact("tcp")
        with as_tenant(address, "acme") as acme, Wire(address, metadata=bearer(ADMIN)) as admin:
            keys = stored_by_acme(acme)
            assert match(acme, "acme", keys).blocks == STORED
            admin_calls = {
                "Status": admin_pb2.StatusRequest(),
                "Namespaces": admin_pb2.NamespacesRequest(),
                "Inspect": admin_pb2.InspectRequest(namespace=SPACES["acme"].fingerprint, keys=keys),
                "Segments": admin_pb2.SegmentsRequest(),
            }
            for verb, request in admin_calls.items():
                stub = getattr(acme.admin, verb)
                assert code_of(lambda s=stub, r=request: s(r, metadata=acme.metadata)) is (
                    grpc.StatusCode.PERMISSION_DENIED
                )
                getattr(admin.admin, verb)(request, metadata=admin.metadata)
            verify = admin_pb2.VerifyRequest()
            assert code_of(lambda: list(acme.admin.Verify(verify, metadata=acme.metadata))) is (
                grpc.StatusCode.PERMISSION_DENIED
            )
            assert list(admin.admin.Verify(verify, metadata=admin.metadata))[-1].done
            delete = pb.DeleteRequest(namespace=SPACES["acme"].fingerprint, all=True)
            assert admin.data.Delete(delete, metadata=admin.metadata).blocks == STORED
        daemon.stop()
        said = daemon.log + "\n".join(daemon.lines)
        assert not any(token in said for token in (*TOKENS.values(), ADMIN))


@pytest.mark.parametrize("way", ["packets", "streams"])
@pytest.mark.parametrize("listener", ["tcp", "unix"])
def test_the_client_of_a_tenant(home: Home, listener: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.payload.DIAL_SECONDS", 20.0)  # also on a busy machine
    with Served(home, *plain_flags(home), "--set", "server.socket_tokens=true", *WAYS[way]) as daemon:
        address = daemon.fact("tcp") if listener == "tcp" else home.address
        if way == "streams":
            Path(f"{home.socket}{SOCKET_SUFFIX}").unlink()
        limits = ClientLimits(plaintext_on_loopback=True)
        with Client(address, token=TOKENS["acme"], limits=limits) as client:
            store = client.open(SPACES["acme"])
            keys = store.hashes(list(range(64)))
            source = np.arange(4 * blocks.PART.bytes_max, dtype=np.uint8).reshape(4, -1)
            assert store.put(store.root, keys, source).stored == 4
            assert client.transport is Transport.FRAMED
            link = client.runtime.connection.current
            assert link is not None
            assert len(link.payload) == (1 if way == "packets" else 0)
            into = np.zeros_like(source)
            assert store.get(keys, into).blocks == 4
            assert np.array_equal(into, source)
            with pytest.raises(PermissionRefused, match="of tenant 'acme'"):
                client.open(SPACES["bolt"])
        with Client(address, token=TOKENS["bolt"], limits=limits) as client:
            store = client.open(SPACES["bolt"])
            assert store.match(store.hashes(list(range(64)))).blocks == 0
            assert store.get(keys, np.zeros_like(source)).blocks == 0


def test_tokens_change_on_sighup_also_for_sessions_that_are_open(home: Home) -> None:
    with Served(home, *plain_flags(home)) as daemon:
        address = daemon.fact("tcp")
        with as_tenant(address, "acme") as acme:
            acme.hello()
            ask = probes._match("acme", probes.keys_of("acme"), MatchMode.PROBE)
            assert acme.ask(match=ask).WhichOneof("answer") == "match"
            file = home.root / "tokens.toml"
            file.write_text(file.read_text().replace(TOKENS["acme"], "another-token-of-acme-now"))
            daemon.send(signal.SIGHUP)
            deadline = time.monotonic() + 60
            while (reply := acme.ask(match=ask)).WhichOneof("answer") == "match":
                assert time.monotonic() < deadline
            assert reply.error.code == pb.ERROR_CODE_PERMISSION_REFUSED
            assert "no longer valid" in reply.error.message
            assert code_of(acme.receive) is grpc.StatusCode.PERMISSION_DENIED
            request = pb.ReleaseRequest(lease=1, outcome=pb.RELEASE_OUTCOME_UNUSED)
            assert code_of(lambda: acme.data.Release(request, metadata=acme.metadata)) is (
                grpc.StatusCode.UNAUTHENTICATED
            )
            renewed = bearer("another-token-of-acme-now")
            assert not acme.data.Release(request, metadata=renewed).found
            file.write_text("[[")
            daemon.send(signal.SIGHUP)
            assert not acme.data.Release(request, metadata=renewed).found
        daemon.stop()
        assert "tokens read again" in daemon.log
        assert "tokens are as they were" in daemon.log


def test_the_socket_can_ask_for_tokens_and_then_offers_no_mapping(home: Home) -> None:
    with Served(home, "--set", "server.socket_tokens=true", *tokens_flags(home)):
        with Wire(home.address) as stranger:
            assert code_of(stranger.hello) is grpc.StatusCode.UNAUTHENTICATED
        with as_tenant(home.address, "acme") as acme:
            hello = acme.hello(want_mapping=True)
            assert (hello.arena_path, hello.lock_path) == ("", "")
            keys = stored_by_acme(acme)
            assert match(acme, "acme", keys).blocks == STORED
            reserve = pb.ReserveRequest(
                namespace=SPACES["acme"].fingerprint, parent=probes.root_of("acme"), keys=bytes(32)
            )
            reply = acme.ask(reserve=reserve)
            assert reply.error.code == pb.ERROR_CODE_PERMISSION_REFUSED


def test_a_tokens_file_that_others_can_read_is_refused(home: Home) -> None:
    flags = plain_flags(home)
    (home.root / "tokens.toml").chmod(0o644)
    code, complaint = refused(home, *flags)
    assert code == 2
    assert f"chmod 600 {home.root}/tokens.toml" in complaint
    assert not any(token in complaint for token in TOKENS.values())


def test_limits_say_what_limit_and_got(home: Home) -> None:
    limits = ("token_requests_per_second=10", "message_bytes_max=4MiB")
    flags = [part for limit in limits for part in ("--set", f"server.{limit}")]
    with Served(home, *plain_flags(home), *flags) as daemon, as_tenant(daemon.fact("tcp"), "acme") as acme:
        big = pb.RenewRequest(leases=[1] * 600_000, lease_seconds=1.0)
        with pytest.raises(grpc.RpcError) as caught:
            acme.data.Renew(big, metadata=acme.metadata)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert re.search(r"48000\d\d vs\. 4194304", str(caught.value.details()))
        assert "token: the limit is 10 requests a second, got" in first_error(acme)


def first_error(client: Wire) -> str:
    """Match until that is refused; return why."""
    for _ in range(100):
        try:
            match(client, "acme", bytes(32))
        except grpc.RpcError as error:
            return str(wire.error_from_call(error))
    return ""
