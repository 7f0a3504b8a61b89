"""The client against a real daemon: both transports, and every way in which either of them can fall over."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.api import OutcomeRun, PartBlocks
from kvstore.client import Client, ClientLimits, Match, OpenNamespace, TlsFiles, Transport
from kvstore.copying import Bytes
from kvstore.errors import LayoutMismatch, PermissionRefused
from kvstore.layout import CacheGroup, Layout, Part, Segment
from kvstore.namespace import Namespace
from kvstore.rpc.v1 import admin_pb2
from kvstore.types import HASH_BYTES, AckTier, Addressing, MissReason, PutOutcome, ReleaseOutcome, Tier
from tests.e2e.served import Home, Served, Wire

LAYOUT = Layout.single(dtype="u8", bytes_max=40_000, layers=4, segments=4)
NAMESPACE = Namespace(model="tiny", weights="v1", layout=LAYOUT, block_tokens=16)
SECONDS = 20.0
"""A deadline that no test waits for."""
LIMITS = ClientLimits(breaker_seconds=0.1, breaker_seconds_max=0.1)
FALLBACKS = "kvstore_client_fallbacks_total"
WORKER = Path(__file__).with_name("client_worker.py")


@pytest.fixture
def daemon(home: Home) -> Iterator[Served]:
    with Served(home) as running:
        yield running


@pytest.fixture(params=[Transport.MAPPED, Transport.FRAMED])
def client(daemon: Served, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(daemon.home.address, transport=request.param, limits=LIMITS) as connected:
        yield connected


@pytest.fixture
def namespace(client: Client) -> OpenNamespace:
    return client.open(NAMESPACE)


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Served]:
    """One daemon for the tests that leave it as it was; each has a namespace of its own."""
    home = Home()
    with Served(home) as running:
        yield running
    home.remove()


@pytest.fixture(params=["mapped", "packets", "streams"])
def shared_client(
    shared_daemon: Served, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    """Return a client of each way for payload: the arena, a socket of its own, gRPC."""
    if request.param == "streams":
        monkeypatch.setattr("kvstore.client.payload.SOCKET_SUFFIX", ".nobody-listens-here")
    transport = Transport.MAPPED if request.param == "mapped" else Transport.FRAMED
    with Client(shared_daemon.home.address, transport=transport, limits=LIMITS) as connected:
        yield connected
        link = connected.runtime.connection.current
        assert link is None or len(link.payload) == 0 or request.param != "streams"


@pytest.fixture
def shared_namespace(shared_client: Client, request: pytest.FixtureRequest) -> OpenNamespace:
    return shared_client.open(dataclasses.replace(NAMESPACE, weights=request.node.name))


def prompt(namespace: OpenNamespace, blocks: int, *, seed: int = 0) -> tuple[bytes, Bytes]:
    """Return the keys and the bytes of a prompt."""
    random = np.random.default_rng(seed)
    keys = namespace.hashes(random.integers(0, 1 << 20, 16 * blocks))
    return keys, random.integers(0, 256, (blocks, 40_000), dtype=np.uint8)


def stored(namespace: OpenNamespace, blocks: int = 20, *, ack: AckTier = AckTier.HOST) -> tuple[bytes, Bytes]:
    keys, source = prompt(namespace, blocks)
    put = namespace.put(namespace.root, keys, source, ack=ack, deadline_seconds=SECONDS)
    assert put.stored == blocks, put
    return keys, source


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another process brings about."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


def gauge(home: Home, name: str) -> float:
    """Return a gauge of the daemon's."""
    with Wire(home.address) as tool:
        status = json.loads(tool.admin.Status(admin_pb2.StatusRequest()).document)
    return float(status["gauges"][name])


