"""The byte port over a real store: what is served, what is refused, and what is let go of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.api import MatchRequest
from kvstore.errors import (
    InvalidArgument,
    KVStoreError,
    LeaseExpired,
    Overloaded,
    ShuttingDown,
    TierUnavailable,
    UnknownNamespace,
)
from kvstore.rpc.channel import CHUNK_BYTES_MAX
from kvstore.rpc.packets import Header, Kind
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.byte_port import CONNECTIONS_PER_STREAM, FETCH_BYTES_MAX
from kvstore.service.gate import State
from kvstore.types import AckTier
from tests.e2e import blocks
from tests.support.raw_payload import Raw, outcomes
from tests.unit.service.test_serving import KEYS, Running, place, played

__all__ = ["place"]  # a fixture
BLOCK = blocks.PART.bytes_max


class World:
    """The running store, for one thread beside its loop."""

    def __init__(self, running: Running, socket: Path) -> None:
        self.running = running
        self.ladder = running.ladder
        self.gate = running.gate
        self.events = running.events
        self.socket = socket

    def raw(self, *, token: str = "") -> Raw:
        return Raw(self.socket, token=token)

    def lease(self, keys: bytes = KEYS, space: bytes = blocks.NAMESPACE.fingerprint) -> int:
        answer = self.ladder.match(MatchRequest(namespace=space, keys=keys))  # type: ignore[arg-type]
        assert answer.lease
        return answer.lease

    def gauge(self, name: str) -> float:
        return self.ladder.gauges()[f"kvstore_{name}"]

    def stored(self, keys: bytes = KEYS) -> bytes:
        with self.raw() as raw:
            count = len(keys) // 32
            assert outcomes(raw.put(blocks.put_requests(keys, ack=AckTier.HOST))) == [("stored_host", count)]
        return keys

    def is_idle(self) -> bool:
        """Say whether nothing is held by anybody."""
        names = ("leases", "reservations", "quarantined_slots")
        return not any(map(self.gauge, names)) and self.gate._counts["streams"] == 0


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.002)


def on_a_thread(place: Path, act: Callable[[World], None], **settings: object) -> None:
    """Play an act against a daemon in this process."""

    async def play(running: Running) -> None:
        running.ladder.open(blocks.NAMESPACE, root=blocks.ROOT)
        await asyncio.to_thread(act, World(running, place / "k.sock.bytes"))

    played(place, play, **settings)


def header() -> pb.PutRequest:
    return next(blocks.put_requests(KEYS, ack=AckTier.HOST))


def test_blocks_go_in_and_come_back_on_one_connection(place: Path) -> None:
    def act(world: World) -> None:
        with world.raw() as raw:
            reply = raw.put(blocks.put_requests(KEYS, ack=AckTier.HOST))
            assert outcomes(reply) == [("stored_host", 3)]
            lease = world.lease()
            for _ in range(2):
                assert raw.fetch(lease) == {block: blocks.payload(KEYS, block) for block in range(3)}
            world.ladder.release(lease, used=3)
            assert world.is_idle()
        assert world.events.total("kvstore_framed_bytes_total", direction="in") == 3 * BLOCK
        assert world.events.total("kvstore_framed_bytes_total", direction="out") == 6 * BLOCK

    on_a_thread(place, act)


def test_only_what_is_wanted_is_asked_for(place: Path) -> None:
    def act(world: World) -> None:
        world.stored()
        longer = blocks.keys_of(5)
        with world.raw() as raw:
            again = raw.begin_put(header())
            assert outcomes(again) == [("duplicate", 3)]
            first, *_ = blocks.put_requests(longer, ack=AckTier.HOST)
            assert outcomes(raw.begin_put(first)) == [("duplicate", 3), ("reserved", 2)]
            for block in (3, 4):
                data = blocks.payload(longer, block)
                raw.chunk(data[:7000], block=block)
                raw.chunk(data[7000:], block=block, offset=7000)
            raw.send(Kind.END)
            assert outcomes(raw.put_reply()) == [("duplicate", 3), ("stored_host", 2)]
            assert raw.fetch(world.lease(longer))[4] == blocks.payload(longer, 4)

    on_a_thread(place, act)


def test_a_damaged_block_is_refused_and_what_follows_it(place: Path) -> None:
    def act(world: World) -> None:
        with world.raw() as raw:
            reply = raw.put(blocks.put_requests(KEYS, ack=AckTier.HOST, spoiled=1))
            assert outcomes(reply) == [("stored_host", 1), ("refused", 2)]
            assert raw.fetch(world.lease()) == {0: blocks.payload(KEYS, 0)}

    on_a_thread(place, act)


def test_progress_without_payload(place: Path) -> None:
    def act(world: World) -> None:
        world.stored()
        with world.raw() as raw:
            raw.begin_fetch(world.lease(), payload=False)
            kind, body = raw.receive()
            assert (kind.kind, pb.ProgressEvent.FromString(body).blocks) == (Kind.PROGRESS, 3)
            assert raw.receive()[0].kind is Kind.END

    on_a_thread(place, act)


@pytest.mark.parametrize("ended", ["never was", "released"])
def test_a_lease_that_has_ended_is_told_and_the_connection_goes_on(ended: str, place: Path) -> None:
    def act(world: World) -> None:
        world.stored()
        lease = world.lease()
        if ended == "released":
            world.ladder.release(lease, used=0)
        else:
            lease += 2
        with world.raw() as raw:
            with pytest.raises(LeaseExpired):
                raw.fetch(lease)
            assert len(raw.fetch(world.lease())) == 3

    on_a_thread(place, act)


def test_bodies_that_are_no_messages_are_told_and_the_connection_goes_on(place: Path) -> None:
    def act(world: World) -> None:
        world.stored()
        with world.raw() as raw:
            for kind in (Kind.FETCH, Kind.PUT):
                raw.send(kind, b"\xff" * 9)
                with pytest.raises(InvalidArgument, match="9 bytes that are no message"):
                    raw.receive()
            bad = header()
            bad.header.reserve.namespace = b"x" * 32
            with pytest.raises(UnknownNamespace):
                raw.begin_put(bad)
            assert len(raw.fetch(world.lease())) == 3

    on_a_thread(place, act)


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (Header(Kind.CHUNK, 0).pack(), "a request is a FETCH or a PUT, got CHUNK"),
        (Header(Kind.GREETING, 0).pack(), "got GREETING"),
        (Header(Kind.FETCH, FETCH_BYTES_MAX + 1).pack(), f"the limit is {FETCH_BYTES_MAX} bytes"),
        (Header(Kind.PUT, (4 << 20) + 1).pack(), f"the limit is {4 << 20} bytes"),
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "kind 542393671 is not known"),
        (bytes(24), "kind 0 is not known"),
    ],
)
def test_what_is_no_request_ends_the_connection(packet: bytes, words: str, place: Path) -> None:
    def act(world: World) -> None:
        with world.raw() as raw:
            raw.sock.sendall(packet)
            with pytest.raises(InvalidArgument, match=words):
                raw.receive()
            assert raw.has_ended()
        assert world.is_idle()

    on_a_thread(place, act, message_bytes_max="4MiB")


def chunk(raw: Raw, size: int = 16_384, *, part: int = 0, block: int = 0, offset: int = 0) -> None:
    raw.chunk(bytes(size), part=part, block=block, offset=offset)


@pytest.mark.parametrize(
    ("send", "words"),
    [
        (lambda raw: chunk(raw, block=3), "blocks 0..3 were announced, got block 3"),
        (lambda raw: chunk(raw, part=1), "part 1: blocks 0..0 were announced, got block 0"),
        (lambda raw: chunk(raw, 20_001), "at most 20000 bytes a block, got 20001 at offset 0"),
        (lambda raw: chunk(raw, 2, offset=19_999), "got 2 at offset 19999"),
        (lambda raw: chunk(raw, 0), "a chunk has 1..1048576 bytes, got 0"),
        (lambda raw: chunk(raw, 10, block=1), "expected block 0 offset 0 of 20000 bytes, got block 1"),
        (lambda raw: chunk(raw, 10, offset=5), "got block 0 offset 5"),
        (
            lambda raw: raw.sock.sendall(Header(Kind.CHUNK, CHUNK_BYTES_MAX + 1).pack()),
            "the limit is 1048576",
        ),
        (lambda raw: raw.send(Kind.PUT), "only chunks follow the header"),
        (lambda raw: raw.send(Kind.END, b"x"), "only chunks follow the header"),
        (lambda raw: raw.sock.sendall(b"\xff" * 24), "is not known"),
    ],
)
def test_a_put_out_of_order_is_refused_and_leaves_nothing(
    send: Callable[[Raw], None], words: str, place: Path
) -> None:
    def act(world: World) -> None:
        with world.raw() as raw:
            raw.begin_put(header())
            assert world.gauge("reservations") == 1
            send(raw)
            with pytest.raises(InvalidArgument, match=words):
                raw.receive()
            assert world.is_idle()
            assert raw.has_ended()
        assert world.gauge("host_used_bytes") == 0
        world.stored()

    on_a_thread(place, act)


def test_an_error_is_heard_by_a_client_that_keeps_sending(place: Path) -> None:
    def act(world: World) -> None:
        with world.raw() as raw:
            raw.begin_put(header())
            chunk(raw, 10, block=1)
            try:
                for _ in range(100):
                    chunk(raw, 20_000)
            except OSError:
                pass  # the daemon has closed meanwhile
            with pytest.raises(InvalidArgument, match="expected block 0"):
                raw.receive()

    on_a_thread(place, act)


@pytest.mark.parametrize("sent", [0, 10, 24, 24 + 5000, 24 + BLOCK, 24 + BLOCK + 7])
def test_a_client_that_vanishes_in_mid_put_keeps_no_slots(sent: int, place: Path) -> None:
    def act(world: World) -> None:
        with world.raw() as raw:
            raw.begin_put(header())
            record = Header(Kind.CHUNK, BLOCK).pack() + blocks.payload(KEYS, 0)
            raw.sock.sendall((record + Header(Kind.CHUNK, BLOCK, 0, 1).pack())[:sent])
        until(world.is_idle)
        assert world.gauge("host_used_bytes") == 0
        world.stored()

    on_a_thread(place, act)


def begin_and_delete(world: World, raw: Raw, lease: int) -> None:
    """Begin a fetch that nobody reads; then its lease ends and its blocks are deleted."""
    raw.begin_fetch(lease)
    until(lambda: world.gate._counts["streams"] == 1)
    world.ladder.release(lease, used=0)
    world.ladder.delete(blocks.NAMESPACE.fingerprint, None)


def test_a_reader_that_never_reads_is_let_go_of(place: Path) -> None:
    """Of 10 MiB that nobody takes, the sockets hold a little; then the daemon ends it and holds nothing."""

    def act(world: World) -> None:
        keys = world.stored(blocks.keys_of(500))
        lease = world.lease(keys)
        with world.raw() as raw:
            begin_and_delete(world, raw, lease)
            assert world.gauge("host_used_bytes") == 500 * blocks.PART.stride_bytes
            until(world.is_idle)
            until(lambda: world.gauge("host_used_bytes") == 0)
            until(lambda: world.events.total("kvstore_rpc_errors_total", code="deadline_exceeded") == 1)

    on_a_thread(place, act, stream_idle_seconds=0.3)


def test_what_a_slow_reader_gets_is_what_its_lease_covered(place: Path) -> None:
    """The lease ends while the reader sleeps, its blocks are deleted, and somebody else puts what fits."""

    def act(world: World) -> None:
        keys = world.stored(blocks.keys_of(500))
        lease = world.lease(keys)
        with world.raw() as raw:
            begin_and_delete(world, raw, lease)
            others = blocks.keys_of(250, seed=9)
            world.stored(others)
            assert raw.blocks() == {block: blocks.payload(keys, block) for block in range(500)}
        until(world.is_idle)
        assert world.gauge("host_used_bytes") == 250 * blocks.PART.stride_bytes

    on_a_thread(place, act)


def test_a_writer_that_says_nothing_is_let_go_of(place: Path) -> None:
    def act(world: World) -> None:
        with world.raw() as raw:
            raw.begin_put(header())
            with pytest.raises(KVStoreError, match=r"put: the limits are 0.1 s for a chunk"):
                raw.receive()
            assert raw.has_ended()
            assert world.is_idle()

    on_a_thread(place, act, stream_idle_seconds=0.1)


def test_a_connection_between_requests_holds_no_place_but_is_closed_in_the_end(place: Path) -> None:
    def act(world: World) -> None:
        with world.raw() as raw:
            raw.begin_put(header())
            chunk(raw)
            with world.raw() as other:
                for _ in range(2):
                    with pytest.raises(Overloaded, match="1 streams at a time"):
                        other.fetch(1)
                with pytest.raises(Overloaded, match="1 streams at a time"):
                    other.begin_put(header())
                assert other.has_ended(), "the body of a put that is refused is not read"
        until(world.is_idle)
        with world.raw() as raw, world.raw():
            assert outcomes(raw.put(blocks.put_requests(KEYS, ack=AckTier.HOST))) == [("stored_host", 3)]
            assert raw.has_ended()

    on_a_thread(place, act, streams_max=1, stream_idle_seconds=0.5)


def test_of_too_many_connections_the_one_that_rested_longest_goes(place: Path) -> None:
    def act(world: World) -> None:
        every = [world.raw() for _ in range(CONNECTIONS_PER_STREAM)]
        try:
            every[0].begin_fetch(1)
            with pytest.raises(LeaseExpired):
                every[0].receive()
            every.append(world.raw())
            assert every[1].has_ended()
            for raw in (every[0], *every[2:]):
                raw.begin_fetch(1)
                with pytest.raises(LeaseExpired):
                    raw.receive()
        finally:
            for raw in every:
                raw.sock.close()

    on_a_thread(place, act, streams_max=1)


def test_a_header_beyond_the_room_for_puts(place: Path) -> None:
    def act(world: World) -> None:
        big = header()
        big.header.digests.add(part=0, digests=bytes(5 << 20))
        with world.raw() as raw:
            with pytest.raises(
                Overloaded, match="framed puts: the limit is 4194304 bytes at a time, 0 are held"
            ):
                raw.begin_put(big)
            assert raw.has_ended()
        assert world.running.serving.budget.held == 0
        world.stored()

    on_a_thread(place, act, put_bytes_max="4MiB")


def test_bytes_that_nobody_waits_for_are_counted_too(place: Path) -> None:
    def act(world: World) -> None:
        world.stored(blocks.keys_of(1))
        with world.raw() as raw:
            assert outcomes(raw.begin_put(header())) == [("duplicate", 1), ("reserved", 2)]
            for _ in range(4):  # of block 0, which is there
                chunk(raw, 20_000)
            with pytest.raises(InvalidArgument, match="put: 60000 bytes were announced, got 80000"):
                raw.receive()

    on_a_thread(place, act)


def test_while_draining_nothing_new_is_admitted(place: Path) -> None:
    def act(world: World) -> None:
        world.stored()
        lease = world.lease()
        with world.raw() as raw:
            world.gate.move(State.DRAINING)
            with pytest.raises(ShuttingDown):
                raw.fetch(lease)
            with pytest.raises(ShuttingDown):
                raw.begin_put(header())

    on_a_thread(place, act)


def test_the_end_of_the_daemon_ends_connections(place: Path) -> None:
    """One rests, one puts, one is sent what it does not read."""

    def act(world: World) -> None:
        keys = world.stored(blocks.keys_of(500))
        with world.raw() as resting, world.raw() as putting, world.raw() as fetching:
            first, *_ = blocks.put_requests(blocks.keys_of(3, seed=4), ack=AckTier.HOST)
            putting.begin_put(first)
            fetching.begin_fetch(world.lease(keys))
            until(lambda: world.gate._counts["streams"] == 2)
            world.running.serving._stop_payload()
            assert resting.has_ended()
            assert putting.has_ended()
            assert world.gauge("reservations") == 0
            assert world.gate._counts["streams"] == 0
            with pytest.raises((TierUnavailable, ConnectionResetError)):
                fetching.blocks()
        with world.raw() as late, pytest.raises((ShuttingDown, TierUnavailable, ConnectionError)):
            late.fetch(1)
        until(lambda: not [t for t in threading.enumerate() if t.name == "kvstore-payload"])

    on_a_thread(place, act)
