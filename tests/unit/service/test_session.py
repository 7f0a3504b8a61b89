"""A session over a real ladder: order of answers, one-way requests, late news, limits, and its end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from kvstore.api import MatchRequest
from kvstore.clock import ManualClock
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.errors import KVStoreError, Overloaded
from kvstore.events import Events
from kvstore.hashing import block_hashes, chain_root
from kvstore.rpc import wire
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.gate import Gate, State
from kvstore.service.session import Offer, Session
from kvstore.service.verbs import Verbs
from kvstore.types import MatchMode
from tests.support import driver
from tests.support.memory import DictTier, Disk, PrivateMemory

SPACE = driver.namespace()
ROOT = chain_root(SPACE.fingerprint)
KEYS = block_hashes(ROOT, list(range(40)), block_tokens=SPACE.block_tokens)


class Stream:
    """The server's end of a stream, played by hand."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[object] = asyncio.Queue()
        self.replies: asyncio.Queue[pb.SessionReply] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.refused: KVStoreError | None = None
        self.gone = asyncio.Event()

    async def read(self) -> object:
        return await self.requests.get()

    async def write(self, reply: pb.SessionReply) -> None:
        await self.reads.wait()
        self.replies.put_nowait(reply)

    async def refuse(self, error: KVStoreError) -> None:
        self.refused = error
        self.gone.set()

    def say(self, request_id: int, **verb: Any) -> None:
        self.requests.put_nowait(pb.SessionRequest(request_id=request_id, **verb))

    async def hear(self) -> pb.SessionReply:
        return await asyncio.wait_for(self.replies.get(), 10)

    async def ask(self, request_id: int, **verb: Any) -> pb.SessionReply:
        self.say(request_id, **verb)
        return await self.hear()

    async def greet(self) -> None:
        assert (await self.ask(1, hello=pb.HelloRequest(protocol=1, client="t"))).hello.session == 7
        opened = await self.ask(2, open=wire.open_to_wire(SPACE, root=ROOT))
        assert opened.open.fingerprint == SPACE.fingerprint

    def close(self) -> None:
        self.requests.put_nowait(None)


class World:
    """A ladder with a disk that works on demand, and one session on it."""

    def __init__(self, *, disk: Disk | None = None, requests_max: int = 8, queue_max: int = 100) -> None:
        self.events = Events()
        self.disk = DictTier(disk or Disk(), manual=True)
        self.ladder = Ladder(
            host=PrivateMemory(64),
            ssd=self.disk,
            clock=ManualClock(),
            events=self.events,
            limits=Limits(load_bytes=4096),
            new_number=itertools.count(1).__next__,
        )
        self.ladder.recover()
        self.gate = Gate(sessions_max=4, streams_max=4)
        self.gate.move(State.SERVING)
        self.offer = Offer(message_bytes_max=1 << 20, requests_max=requests_max, queue_max=queue_max)

    def put(self) -> None:
        """Put all blocks and let them reach the disk."""
        self.ladder.open(SPACE, root=ROOT)
        driver.put(self.ladder, SPACE, ROOT, KEYS)
        self.disk.run()

    async def serve(self, stream: Stream) -> None:
        verbs = Verbs(self.ladder, gate=self.gate, boot_id=99)
        session = Session(verbs, stream, number=7, offer=self.offer, events=self.events)
        await session.run()


def played(world: World, play: Callable[[Stream], Awaitable[None]]) -> Stream:
    """Run a session while `play` plays the client, then end the stream."""

    async def main() -> Stream:
        stream = Stream()
        session = asyncio.ensure_future(world.serve(stream))
        await play(stream)
        stream.close()
        done, _ = await asyncio.wait({session}, timeout=10)
        assert done
        if session.exception() is not None:
            raise AssertionError from session.exception()
        return stream

    return asyncio.run(main())


def match(keys: bytes = KEYS, **fields: Any) -> pb.MatchRequest:
    return wire.match_to_wire(MatchRequest(namespace=SPACE.fingerprint, keys=keys, **fields))


def restarted(**limits: int) -> World:
    """Return a world whose blocks are known from the disk alone."""
    before = World()
    before.put()
    return World(disk=before.disk.disk, **limits)


