"""The daemon is late, hung, gone, restarted or talks nonsense: a miss with a reason, then all is well."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Client, ClientLimits, OpenNamespace, Transport
from kvstore.errors import (
    DeadlineExceeded,
    LayoutMismatch,
    Overloaded,
    PermissionRefused,
    ShuttingDown,
    TierUnavailable,
)
from kvstore.rpc import wire
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import HASH_BYTES, MissReason
from tests.unit.client.conftest import (
    LAYOUT,
    LIMITS,
    NAMESPACE,
    SECONDS,
    empty,
    keys_of,
    payload,
    stored,
    until,
)
from tests.unit.client.fake_daemon import Answer, FakeDaemon

FALLBACKS = "kvstore_client_fallbacks_total"


def test_a_late_match_is_a_miss_and_gives_its_lease_back(
    daemon: FakeDaemon, client: Client, namespace: OpenNamespace
) -> None:
    keys = stored(namespace)
    daemon.gate.clear()
    match = namespace.match(keys, deadline_seconds=0.02)
    assert (match.blocks, match.lease, match.reason) == (0, 0, MissReason.DEADLINE)
    assert client.events.total(FALLBACKS, reason="deadline") == 1
    daemon.gate.set()
    release = daemon.waits_for("release")[0]
    assert (release.lease, release.used, release.outcome) == (77, 0, 2)


def test_a_late_submitted_match_is_a_miss_and_gives_its_lease_back(
    daemon: FakeDaemon, namespace: OpenNamespace
) -> None:
    keys = stored(namespace)
    daemon.gate.clear()
    ticket = namespace.submit_match(keys, deadline_seconds=0.02)
    assert ticket.result(SECONDS).reason is MissReason.DEADLINE
    daemon.gate.set()
    assert daemon.waits_for("release")[0].lease == 77


def test_a_late_reservation_is_aborted(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    daemon.gate.clear()
    put = namespace.put(namespace.root, keys_of(namespace, 2), payload(2), deadline_seconds=0.05)
    assert (put.outcomes, put.reason) == ((), MissReason.DEADLINE)
    daemon.gate.set()
    assert daemon.waits_for("abort")[0].reservation == 5


def test_a_ticket_can_be_given_up_while_its_verb_goes_on(
    daemon: FakeDaemon, namespace: OpenNamespace
) -> None:
    keys = stored(namespace)
    daemon.gate.clear()
    ticket = namespace.submit_match(keys, deadline_seconds=SECONDS)
    assert not ticket.poll()
    with pytest.raises(DeadlineExceeded):
        ticket.result(0.01)
    daemon.gate.set()
    assert ticket.result(SECONDS).blocks == 3


def test_three_failures_open_the_breaker_and_a_probe_closes_it(daemon: FakeDaemon) -> None:
    limits = ClientLimits(breaker_seconds=0.05, breaker_seconds_max=0.05)
    with Client(daemon.address, limits=limits) as client:
        namespace = client.open(NAMESPACE)
        keys = stored(namespace)
        daemon.gate.clear()
        reasons = [namespace.match(keys, deadline_seconds=0.01).reason for _ in range(4)]
        assert reasons == [MissReason.DEADLINE] * 3 + [MissReason.BREAKER_OPEN]
        assert namespace.submit_match(keys).result(SECONDS).reason is MissReason.BREAKER_OPEN
        assert client.events.total(FALLBACKS, reason="breaker_open") == 2
        daemon.gate.set()
        until(lambda: namespace.match(keys, deadline_seconds=SECONDS).blocks == 3)
        assert namespace.match(keys, deadline_seconds=SECONDS).blocks == 3


def test_open_before_the_daemon_is_up(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path / 'fake.sock'}", limits=LIMITS) as client:
        namespace = client.open(NAMESPACE)
        keys = keys_of(namespace, 2)
        assert not client.connected
        assert client.boot_id == 0
        assert namespace.match(keys).reason is MissReason.DAEMON_GONE
        assert namespace.put(namespace.root, keys, payload(2)).reason is MissReason.DAEMON_GONE
        assert namespace.get(keys, empty(2)).reason is MissReason.DAEMON_GONE
        assert namespace.submit_match(keys).result(SECONDS).reason is MissReason.DAEMON_GONE
        assert namespace.touch(keys) == 0
        assert namespace.prefetch(keys, deadline_seconds=1.0).reason is MissReason.DAEMON_GONE
        with pytest.raises(TierUnavailable):
            namespace.delete(keys)
        with pytest.raises(TierUnavailable):
            namespace.list()
        with pytest.raises(TierUnavailable):
            client.ping()
        assert client.events.total(FALLBACKS, reason="daemon_gone") == 6
        daemon = FakeDaemon(tmp_path, LAYOUT)
        try:
            until(lambda: client.connected)
            assert namespace.put(namespace.root, keys, payload(2), deadline_seconds=SECONDS).stored == 2
            assert len(daemon.waits_for("open")) == 1
        finally:
            daemon.stop()


def test_a_restarted_daemon_is_found_again_with_its_new_arena(tmp_path: Path) -> None:
    first = FakeDaemon(tmp_path, LAYOUT, boot_id=1)
    with Client(first.address, limits=LIMITS) as client:
        namespace = client.open(NAMESPACE)
        keys = stored(namespace)
        match = namespace.match(keys, deadline_seconds=SECONDS)
        first.stop()
        until(lambda: not client.connected)
        assert namespace.match(keys).reason is MissReason.DAEMON_GONE
        second = FakeDaemon(tmp_path, LAYOUT, boot_id=2)
        try:
            until(lambda: client.boot_id == 2)
            assert namespace.fetch(match, empty(3)).reason is MissReason.DAEMON_GONE
            namespace.release(match, used=0)
            assert namespace.match(keys, deadline_seconds=SECONDS).reason is MissReason.NEVER_STORED
            keys, into = stored(namespace), empty(3)
            assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 3
            assert np.array_equal(into, payload(3))
            assert second.waits_for("open")
            assert [r.lease for r in second.waits_for("release")] == [77]
        finally:
            second.stop()


def test_a_session_that_breaks_ends_who_waits_on_it(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = stored(namespace)
    daemon.scripts["match"] = lambda _: None
    ticket = namespace.submit_match(keys, deadline_seconds=SECONDS)
    daemon.waits_for("match")
    daemon._sessions[-1].put(None)
    assert ticket.result(SECONDS).reason is MissReason.DAEMON_GONE
    until(lambda: namespace.client.connected)


@pytest.mark.parametrize("field", ["extents", "tiers", "reason"])
def test_a_malformed_match_is_a_miss_and_its_lease_goes_back(
    daemon: FakeDaemon, namespace: OpenNamespace, field: str
) -> None:
    keys = stored(namespace)

    def answer(request: pb.SessionRequest) -> Answer:
        reply = wire.match_answer_to_wire(daemon.match(request.match.keys), layout=LAYOUT)
        if field == "extents":
            reply.extents[0].slots = b"123"
        elif field == "tiers":
            reply.tiers[0].tier = 99  # type: ignore[assignment]
        else:
            reply.reason = 99  # type: ignore[assignment]
        return {"match": reply}

    daemon.scripts["match"] = answer
    match = namespace.match(keys, deadline_seconds=SECONDS)
    assert (match.blocks, match.reason) == (0, MissReason.DAEMON_GONE)
    assert daemon.waits_for("release")[0].lease == 77


def test_an_extent_outside_the_arena_is_a_miss(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = stored(namespace)
    daemon.blocks = {key: (1 << 30, length, digest) for key, (_, length, digest) in daemon.blocks.items()}
    daemon.scripts["match"] = lambda _: {"match": far(daemon, keys)}
    fetched = namespace.get(keys, empty(3), deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (0, MissReason.DAEMON_GONE)


def far(daemon: FakeDaemon, keys: bytes) -> pb.MatchReply:
    """Return a match whose slots lie outside the arena."""
    slots = np.full(3, 1 << 30, dtype="<u4").tobytes()
    extent = pb.Extent(slots=slots, generations=bytes(12), digests=bytes(96))
    return pb.MatchReply(blocks=3, lease=77, ready=True, extents=[extent])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("full"), MissReason.THROTTLED),
        (TierUnavailable("ssd"), MissReason.DAEMON_GONE),
        (ShuttingDown("draining"), MissReason.DAEMON_GONE),
    ],
)
def test_what_the_daemon_cannot_do_is_a_miss(
    daemon: FakeDaemon, namespace: OpenNamespace, error: Exception, reason: MissReason
) -> None:
    keys = keys_of(namespace, 1)
    for verb in ("match", "reserve"):
        daemon.scripts[verb] = lambda _: {"error": wire.error_to_wire(error)}
    assert namespace.match(keys, deadline_seconds=SECONDS).reason is reason
    assert namespace.put(namespace.root, keys, payload(1), deadline_seconds=SECONDS).reason is reason
    # An answer is an answer: these do not open the breaker.
    for _ in range(5):
        assert namespace.match(keys, deadline_seconds=SECONDS).reason is reason


def test_a_refused_namespace_is_raised_and_forgotten(daemon: FakeDaemon, client: Client) -> None:
    refusal = LayoutMismatch("namespace 'm': same identity, different layout")
    daemon.scripts["open"] = lambda _: {"error": wire.error_to_wire(refusal)}
    with pytest.raises(LayoutMismatch, match="same identity"):
        client.open(NAMESPACE)
    del daemon.scripts["open"]
    assert client.open(NAMESPACE).siblings


def test_a_refused_client_hears_why(daemon: FakeDaemon) -> None:
    refusal = PermissionRefused("this token is unknown")
    daemon.scripts["hello"] = lambda _: {"error": wire.error_to_wire(refusal)}
    with Client(daemon.address, token="wrong", limits=LIMITS) as client:
        with pytest.raises(PermissionRefused, match="token is unknown"):
            client.ping()
        assert daemon.metadata[0]["authorization"] == "Bearer wrong"
        del daemon.scripts["hello"]
        until(lambda: client.connected)
        assert client.ping(SECONDS) > 0


def test_another_protocol_is_not_spoken(daemon: FakeDaemon) -> None:
    daemon.scripts["hello"] = lambda _: {"hello": pb.HelloReply(protocol=9)}
    with (
        Client(daemon.address, limits=LIMITS) as client,
        pytest.raises(TierUnavailable, match="speaks protocol 1, the daemon answered 9"),
    ):
        client.ping(SECONDS)


def test_without_an_arena_payload_is_framed_and_mapped_is_refused(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path, LAYOUT, mapped=False)
    try:
        with Client(daemon.address, limits=LIMITS) as client:
            stored(client.open(NAMESPACE))
            assert client.transport is Transport.FRAMED
        with (
            Client(daemon.address, transport=Transport.MAPPED, limits=LIMITS) as client,
            pytest.raises(PermissionRefused, match="offers no mapping"),
        ):
            client.ping(SECONDS)
    finally:
        daemon.stop()


def test_a_stale_arena_is_not_mapped(daemon: FakeDaemon) -> None:
    hello = daemon._hello(1)
    hello.arena_id = 99
    daemon.scripts["hello"] = lambda _: {"hello": hello}
    with Client(daemon.address, limits=LIMITS) as client:
        client.ping(SECONDS)
        assert client.transport is Transport.FRAMED


def test_the_client_holds_its_byte_while_it_is_connected(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, limits=LIMITS)
    client.ping(SECONDS)
    assert daemon.locks.is_held(1)
    client.close()
    assert not daemon.locks.is_held(1)
    client.close()


def test_a_closed_client_misses(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, limits=LIMITS)
    namespace = client.open(NAMESPACE)
    client.close()
    keys = keys_of(namespace, 1)
    assert namespace.match(keys).reason is MissReason.DAEMON_GONE
    assert namespace.submit_match(keys).result(SECONDS).reason is MissReason.DAEMON_GONE
    assert namespace.submit_get(keys, empty(1)).result(SECONDS).reason is MissReason.DAEMON_GONE
    assert not client.connected


def test_a_hung_daemon_does_not_hang_close(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, limits=LIMITS)
    namespace = client.open(NAMESPACE)
    daemon.gate.clear()
    ticket = namespace.submit_match(keys_of(namespace, 1), deadline_seconds=SECONDS)
    start = time.monotonic()
    client.close()
    assert time.monotonic() - start < SECONDS / 2
    assert ticket.result(SECONDS).reason is MissReason.DAEMON_GONE


def test_many_threads_share_a_client(client: Client, namespace: OpenNamespace) -> None:
    keys, source = stored(namespace), payload(3)
    wrong: list[object] = []

    def work() -> None:
        into = empty(3)
        for _ in range(20):
            fetched = namespace.get(keys, into, deadline_seconds=SECONDS)
            if fetched.blocks != 3 or not np.array_equal(into, source):
                wrong.append(fetched)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_too_many_unanswered_requests_are_throttled(daemon: FakeDaemon) -> None:
    limits = ClientLimits(requests_max=2)
    with Client(daemon.address, limits=limits) as client:
        namespace = client.open(NAMESPACE)
        keys = keys_of(namespace, 1)
        daemon.gate.clear()
        tickets = [namespace.submit_match(keys, deadline_seconds=SECONDS) for _ in range(3)]
        assert tickets[2].result(SECONDS).reason is MissReason.THROTTLED
        daemon.gate.set()
        assert tickets[0].result(SECONDS).reason is MissReason.NEVER_STORED


def test_submitted_work_that_never_began_ends_at_its_deadline(daemon: FakeDaemon) -> None:
    limits = ClientLimits(worker_threads=1)
    with Client(daemon.address, limits=limits) as client:
        namespace = client.open(NAMESPACE)
        keys = stored(namespace)
        daemon.gate.clear()
        first = namespace.submit_get(keys, empty(3), deadline_seconds=SECONDS)
        second = namespace.submit_get(keys, empty(3), deadline_seconds=0.02)
        assert second.result(SECONDS).reason is MissReason.DEADLINE
        assert not first.poll()
        daemon.gate.set()
        assert first.result(SECONDS).blocks == 3


def test_verbs_of_one_round_trip(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = stored(namespace)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    daemon.scripts["touch"] = lambda r: {"touch": pb.TouchReply(blocks=len(r.touch.keys) // HASH_BYTES)}
    daemon.scripts["renew"] = lambda r: {"renew": pb.RenewReply(ended=[5])}
    daemon.scripts["delete"] = lambda r: {"delete": pb.DeleteReply(blocks=9 if r.delete.all else 1)}
    daemon.scripts["list"] = lambda r: {"list": pb.ListReply(cursor=f"{r.list.cursor}+{r.list.limit}")}
    daemon.scripts["cancel"] = lambda r: {"cancel": pb.CancelReply(found=r.cancel.prefetch == 4)}
    daemon.scripts["prefetch"] = lambda r: {"prefetch": pb.PrefetchReply(prefetch=4, blocks=3, loading=3)}
    assert namespace.touch(keys, "chat") == 3
    assert daemon.waits_for("touch")[0].retention_class == "chat"
    assert namespace.renew(match, 10.0)
    assert namespace.delete(keys) == 1
    assert namespace.delete(None) == 9
    assert namespace.list("a", 7).cursor == "a+7"
    prefetch = namespace.prefetch(keys, deadline_seconds=3.0)
    assert (prefetch.prefetch, prefetch.loading) == (4, 3)
    assert namespace.cancel(prefetch)


def test_the_steps_of_a_put(namespace: OpenNamespace) -> None:
    keys, source, into = keys_of(namespace, 2), payload(2), empty(2)
    reservation = namespace.reserve(namespace.root, keys, deadline_seconds=SECONDS)
    assert (reservation.reservation, reservation.blocks) == (5, 2)
    digests = namespace.fill(reservation, source)
    assert namespace.commit(reservation, digests, deadline_seconds=SECONDS).stored == 2
    assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 2
    assert np.array_equal(into, source)
    again = namespace.reserve(namespace.root, keys, deadline_seconds=SECONDS)
    assert again.reservation == 0
    assert namespace.fill(again, source) == ()
    assert namespace.commit(again, ()).present == 2
    namespace.abort(again)


def test_a_reservation_can_be_given_back(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    reservation = namespace.reserve(namespace.root, keys_of(namespace, 2), deadline_seconds=SECONDS)
    namespace.abort(reservation)
    assert daemon.waits_for("abort")[0].reservation == 5


def test_reserve_needs_the_mapping(daemon: FakeDaemon) -> None:
    with Client(daemon.address, transport=Transport.FRAMED, limits=LIMITS) as client:
        namespace = client.open(NAMESPACE)
        with pytest.raises(PermissionRefused, match="use put"):
            namespace.reserve(namespace.root, keys_of(namespace, 1), deadline_seconds=SECONDS)


def test_a_framed_fetch_of_an_ended_lease_is_evicted(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(daemon.address, transport=Transport.FRAMED, limits=LIMITS) as client:
        namespace = client.open(NAMESPACE)
        keys = stored(namespace)
        match = namespace.match(keys, deadline_seconds=SECONDS)
        monkeypatch.setattr("kvstore.client.framed_streams.error_from_call", lambda e: _ended())
        daemon.blocks.clear()  # the fake's fetch then fails
        fetched = namespace.fetch(match, empty(3), deadline_seconds=SECONDS)
        assert (fetched.blocks, fetched.reason) == (0, MissReason.EVICTED)


def _ended() -> Exception:
    from kvstore.errors import LeaseExpired

    return LeaseExpired("lease 77")


def _is_back(daemon: FakeDaemon, client: Client, sessions: int) -> bool:
    return len(daemon._sessions) == sessions and client.connected


def test_reconnects_leave_no_threads_and_no_mappings_behind(daemon: FakeDaemon, client: Client) -> None:
    client.ping(SECONDS)

    def counts() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count(str(daemon._arena_path))
        ours = [t for t in threading.enumerate() if t.name in ("kvstore-session", "kvstore-connect")]
        return len(ours), maps

    before = counts()
    for number in range(2, 6):
        daemon._sessions[-1].put(None)
        until(partial(_is_back, daemon, client, number))
        client.ping(SECONDS)
    until(lambda: counts() == before)
    assert not daemon.locks.is_held(1)
    assert daemon.locks.is_held(5)