def test_put_match_fetch_release(shared_daemon: Served, shared_namespace: OpenNamespace) -> None:
    keys, source = stored(shared_namespace)
    into = np.zeros_like(source)
    match = shared_namespace.match(keys, owner="request-1", deadline_seconds=SECONDS)
    assert (match.blocks, match.reason, match.boundaries[0]) == (20, None, 20)
    assert gauge(shared_daemon.home, "kvstore_leases") == 1
    fetched = shared_namespace.fetch(match, into, deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (20, None)
    assert np.array_equal(into, source)
    shared_namespace.release(match, used=20)
    shared_namespace.release(match, used=20)
    until(lambda: gauge(shared_daemon.home, "kvstore_leases") == 0)


def test_a_longer_prompt_adds_its_tail(shared_namespace: OpenNamespace) -> None:
    keys, source = prompt(shared_namespace, 12)
    assert (
        shared_namespace.put(
            shared_namespace.root, keys[: 8 * HASH_BYTES], source[:8], deadline_seconds=SECONDS
        ).stored
        == 8
    )
    whole = shared_namespace.put(shared_namespace.root, keys, source, deadline_seconds=SECONDS)
    assert (whole.stored, whole.present) == (4, 12), whole
    assert whole.outcomes[0] == OutcomeRun(PutOutcome.DUPLICATE, 8)
    into = np.zeros_like(source)
    assert shared_namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 12
    assert np.array_equal(into, source)


def test_a_get_says_where_the_blocks_came_from_after_a_restart(
    home: Home, daemon: Served, client: Client, namespace: OpenNamespace
) -> None:
    keys, source = stored(namespace, ack=AckTier.SSD)
    boot = client.boot_id
    assert daemon.stop() == 0
    until(lambda: not client.connected)
    with Served(home):
        until(lambda: client.connected)
        assert client.boot_id != boot
        into = np.zeros_like(source)
        fetched = namespace.get(keys, into, deadline_seconds=SECONDS)
        assert (fetched.blocks, fetched.reason) == (20, None)
        assert [(run.tier, run.count) for run in fetched.tiers] == [(Tier.SSD, 20)]
        assert np.array_equal(into, source)
        again = namespace.get(keys, into, deadline_seconds=SECONDS)
        assert [run.tier for run in again.tiers] == [Tier.HOST]


def test_a_killed_daemon_is_a_miss_and_what_it_acknowledged_comes_back(
    home: Home, daemon: Served, client: Client, namespace: OpenNamespace
) -> None:
    keys, source = stored(namespace, ack=AckTier.SSD)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    daemon.stop(signal.SIGKILL)
    assert namespace.match(keys, deadline_seconds=SECONDS).reason is MissReason.DAEMON_GONE
    assert namespace.put(namespace.root, keys, source).reason is MissReason.DAEMON_GONE
    assert client.events.total(FALLBACKS, reason="daemon_gone") == 2
    with Served(home):
        until(lambda: client.connected)
        into = np.zeros_like(source)
        assert namespace.fetch(match, into).reason is MissReason.DAEMON_GONE
        assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 20
        assert np.array_equal(into, source)


def test_a_hung_daemon_is_a_miss_and_then_all_is_well(
    daemon: Served, client: Client, namespace: OpenNamespace
) -> None:
    keys, source = stored(namespace)
    into = np.zeros_like(source)
    daemon.send(signal.SIGSTOP)
    start = time.monotonic()
    reasons = [namespace.match(keys, deadline_seconds=0.02).reason for _ in range(4)]
    assert reasons == [MissReason.DEADLINE] * 3 + [MissReason.BREAKER_OPEN]
    assert namespace.get(keys, into, deadline_seconds=0.1).reason in (
        MissReason.DEADLINE,
        MissReason.BREAKER_OPEN,
    )
    assert namespace.put(namespace.root, keys, source, deadline_seconds=0.2).reason is not None
    assert time.monotonic() - start < SECONDS / 2, "deadlines hold"
    daemon.send(signal.SIGCONT)
    until(lambda: namespace.match(keys, deadline_seconds=1.0).blocks == 20)
    assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 20
    assert np.array_equal(into, source)
    assert client.events.total(FALLBACKS, reason="deadline") >= 3
    # What was answered too late was given back, so all that is left are the leases of `until`.
    client.close()
    until(lambda: gauge(daemon.home, "kvstore_leases") == 0)
    until(lambda: gauge(daemon.home, "kvstore_reservations") == 0)


def test_late_leases_go_back_by_themselves(shared_daemon: Served, shared_namespace: OpenNamespace) -> None:
    keys, _ = stored(shared_namespace)
    shared_daemon.send(signal.SIGSTOP)
    assert shared_namespace.match(keys, deadline_seconds=0.02).reason is MissReason.DEADLINE
    assert (
        shared_namespace.submit_match(keys, deadline_seconds=0.02).result(SECONDS).reason
        is MissReason.DEADLINE
    )
    shared_daemon.send(signal.SIGCONT)
    until(lambda: gauge(shared_daemon.home, "kvstore_leases") == 0)
    assert shared_namespace.match(keys, deadline_seconds=SECONDS).blocks == 20


def test_a_daemon_that_hangs_in_a_fetch_ends_it_at_its_deadline(
    shared_daemon: Served, shared_namespace: OpenNamespace
) -> None:
    keys, source = stored(shared_namespace)
    match = shared_namespace.match(keys, deadline_seconds=SECONDS)
    shared_daemon.send(signal.SIGSTOP)
    into = np.zeros_like(source)
    fetched = shared_namespace.fetch(match, into, deadline_seconds=0.2)
    if shared_namespace.client.transport is Transport.MAPPED:
        assert fetched.blocks == 20, "what lies in the arena needs no daemon"
    else:
        assert (fetched.blocks, fetched.reason) == (0, MissReason.DEADLINE)
    shared_daemon.send(signal.SIGCONT)
    assert shared_namespace.fetch(match, into, deadline_seconds=SECONDS).blocks == 20
    assert np.array_equal(into, source)


@pytest.mark.parametrize("step", ["leased", "reserved"])
def test_a_killed_client_holds_nothing(daemon: Served, step: str) -> None:
    command = [sys.executable, str(WORKER), daemon.home.address, step]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=WORKER.parents[2]
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == f"{step}\n"
        name = "kvstore_leases" if step == "leased" else "kvstore_reservations"
        assert gauge(daemon.home, name) == 1
        worker.kill()
    until(lambda: gauge(daemon.home, name) == 0)
    until(lambda: gauge(daemon.home, "kvstore_quarantined_slots") == 0)
    with Client(daemon.home.address) as client:
        namespace = client.open(NAMESPACE)
        keys, source = prompt(namespace, 20)
        assert namespace.put(namespace.root, keys, source, deadline_seconds=SECONDS).present == 20


def test_a_writer_that_lost_its_session_keeps_its_slots_quarantined_until_it_is_dead(daemon: Served) -> None:
    command = [sys.executable, str(WORKER), daemon.home.address, "reserved"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=WORKER.parents[2]
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "reserved\n"
        worker.stdin.write("hold\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "holding\n"
        until(lambda: gauge(daemon.home, "kvstore_reservations") == 0)
        assert gauge(daemon.home, "kvstore_quarantined_slots") > 0
        worker.kill()
    until(lambda: gauge(daemon.home, "kvstore_quarantined_slots") == 0)


@pytest.mark.parametrize("retention_class", ["handoff", "agent"])
def test_bytes_that_changed_in_the_arena_are_never_a_hit(daemon: Served, retention_class: str) -> None:
    with Client(daemon.home.address, transport=Transport.MAPPED) as client:
        namespace = client.open(NAMESPACE, retention_class=retention_class)
        keys, source = stored(namespace, ack=AckTier.SSD)
        match = namespace.match(keys, deadline_seconds=SECONDS)
        assert match.link is not None
        slot = int(match.extents[0].slots[7])
        match.link.writable_arena().bytes[slot * 4096 + 30_000] ^= 1
        into = np.zeros_like(source)
        fetched = namespace.fetch(match, into, deadline_seconds=SECONDS)
        assert (fetched.blocks, fetched.reason) == (7, MissReason.CORRUPT)
        assert np.array_equal(into[:7], source[:7])
        again = namespace.get(keys, into, deadline_seconds=SECONDS)
        if retention_class == "agent":
            assert (again.blocks, again.reason) == (20, None), "the copy on SSD is as good as ever"
        else:
            assert (again.blocks, again.reason) == (7, MissReason.CORRUPT)
            repaired = namespace.put(namespace.root, keys, source, deadline_seconds=SECONDS)
            assert (repaired.stored, repaired.present) == (13, 20)
            assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 20
        assert np.array_equal(into, source)


def test_layer_major_buffers_and_short_records(shared_namespace: OpenNamespace) -> None:
    keys, source = prompt(shared_namespace, 3)
    columns = [np.ascontiguousarray(source[:, i : i + 10_000]) for i in range(0, 40_000, 10_000)]
    lengths = [40_000, 25_000, 1]
    put = shared_namespace.put(
        shared_namespace.root, keys, columns, lengths=lengths, deadline_seconds=SECONDS
    )
    assert put.stored == 3
    into = [np.zeros((3, 10_000), np.uint8) for _ in range(4)]
    assert shared_namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 3
    whole = np.concatenate(into, axis=1)
    for row, length in enumerate(lengths):
        assert np.array_equal(whole[row, :length], source[row, :length])
        assert not whole[row, length:].any()


def test_two_ranks_put_their_parts_under_one_put_id(
    shared_client: Client, request: pytest.FixtureRequest
) -> None:
    layout = Layout(
        "u8",
        (CacheGroup("kv"),),
        tuple(Part(i, "kv", f"tp{i}", 9000, (Segment(0, 1, 0, 9000),)) for i in range(2)),
    ).checked()
    namespace = shared_client.open(
        Namespace(model="tp2", weights=request.node.name, layout=layout, block_tokens=16)
    )
    keys, source = prompt(namespace, 4)
    shards = [np.ascontiguousarray(source[:, i * 9000 : (i + 1) * 9000]) for i in range(2)]

    def put(rank: int) -> PutOutcome:
        parts = (PartBlocks(rank, 0, 4),)
        answer = namespace.put(
            namespace.root, keys, shards[rank], parts=parts, put_id=b"p", deadline_seconds=SECONDS
        )
        assert [run.count for run in answer.outcomes] == [4], answer
        return answer.outcomes[0].outcome

    assert put(0) is PutOutcome.PART_PENDING
    assert namespace.match(keys, deadline_seconds=SECONDS).blocks == 0
    assert put(1) is PutOutcome.STORED_HOST
    into = {rank: np.zeros((4, 9000), np.uint8) for rank in range(2)}
    assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 4
    assert all(np.array_equal(into[rank], shards[rank]) for rank in range(2))
    mine = namespace.match(keys, parts=(1,), deadline_seconds=SECONDS)
    assert {extent.part for extent in mine.extents} == {1}
    only = np.zeros((4, 9000), np.uint8)
    assert namespace.fetch(mine, only, deadline_seconds=SECONDS).blocks == 4
    assert np.array_equal(only, shards[1])


def test_flat_addressing(shared_client: Client, request: pytest.FixtureRequest) -> None:
    flat = Namespace(
        model="flat",
        weights=request.node.name,
        layout=LAYOUT,
        block_tokens=1,
        addressing=Addressing.FLAT,
    )
    namespace = shared_client.open(flat)
    keys, source = prompt(namespace, 3)
    keys = keys[: 3 * HASH_BYTES]
    order = keys[HASH_BYTES:] + keys[:HASH_BYTES]
    assert namespace.put(namespace.root, keys, source[:3], deadline_seconds=SECONDS).stored == 3
    into = np.zeros((3, 40_000), np.uint8)
    assert namespace.get(order, into, deadline_seconds=SECONDS).blocks == 3
    assert np.array_equal(into, np.roll(source[:3], -1, axis=0))


def test_a_lease_is_good_in_another_client(shared_daemon: Served, shared_namespace: OpenNamespace) -> None:
    keys, source = stored(shared_namespace)
    match = shared_namespace.match(keys, deadline_seconds=SECONDS)
    into = np.zeros_like(source)
    with Client(shared_daemon.home.address, transport=shared_namespace.client.transport) as other:
        bearer = Match(blocks=match.blocks, lease=match.lease, ready=False)
        fetched = other.open(shared_namespace.namespace).fetch(bearer, into, deadline_seconds=SECONDS)
        assert (fetched.blocks, fetched.reason) == (20, None)
    assert np.array_equal(into, source)
    shared_namespace.release(match, used=0, outcome=ReleaseOutcome.UNUSED)


def test_an_ended_lease_is_a_miss(shared_namespace: OpenNamespace) -> None:
    keys, source = stored(shared_namespace)
    match = shared_namespace.match(keys, deadline_seconds=SECONDS)
    shared_namespace.release(match, used=0)
    assert not shared_namespace.renew(match)
    bearer = Match(blocks=match.blocks, lease=match.lease, ready=False)
    fetched = shared_namespace.fetch(bearer, np.zeros_like(source), deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (0, MissReason.EVICTED)


def test_the_small_verbs(shared_namespace: OpenNamespace) -> None:
    keys, _ = stored(shared_namespace)
    assert shared_namespace.touch(keys) == 20
    match = shared_namespace.match(keys, lease_seconds=5.0, deadline_seconds=SECONDS)
    assert shared_namespace.renew(match, 30.0)
    prefetch = shared_namespace.prefetch(keys, deadline_seconds=5.0)
    assert (prefetch.blocks, prefetch.resident, prefetch.reason) == (20, 20, None)
    page = shared_namespace.list()
    assert (len(page.runs), page.cursor) == (1, "")
    assert page.runs[0].keys == keys
    assert page.runs[0].retention_class == "agent"
    shared_namespace.release(match, used=0)
    assert shared_namespace.delete(keys[10 * HASH_BYTES : 11 * HASH_BYTES]) == 10
    shorter = shared_namespace.match(keys, deadline_seconds=SECONDS)
    assert (shorter.blocks, shorter.reason) == (10, MissReason.DELETED)
    shared_namespace.release(shorter, used=0)
    assert shared_namespace.delete(None) == 10


def test_another_layout_is_refused_with_both_sides(
    shared_client: Client, shared_namespace: OpenNamespace
) -> None:
    stored(shared_namespace)
    other = Layout.single(dtype="u8", bytes_max=20_000, layers=4, segments=4)
    with pytest.raises(LayoutMismatch, match=r"same identity, different layout.*40000.*20000"):
        shared_client.open(dataclasses.replace(shared_namespace.namespace, layout=other))


def test_tcp_with_tls_and_a_token(home: Home) -> None:
    token, certificate, key = (home.root / name for name in ("token", "cert.pem", "key.pem"))
    token.write_text("correct-horse-battery-staple\n")
    token.chmod(0o600)
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    settings = {"token_file": token, "tls_cert": certificate, "tls_key": key}
    flags = [part for name, path in settings.items() for part in ("--set", f"server.{name}={path}")]
    with Served(home, "--tcp", "127.0.0.1:0", *flags) as daemon:
        address, tls = daemon.fact("tcp").split(",")[0], TlsFiles(str(certificate))
        with Client(address, token=token.read_text().strip(), tls=tls) as client:
            namespace = client.open(NAMESPACE)
            keys, source = stored(namespace)
            assert client.transport is Transport.FRAMED
            into = np.zeros_like(source)
            assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 20
            assert np.array_equal(into, source)
        with Client(address, token="wrong", tls=tls) as stranger, pytest.raises(PermissionRefused):
            stranger.open(NAMESPACE)