def test_hello_comes_first() -> None:
    async def play(stream: Stream) -> None:
        reply = await stream.ask(5, ping=pb.PingRequest())
        assert reply.request_id == 5
        assert reply.boot_id == 99
        assert reply.error.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert "hello" in reply.error.message
        wrong = await stream.ask(6, hello=pb.HelloRequest(protocol=77))
        assert "protocol 1, got 77" in wrong.error.message
        await stream.greet()
        assert (await stream.ask(8, ping=pb.PingRequest())).WhichOneof("answer") == "ping"

    played(World(), play)


def test_no_mapping_is_offered_without_an_arena() -> None:
    async def play(stream: Stream) -> None:
        reply = await stream.ask(1, hello=pb.HelloRequest(protocol=1, want_mapping=True))
        assert reply.hello.arena_path == ""

    played(World(), play)


def test_one_way_requests_have_no_answer() -> None:
    world = World()
    world.put()

    async def play(stream: Stream) -> None:
        await stream.greet()
        lease = (await stream.ask(3, match=match())).match.lease
        stream.say(0, release=pb.ReleaseRequest(lease=lease, used=10, outcome=pb.RELEASE_OUTCOME_USED))
        stream.say(0, release=pb.ReleaseRequest(lease=lease, used=10))
        reply = await stream.ask(4, ping=pb.PingRequest())
        assert (reply.request_id, reply.WhichOneof("answer")) == (4, "ping")
        assert world.ladder.gauges()["kvstore_leases"] == 0

    played(world, play)


def test_a_release_may_ride_on_the_next_match() -> None:
    world = World()
    world.put()

    async def play(stream: Stream) -> None:
        await stream.greet()
        lease = (await stream.ask(3, match=match())).match.lease
        request = match()
        request.release.add(lease=lease, used=10, outcome=pb.RELEASE_OUTCOME_USED)
        second = (await stream.ask(4, match=request)).match
        assert second.lease not in (0, lease)
        assert world.ladder.gauges()["kvstore_leases"] == 1

    played(world, play)


