"""Wild packets on payload connections: each is answered, refused or ends its connection; nothing is held."""

from __future__ import annotations

import random
import socket
import threading
from pathlib import Path

from kvstore.errors import KVStoreError, TierUnavailable
from kvstore.namespace import Namespace
from kvstore.rpc.packets import Header, Kind, packet
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.access import TRUSTED
from kvstore.types import AckTier
from tests.e2e import blocks
from tests.fuzz.messages import Known, Stranger
from tests.support.raw_payload import SECONDS, Raw
from tests.unit.service.test_byte_port import World, on_a_thread, place, until

__all__ = ["place"]  # a fixture
CONVERSATIONS = 400
HELD = ("leases", "reservations", "prefetches", "quarantined_slots")
KEYS = blocks.keys_of(4)


class Talker:
    """Says what a client might, and then changes some of it."""

    def __init__(self, rng: random.Random, space: Namespace, lease: int) -> None:
        self.rng = rng
        self._lease = lease
        known = Known([space.canonical()], [space.fingerprint], [blocks.ROOT], [KEYS], [lease])
        self._stranger = Stranger(rng, known)
        self._seed = 100

    def conversation(self) -> bytes:
        """Return what goes over one connection."""
        acts = (self._fetch, self._fetch, self._put, self._put, self._put, self._strange_put, self._header)
        said = b"".join(self.rng.choice(acts)() for _ in range(self.rng.randint(1, 3)))
        return self._changed(said) if self.rng.random() < 0.6 else said

    def _fetch(self) -> bytes:
        lease = self._lease if self.rng.random() < 0.7 else self.rng.getrandbits(64)
        message = pb.FetchRequest(lease=lease, payload=self.rng.random() < 0.8)
        if self.rng.random() < 0.3:
            message.parts.extend(self.rng.choices((0, 1, 300), k=2))
        return packet(Kind.FETCH, message.SerializeToString())

    def _put(self) -> bytes:
        self._seed += 1
        header, *chunks = blocks.put_requests(
            blocks.keys_of(self.rng.randint(1, 3), seed=self._seed),
            ack=AckTier.HOST,
            spoiled=self.rng.choice((-1, -1, 0, 1)),
        )
        pieces = [
            Header(Kind.CHUNK, len(m.chunk.data), m.chunk.part, m.chunk.block, m.chunk.offset).pack()
            + m.chunk.data
            for m in chunks
        ]
        if self.rng.random() < 0.3:
            self.rng.shuffle(pieces)
        if self.rng.random() < 0.3:
            pieces = pieces[: self.rng.randint(0, len(pieces))]
        return b"".join([packet(Kind.PUT, header.header.SerializeToString()), *pieces, packet(Kind.END)])

    def _strange_put(self) -> bytes:
        message = self._stranger.request(pb.PutRequest.Header)
        return packet(Kind.PUT, message.SerializeToString()) + packet(Kind.END)

    def _header(self) -> bytes:
        numbers = [self.rng.choice((0, 1, 24, 1 << 20, 1 << 31, (1 << 32) - 1)) for _ in range(4)]
        return Header(self.rng.choice(list(Kind)), *numbers).pack()

    def _changed(self, said: bytes) -> bytes:
        """Return it with some bytes changed, a stretch left out or said twice, or its end cut off."""
        data = bytearray(said)
        for _ in range(self.rng.randint(1, 3)):
            at, count = self.rng.randrange(len(data)), self.rng.randint(1, 64)
            match self.rng.randrange(4):
                case 0:
                    data[at] = self.rng.randrange(256)
                case 1:
                    del data[at : at + count]
                case 2:
                    data[at:at] = data[at : at + count]
                case 3:
                    del data[max(1, at) :]
            if not data:
                break
        return bytes(data)


def answers(world: World, said: bytes) -> list[str]:
    """Hold a conversation and return the kinds of what was answered, of errors their class."""
    ours, theirs = socket.socketpair()
    world.running.serving.payload.serve(theirs, TRUSTED, peer="fuzz")
    ours.settimeout(SECONDS)
    raw, heard = Raw.over(ours), list[str]()

    def say() -> None:
        try:
            ours.sendall(said)
            ours.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the daemon has heard enough

    saying = threading.Thread(target=say)
    saying.start()
    with raw:
        while True:
            try:
                heard.append(raw.receive()[0].kind.name)
            except TierUnavailable:
                break
            except KVStoreError as error:
                if type(error) is KVStoreError:
                    raise AssertionError("a fault of the daemon") from error
                heard.append(type(error).__name__)
            except ConnectionResetError:
                break
        saying.join()
    return heard


def test_wild_packets_are_answered_or_refused(place: Path) -> None:
    def act(world: World) -> None:
        world.stored(KEYS)
        lease = world.lease(KEYS)
        talker = Talker(random.Random(11), blocks.NAMESPACE, lease)
        heard = {kind for _ in range(CONVERSATIONS) for kind in answers(world, talker.conversation())}
        assert {"CHUNK", "PROGRESS", "END", "PUT_REPLY", "InvalidArgument", "LeaseExpired"} <= heard
        until(lambda: world.gate._counts["streams"] == 0)
        with world.raw() as raw:
            assert raw.fetch(lease) == {block: blocks.payload(KEYS, block) for block in range(4)}
        world.ladder.release(lease, used=0)
        assert not [name for name in HELD if world.gauge(name)]
        assert world.running.serving.budget.held == 0

    on_a_thread(place, act)
