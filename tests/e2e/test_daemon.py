"""The daemon as its users meet it: started without configuration, refused clearly, ended in order."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.cli.main import run
from kvstore.errors import LeaseExpired, UnknownNamespace
from kvstore.metrics import METRICS
from kvstore.rpc import wire
from kvstore.rpc.channel import bearer
from kvstore.rpc.v1 import admin_pb2
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import AckTier, MissReason, PutOutcome
from tests.e2e import blocks
from tests.e2e.served import Home, Served, Wire, refused

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Served]:
    """One daemon for the tests that leave it as it was; each has keys of its own."""
    home = Home()
    with Served(home) as running:
        yield running
    home.remove()


def is_serving(channel: grpc.Channel, service: str = "") -> bool:
    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def scraped(daemon: Served) -> str:
    with urllib.request.urlopen(daemon.fact("metrics")) as answer:
        text: str = answer.read().decode()
    return text


def test_it_starts_without_configuration_and_says_what_it_does(home: Home) -> None:
    with Served(home) as daemon, Wire(home.address) as client:
        assert daemon.fact("socket") == home.address
        assert daemon.fact("host").startswith("64.0 MiB on /dev/shm")
        assert str(home.data) in daemon.fact("ssd")
        assert "0 blocks" in daemon.fact("recovered")
        assert home.socket.stat().st_mode & 0o777 == 0o600
        assert is_serving(client.channel)
        assert is_serving(client.channel, "kvstore.v1.Data")
        document = json.loads(client.admin.Status(admin_pb2.StatusRequest()).document)
        assert document["pid"] == daemon.pid
        assert document["state"] == "serving"
        assert [tier["tier"] for tier in document["tiers"]] == ["host", "ssd"]
        assert daemon.stop() == 0
    assert not home.socket.exists()
    assert not list(home.socket.parent.iterdir())


def test_reflection_answers(shared_daemon: Served) -> None:
    with Wire(shared_daemon.home.address) as client:
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter([request]))
        names = {service.name for service in reply.list_services_response.service}
    assert {"kvstore.v1.Data", "kvstore.v1.Admin", "grpc.health.v1.Health"} <= names


def test_every_metric_is_scraped(shared_daemon: Served) -> None:
    with Wire(shared_daemon.home.address) as client:
        client.hello()
        text = scraped(shared_daemon)
    for metric in METRICS:
        assert f"# HELP {metric.name.removesuffix('_total')}" in text
    assert "kvstore_sessions 1.0" in text
    assert "kvstore_serving 1.0" in text


def test_blocks_survive_a_restart(home: Home) -> None:
    keys = blocks.keys_of(40)
    with Served(home) as daemon, Wire(home.address) as client:
        blocks.open_namespace(client)
        assert blocks.put(client, keys) == [(PutOutcome.STORED_SSD, 40)]
        blocks.assert_fetched(client, keys)
        assert daemon.stop() == 0
    with Served(home, environ={"KVSTORE_LOG__FORMAT": "json"}) as daemon, Wire(home.address) as client:
        assert "40 blocks" in daemon.fact("recovered")
        blocks.open_namespace(client)
        blocks.assert_fetched(client, keys)
        daemon.stop()
        messages = [json.loads(line)["message"] for line in daemon.log.splitlines()]
        assert "recovered" in messages


def test_a_killed_daemon_keeps_what_it_acknowledged(home: Home) -> None:
    keys = blocks.keys_of(40)
    with Served(home) as daemon, Wire(home.address) as client:
        arena = Path(client.hello(want_mapping=True).arena_path)
        blocks.open_namespace(client)
        assert blocks.put(client, keys) == [(PutOutcome.STORED_SSD, 40)]
        daemon.stop(signal.SIGKILL)
    assert home.socket.exists()
    assert arena.exists()
    with Served(home) as daemon, Wire(home.address) as client:
        assert not arena.exists()
        blocks.open_namespace(client)
        blocks.assert_fetched(client, keys)
        daemon.stop()
        assert "removed the socket of a daemon that is gone" in daemon.log


def test_sigterm_writes_what_is_queued(home: Home) -> None:
    keys = blocks.keys_of(600)
    with Served(home) as daemon, Wire(home.address) as client:
        blocks.open_namespace(client)
        assert blocks.put(client, keys, ack=AckTier.HOST) == [(PutOutcome.STORED_HOST, 600)]
        assert daemon.stop() == 0
        assert daemon.lines[-1].startswith("stopped: ")
        assert daemon.lines[-1].endswith("0 B left unwritten")
    with Served(home) as daemon:
        assert "600 blocks" in daemon.fact("recovered")


def test_a_small_disk_keeps_the_newest(home: Home) -> None:
    flags = ["--arena", "16MiB", "--capacity", "24MiB", "--set", "ssd.segment_bytes=4MiB"]
    with Served(home, *flags) as daemon, Wire(home.address) as client:
        blocks.open_namespace(client)
        for seed in range(10):
            keys = blocks.keys_of(200, seed=seed)
            assert blocks.put(client, keys) == [(PutOutcome.STORED_SSD, 200)]
            blocks.assert_fetched(client, keys)
        first = blocks.match(client, blocks.keys_of(200, seed=0))
        assert (first.blocks, first.reason) == (0, MissReason.EVICTED)
        document = json.loads(client.admin.Status(admin_pb2.StatusRequest()).document)
        assert document["tiers"][1]["used_bytes"] <= 24 << 20
        assert 'kvstore_evicted_bytes_total{tier="ssd"}' in scraped(daemon)


def test_what_arrives_damaged_is_refused(shared_daemon: Served) -> None:
    keys = blocks.keys_of(10, seed=1)
    with Wire(shared_daemon.home.address) as client:
        blocks.open_namespace(client)
        outcomes = blocks.put(client, keys, spoiled=6)
        assert outcomes == [(PutOutcome.STORED_SSD, 6), (PutOutcome.REFUSED, 4)]
        assert blocks.match(client, keys).blocks == 6
        assert blocks.put(client, keys) == [(PutOutcome.DUPLICATE, 6), (PutOutcome.STORED_SSD, 4)]
        blocks.assert_fetched(client, keys)


def test_duplicates_end_the_call_before_their_payload(shared_daemon: Served) -> None:
    keys = blocks.keys_of(300, seed=2)
    with Wire(shared_daemon.home.address) as client:
        blocks.open_namespace(client)
        assert blocks.put(client, keys) == [(PutOutcome.STORED_SSD, 300)]
        for _ in range(5):
            assert blocks.put(client, keys) == [(PutOutcome.DUPLICATE, 300)]


def test_what_an_administrator_asks(home: Home) -> None:
    keys = blocks.keys_of(20)
    with Served(home), Wire(home.address) as client:
        blocks.open_namespace(client)
        blocks.put(client, keys)
        (namespace,) = client.admin.Namespaces(admin_pb2.NamespacesRequest()).namespaces
        assert namespace.canonical == blocks.NAMESPACE.canonical()
        assert namespace.blocks == 20
        request = admin_pb2.InspectRequest(namespace=namespace.fingerprint, keys=keys)
        found = client.admin.Inspect(request)
        assert found.visible_blocks == 20
        assert found.runs[0].keys == keys
        (segment,) = client.admin.Segments(admin_pb2.SegmentsRequest()).segments
        assert segment.frames == 1
        assert str(home.data) in segment.path
        steps = list(client.admin.Verify(admin_pb2.VerifyRequest()))
        assert steps[-1].done
        assert steps[-1].blocks_done == steps[-1].blocks_total == 40
        assert not any(step.faults for step in steps)
        with pytest.raises(grpc.RpcError) as caught:
            client.admin.Inspect(admin_pb2.InspectRequest(namespace=b"x" * 32, keys=keys))
        assert isinstance(wire.error_from_call(caught.value), UnknownNamespace)


def test_any_process_may_watch_a_lease(shared_daemon: Served) -> None:
    keys = blocks.keys_of(30, seed=3)
    with Wire(shared_daemon.home.address) as client, Wire(shared_daemon.home.address) as other:
        blocks.open_namespace(client)
        blocks.put(client, keys)
        lease = blocks.match(client, keys).lease
        (news,) = other.data.Fetch(pb.FetchRequest(lease=lease))
        assert news.progress.done
        assert news.progress.blocks == 30
        client.data.Release(pb.ReleaseRequest(lease=lease, used=30, outcome=pb.RELEASE_OUTCOME_USED))
        with pytest.raises(grpc.RpcError) as caught:
            list(other.data.Fetch(pb.FetchRequest(lease=lease)))
        assert isinstance(wire.error_from_call(caught.value), LeaseExpired)


def test_a_second_daemon_on_the_directory_is_refused(home: Home) -> None:
    with Served(home) as daemon:
        code, complaint = refused(home, "--address", f"unix:{home.root}/other.sock")
        assert code == 1
        assert str(home.data) in complaint
        assert f"pid {daemon.pid}" in complaint
        code, complaint = refused(home, "--data", str(home.root / "elsewhere"))
        assert code == 1
        assert "a daemon listens there already" in complaint
        with Wire(home.address) as client:
            assert is_serving(client.channel)


def test_a_leftover_socket_is_no_obstacle(home: Home) -> None:
    home.socket.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(str(home.socket))
    with Served(home), Wire(home.address) as client:
        assert is_serving(client.channel)


def test_what_is_no_socket_is_left_alone(home: Home) -> None:
    home.socket.parent.mkdir(parents=True)
    home.socket.write_text("mine")
    code, complaint = refused(home)
    assert code == 1
    assert "something else has this name" in complaint
    assert home.socket.read_text() == "mine"


def test_a_directory_that_cannot_be_written(home: Home) -> None:
    (home.root / "file").write_text("")
    code, complaint = refused(home, "--data", str(home.root / "file" / "data"))
    assert code == 1
    assert f"{home.root}/file/data" in complaint
    code, complaint = refused(home, "--data", "/proc/kvstore")
    assert code == 1
    assert "/proc/kvstore" in complaint


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory(home: Home) -> None:
    home.data.mkdir(parents=True)
    home.data.chmod(0o500)
    code, complaint = refused(home)
    home.data.chmod(0o700)
    assert code == 1
    assert "Permission denied" in complaint


def test_an_arena_beyond_the_machine(home: Home) -> None:
    code, complaint = refused(home, "--arena", "10TiB")
    assert code in (1, 2)
    assert "Choose a smaller arena" in complaint
    assert "--shm-size" in complaint
    assert not home.socket.exists()


def test_a_full_disk(home: Home) -> None:
    code, complaint = refused(home, "--set", "ssd.min_free_bytes=1000TiB")
    assert code == 1
    assert "are left alone" in complaint


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "ssd.pth=x"], ["flag --set ssd.pth", "ssd.path"]),
        (["--set", "ssd.path"], ["KEY=VALUE"]),
        (["--tcp", "127.0.0.1:0"], ["needs a token", "needs TLS"]),
        (["--arena", "lots"], ["flag --arena", "64GiB"]),
        (["--config", "/nowhere.toml"], ["/nowhere.toml", "No such file"]),
    ],
)
def test_misuse_ends_with_code_2(
    home: Home,
    flags: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "environ", home.environ())
    assert run(["serve", *flags]) == 2
    complaint = capsys.readouterr().err
    assert all(word in complaint for word in words), complaint


def test_a_token_that_others_can_read_is_refused(home: Home) -> None:
    token = home.root / "token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    flags = [
        "--tcp",
        "127.0.0.1:0",
        "--set",
        f"server.token_file={token}",
        "--set",
        "server.plaintext_loopback=true",
    ]
    code, complaint = refused(home, *flags)
    assert code == 2
    assert f"chmod 600 {token}" in complaint
    assert TOKEN not in complaint


def test_python_without_assertions_is_refused(home: Home) -> None:
    code, complaint = refused(home, command=[sys.executable, "-O", "-m", "kvstore.cli.main", "serve"])
    assert code == 1
    assert "-O" in complaint


def test_tcp_needs_the_token_and_never_offers_the_mapping(home: Home) -> None:
    token = home.root / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    flags = [
        "--tcp",
        "127.0.0.1:0",
        "--set",
        f"server.token_file={token}",
        "--set",
        "server.plaintext_loopback=true",
    ]
    with Served(home, *flags) as daemon:
        address = daemon.fact("tcp")
        with Wire(address) as stranger:
            for call in (lambda: stranger.hello(), lambda: stranger.admin.Status(admin_pb2.StatusRequest())):
                with pytest.raises(grpc.RpcError) as caught:
                    call()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert is_serving(stranger.channel)
        with Wire(address, metadata=bearer(TOKEN[:-1] + "x")) as wrong, pytest.raises(grpc.RpcError):
            wrong.hello()
        assert "kvstore_rpc_refusals_total 3.0" in scraped(daemon)
        with Wire(address, metadata=bearer(TOKEN)) as remote:
            hello = remote.hello(want_mapping=True)
            assert (hello.arena_path, hello.lock_path, hello.arena_id) == ("", "", 0)
            blocks.open_namespace(remote)
            keys = blocks.keys_of(5)
            assert blocks.put(remote, keys) == [(PutOutcome.STORED_SSD, 5)]
            blocks.assert_fetched(remote, keys)
        with Wire(home.address) as local:
            assert local.hello(want_mapping=True).arena_path
        daemon.stop()
        assert TOKEN not in daemon.log
        assert TOKEN not in "\n".join(daemon.lines)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tcp_with_certificates_of_both_ends(home: Home) -> None:
    cert, key, token = home.root / "cert.pem", home.root / "key.pem", home.root / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    certificate = f"-x509 -newkey rsa:2048 -nodes -days 1 -out {cert} -keyout {key} -subj /CN=localhost"
    command = f"openssl req {certificate} -addext subjectAltName=DNS:localhost"
    subprocess.run(command.split(), check=True, capture_output=True)
    settings = {"token_file": token, "tls_cert": cert, "tls_key": key, "tls_client_ca": cert}
    flags = [part for name, path in settings.items() for part in ("--set", f"server.{name}={path}")]
    with Served(home, "--tcp", "localhost:0", *flags) as daemon:
        known = grpc.ssl_channel_credentials(cert.read_bytes(), key.read_bytes(), cert.read_bytes())
        unknown = grpc.ssl_channel_credentials(cert.read_bytes())
        with Wire(daemon.fact("tcp"), metadata=bearer(TOKEN), credentials=known) as remote:
            assert remote.hello(want_mapping=True).arena_path == ""
        for credentials in (unknown, None):
            stranger = Wire(daemon.fact("tcp"), metadata=bearer(TOKEN), credentials=credentials)
            with stranger, pytest.raises(grpc.RpcError):
                stranger.hello()


def test_a_taken_metrics_port_moves_when_nobody_chose_it(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        chosen = f"127.0.0.1:{taken.getsockname()[1]}"
        code, complaint = refused(home, "--metrics", chosen)
        assert code == 1
        assert chosen in complaint
        assert not home.socket.exists()


def test_two_signals_end_it_at_once(home: Home) -> None:
    with Served(home) as daemon, Wire(home.address) as client:
        arena = Path(client.hello(want_mapping=True).arena_path)
        daemon.send(signal.SIGTERM)
        daemon.send(signal.SIGTERM)
        assert daemon.wait() in (0, 1)
    assert not home.socket.exists()
    assert not arena.exists()


def test_without_an_ssd_it_is_a_host_cache(home: Home) -> None:
    keys = blocks.keys_of(5)
    with Served(home, "--set", "ssd.enabled=false") as daemon, Wire(home.address) as client:
        assert daemon.fact("ssd").startswith("off")
        blocks.open_namespace(client)
        assert blocks.put(client, keys, ack=AckTier.SSD) == [(PutOutcome.STORED_HOST, 5)]
        blocks.assert_fetched(client, keys)
        assert not home.data.exists()
        assert daemon.stop() == 0