def test_progress_follows_its_match() -> None:
    world = restarted()

    async def play(stream: Stream) -> None:
        await stream.greet()
        answer = await stream.ask(3, match=match())
        assert (answer.match.blocks, answer.match.ready) == (10, False)
        heard = 0
        while True:
            await asyncio.to_thread(world.disk.run)
            reply = await stream.hear()
            assert (reply.request_id, reply.progress.lease) == (3, answer.match.lease)
            heard += sum(len(extent.slots) // 4 for extent in reply.progress.extents)
            if reply.progress.done:
                break
        assert heard == 10

    played(world, play)


def test_news_that_wait_for_the_stream_come_as_one() -> None:
    world = restarted(queue_max=4)

    async def play(stream: Stream) -> None:
        await stream.greet()
        await stream.ask(3, match=match())
        stream.reads.clear()
        while await asyncio.to_thread(world.disk.run):
            pass
        stream.reads.set()
        heard = [await stream.hear()]
        while not heard[-1].progress.done:
            heard.append(await stream.hear())
        # One may have been on its way already, of the ten that the loads made.
        assert len(heard) <= 2
        blocks = [(e.first, len(e.slots) // 4) for reply in heard for e in reply.progress.extents]
        assert sum(count for _, count in blocks) == 10
        assert blocks[-1][0] + blocks[-1][1] == 10

    played(world, play)


def test_an_answer_on_ssd_comes_when_it_is_durable() -> None:
    world = World()

    async def play(stream: Stream) -> None:
        await stream.greet()
        request = pb.ReserveRequest(namespace=SPACE.fingerprint, parent=ROOT, keys=KEYS)
        reserved = wire.reserve_answer_from_wire((await stream.ask(3, reserve=request)).reserve, SPACE.layout)
        filled = [driver.fill(world.ladder, SPACE, KEYS, extent) for extent in reserved.extents]
        commit = pb.CommitRequest(
            reservation=reserved.reservation,
            blocks=10,
            parts=wire.part_digests_to_wire(filled),
            ack=pb.ACK_TIER_SSD,
        )
        stream.say(4, commit=commit)
        assert (await stream.ask(5, ping=pb.PingRequest())).request_id == 5
        await asyncio.to_thread(world.disk.run)
        reply = await stream.hear()
        assert reply.request_id == 4
        assert [(run.outcome, run.count) for run in reply.commit.outcomes] == [
            (pb.PUT_OUTCOME_STORED_SSD, 10)
        ]

    played(world, play)


def test_a_delete_is_answered_when_the_disk_has_done_it_or_refuses() -> None:
    world = World()
    world.ladder.open(SPACE, root=ROOT)
    driver.put(world.ladder, SPACE, ROOT, KEYS)

    async def play(stream: Stream) -> None:
        await stream.greet()
        stream.say(3, delete=pb.DeleteRequest(namespace=SPACE.fingerprint, all=True))
        # The write is under way: an answer would come before that of a later request.
        probe = await stream.ask(4, match=match(mode=MatchMode.PROBE))
        assert (probe.request_id, probe.match.blocks) == (4, 0)
        world.disk.run()
        answer = await stream.hear()
        assert (answer.request_id, answer.delete.blocks) == (3, 10)
        driver.put(world.ladder, SPACE, ROOT, KEYS)
        world.disk.run()
        world.disk.refuse_deletes = "read-only"
        refused = await stream.ask(5, delete=pb.DeleteRequest(namespace=SPACE.fingerprint, all=True))
        assert refused.error.code == pb.ERROR_CODE_TIER_UNAVAILABLE
        assert "10 blocks are gone, but the disk has not confirmed it" in refused.error.message
        world.disk.refuse_deletes = ""
        again = await stream.ask(6, delete=pb.DeleteRequest(namespace=SPACE.fingerprint, all=True))
        assert again.WhichOneof("answer") == "delete"

    played(world, play)


def test_unfinished_requests_are_limited() -> None:
    world = restarted(requests_max=2)

    async def play(stream: Stream) -> None:
        await stream.greet()
        assert not (await stream.ask(3, match=match(owner="a"))).match.ready
        assert not (await stream.ask(4, match=match(owner="b"))).match.ready
        refused = await stream.ask(5, match=match(owner="c"))
        assert refused.error.code == pb.ERROR_CODE_OVERLOADED
        assert (await stream.ask(6, match=match(mode=MatchMode.PROBE))).error.code == pb.ERROR_CODE_OVERLOADED

    played(world, play)


def test_errors_carry_their_code_and_are_counted() -> None:
    world = World()

    async def play(stream: Stream) -> None:
        await stream.greet()
        unknown = match()
        unknown.namespace = b"x" * 32
        assert (await stream.ask(3, match=unknown)).error.code == pb.ERROR_CODE_UNKNOWN_NAMESPACE
        assert (await stream.ask(4, match=pb.MatchRequest())).error.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert (await stream.ask(5)).error.code == pb.ERROR_CODE_INVALID_ARGUMENT
        late = pb.CommitRequest(reservation=12345, blocks=1, ack=pb.ACK_TIER_HOST)
        assert (await stream.ask(6, commit=late)).error.code == pb.ERROR_CODE_LEASE_EXPIRED
        world.gate.move(State.DRAINING)
        assert (await stream.ask(7, match=match())).error.code == pb.ERROR_CODE_SHUTTING_DOWN
        assert (await stream.ask(8, abort=pb.AbortRequest(reservation=5))).abort.found is False

    played(world, play)
    assert world.events.total("kvstore_rpc_errors_total", code="invalid_argument") == 2
    assert world.events.total("kvstore_rpc_errors_total") == 5


def test_the_end_of_a_session_gives_everything_back() -> None:
    world = World()
    world.put()

    async def play(stream: Stream) -> None:
        await stream.greet()
        await stream.ask(3, match=match())
        keys = block_hashes(ROOT, list(range(100, 120)), block_tokens=SPACE.block_tokens)
        await stream.ask(4, reserve=pb.ReserveRequest(namespace=SPACE.fingerprint, parent=ROOT, keys=keys))
        gauges = world.ladder.gauges()
        assert (gauges["kvstore_leases"], gauges["kvstore_reservations"]) == (1, 1)

    played(world, play)
    gauges = world.ladder.gauges()
    assert (gauges["kvstore_leases"], gauges["kvstore_reservations"]) == (0, 0)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    world = restarted(queue_max=4)

    async def play(stream: Stream) -> None:
        await stream.greet()
        assert not (await stream.ask(3, match=match())).match.ready
        stream.reads.clear()
        await asyncio.to_thread(world.disk.run)
        for number in range(4, 10):
            stream.say(number, ping=pb.PingRequest())
        await asyncio.wait_for(stream.gone.wait(), 10)

    assert isinstance(played(world, play).refused, Overloaded)
    assert world.events.total("kvstore_sessions_cut_total") == 1
    assert world.ladder.gauges()["kvstore_leases"] == 0
