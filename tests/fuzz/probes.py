"""A tenant that pries: every verb against what another tenant has stored, through the servicer in process.

Both have the same model and the same prompt; the prying one knows the other's namespace, keys and leases.
"""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np

from kvstore.api import MatchRequest, ReserveRequest
from kvstore.clock import SystemClock
from kvstore.events import Events
from kvstore.hashing import block_hashes, chain_root
from kvstore.namespace import Namespace
from kvstore.rpc import wire
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.access import Context, TokenCallers
from kvstore.service.framed import Framed
from kvstore.service.gate import Gate, State
from kvstore.service.limits import Budget
from kvstore.service.servicer import DataServicer
from kvstore.service.session import Offer, SessionNumbers, Sessions
from kvstore.service.store import Store
from kvstore.service.tokens import Tokens
from kvstore.service.verbs import Verbs
from kvstore.settings import load
from kvstore.types import AckTier, BlockHash, Fingerprint, MatchMode
from tests.e2e import blocks

TOKENS = {"acme": "acme-token-of-20-characters", "bolt": "bolt-token-of-20-characters"}
SPACES: dict[str, Namespace] = {tenant: replace(blocks.NAMESPACE, tenant=tenant) for tenant in TOKENS}
PROMPT = np.random.default_rng(5).integers(0, 1 << 20, 8 * blocks.NAMESPACE.block_tokens)
STORED = 8
OUTCOMES = (pb.RELEASE_OUTCOME_USED, pb.RELEASE_OUTCOME_UNUSED, pb.RELEASE_OUTCOME_CORRUPT)


def tokens_file(path: Path) -> Path:
    """Write the tokens of both tenants."""
    path.write_text("".join(f'[[tokens]]\ntenant = "{t}"\ntoken = "{v}"\n' for t, v in TOKENS.items()))
    path.chmod(0o600)
    return path


def keys_of(tenant: str) -> bytes:
    """Return a tenant's keys of the prompt that both have."""
    return block_hashes(root_of(tenant), PROMPT, block_tokens=SPACES[tenant].block_tokens)


def root_of(tenant: str) -> BlockHash:
    """Return a tenant's chain root."""
    return chain_root(SPACES[tenant].fingerprint)


def put_of(tenant: str, keys: bytes, *, data: Callable[[int], bytes]) -> list[pb.PutRequest]:
    """Return the messages of a put into a tenant's namespace."""
    reserve = ReserveRequest(namespace=SPACES[tenant].fingerprint, parent=root_of(tenant), keys=keys)
    requests = [wire.put_header_to_wire(reserve, [], ack=AckTier.HOST)]
    for block in range(len(keys) // 32):
        chunk = pb.PutRequest.Chunk(part=0, block=block, offset=0, data=data(block))
        requests.append(pb.PutRequest(chunk=chunk))
    return requests


class Refused(Exception):
    """A call ended with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class Call:
    """The server's side of one call of a tenant."""

    def __init__(self, tenant: str) -> None:
        self._metadata = (("authorization", f"Bearer {TOKENS[tenant]}"),)
        self.written: list[pb.FetchReply] = []

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, reply: pb.FetchReply) -> None:
        self.written.append(reply)

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object = ()) -> None:
        raise Refused(code, details)


class Servant:
    """The data service over a store in memory, with a token for each tenant."""

    def __init__(self, store: Store, tokens: Path) -> None:
        server = store.settings.server.model_copy(update={"tokens_file": tokens})
        gate = Gate(sessions_max=4, streams_max=8)
        gate.move(State.SERVING)
        self.verbs = Verbs(store.ladder, gate=gate, boot_id=1)
        self.workers = ThreadPoolExecutor(2)
        self.budget = Budget("framed puts", bytes_max=1 << 30)
        framed = Framed(
            self.verbs,
            workers=self.workers,
            generations=store.arena.generations,
            events=store.events,
            budget=self.budget,
            idle_seconds=30.0,
        )
        callers = TokenCallers(
            Tokens(server), per_second=0, streams_max=8, clock=SystemClock(), events=store.events
        )
        offer = Offer(message_bytes_max=1 << 26, requests_max=8, queue_max=64)
        sessions = Sessions(self.verbs, offer=offer, numbers=SessionNumbers(), events=store.events)
        self.data = DataServicer(
            self.verbs,
            framed,
            sessions=sessions,
            events=store.events,
            caller_of=callers.of,
        )

    async def call(self, tenant: str, verb: str, request: Any) -> Any:
        """Make a call as a tenant; a list of messages is a stream. Fetch returns what was written."""
        call = Call(tenant)
        if isinstance(request, list):
            return await getattr(self.data, verb)(_stream(request), cast(Context, call))
        reply = await getattr(self.data, verb)(request, cast(Context, call))
        return call.written if verb == "Fetch" else reply

    async def refused(self, tenant: str, verb: str, request: Any) -> Refused:
        """Return how a call ended that must not succeed."""
        try:
            reply = await self.call(tenant, verb, request)
        except Refused as refusal:
            return refusal
        raise AssertionError(f"{verb} of {tenant} was answered: {str(reply)[:500]}")


async def _stream(requests: list[pb.PutRequest]) -> AsyncIterator[pb.PutRequest]:
    for request in requests:
        yield request


@contextmanager
def servant(place: Path) -> Iterator[Servant]:
    """Open a store in memory and serve it in process."""
    flags = {
        "server.address": f"unix:{place}/k.sock",
        "host.arena_bytes": "16MiB",
        "host.directory": str(place),
        "ssd.enabled": False,
    }
    loaded = load(environ={}, flags=[("--set", key, value) for key, value in flags.items()])
    store = Store.open(loaded.settings, clock=SystemClock(), events=Events())
    made = Servant(store, tokens_file(place / "tokens.toml"))
    try:
        yield made
    finally:
        made.workers.shutdown()
        store.close(deadline_seconds=1.0)


@dataclass(slots=True)
class Prey:
    """What the prying tenant knows of the other one."""

    fingerprint: bytes
    keys: bytes
    lease: int


class Pryer:
    """Makes one probe after another as `bolt` against `acme`; a probe that learns anything is an error."""

    def __init__(self, world: Servant, *, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.prey = Prey(b"", b"", 0)
        self._acts: tuple[Callable[[], Awaitable[None]], ...] = (
            self.match_foreign, self.match_foreign, self.match_own, self.match_own, self.simple, self.simple,
            self.numbers, self.numbers, self.fetch, self.put_foreign, self.open_foreign, self.slots,
        )  # fmt: skip

    async def prepare(self) -> None:
        """Let both open their namespaces, and acme store the prompt."""
        for tenant, space in SPACES.items():
            await self.world.call(tenant, "Open", wire.open_to_wire(space, root=root_of(tenant)))
        keys = keys_of("acme")
        put = put_of("acme", keys, data=lambda block: blocks.payload(keys, block))
        await self.world.call("acme", "Put", put)
        self.prey = Prey(SPACES["acme"].fingerprint, keys, 0)
        await self.check()

    async def check(self) -> None:
        """Look as acme: all is there, unharmed, and the lease that bolt knows still lives."""
        if self.prey.lease:
            renew = pb.RenewRequest(leases=[self.prey.lease], lease_seconds=60.0)
            assert not (await self.world.call("acme", "Renew", renew)).ended
        match = _match("acme", self.prey.keys, MatchMode.LEASE)
        match.lease_seconds = 60.0
        reply = await self.world.call("acme", "Match", match)
        assert reply.blocks == STORED
        written = await self.world.call("acme", "Fetch", pb.FetchRequest(lease=reply.lease, payload=True))
        got = {r.chunk.block: r.chunk.data for r in written if r.WhichOneof("message") == "chunk"}
        assert got == {block: blocks.payload(self.prey.keys, block) for block in range(STORED)}
        if self.prey.lease:
            release = pb.ReleaseRequest(lease=self.prey.lease, outcome=pb.RELEASE_OUTCOME_UNUSED)
            assert (await self.world.call("acme", "Release", release)).found
        self.prey.lease = reply.lease

    async def run(self, probes: int) -> int:
        """Make so many probes, looking as acme now and then; returns how many were made, all of them vain."""
        for number in range(probes):
            await self.rng.choice(self._acts)()
            if number % 500 == 499:
                await self.check()
        await self.check()
        return sum(self.counts.values())

    def _names(self) -> tuple[bytes, bytes]:
        """Return acme's namespace and one that nobody has, in one order or the other."""
        return self.prey.fingerprint, self.rng.randbytes(32)

    async def _both_refused(self, verb: str, make: Callable[[bytes], Any]) -> None:
        theirs, nobodys = self._names()
        first = await self.world.refused("bolt", verb, make(theirs))
        second = await self.world.refused("bolt", verb, make(nobodys))
        assert first.code is second.code is grpc.StatusCode.PERMISSION_DENIED
        assert first.text.replace(theirs.hex()[:16], "") == second.text.replace(nobodys.hex()[:16], "")
        self.counts[verb] += 1

    async def match_foreign(self) -> None:
        """Match in acme's namespace, in any mode."""
        mode, keys = self.rng.choice(tuple(MatchMode)), self._keys()
        owner = self.rng.choice(("", "request-1"))

        def make(fingerprint: bytes) -> pb.MatchRequest:
            request = MatchRequest(namespace=Fingerprint(fingerprint), keys=keys, mode=mode, owner=owner)
            return wire.match_to_wire(request)

        await self._both_refused("Match", make)

    async def match_own(self) -> None:
        """Match acme's keys, or the same prompt, in a namespace of one's own: equal but for the tenant."""
        keys = self.rng.choice((self.prey.keys, keys_of("bolt"), self._keys()))
        for mode in (MatchMode.PROBE, MatchMode.LEASE, MatchMode.BITMAP):
            reply = await self.world.call("bolt", "Match", _match("bolt", keys, mode))
            assert (reply.blocks, reply.lease, len(reply.extents)) == (0, 0, 0)
            assert not any(reply.bitmap)
            assert mode is MatchMode.BITMAP or reply.reason == pb.MISS_REASON_NEVER_STORED
        self.counts["Match own"] += 1

    async def simple(self) -> None:
        """Touch, prefetch, list and delete in acme's namespace."""
        keys = self._keys()
        verb, make = self.rng.choice(
            (
                ("Touch", lambda name: pb.TouchRequest(namespace=name, keys=keys)),
                ("Prefetch", lambda name: pb.PrefetchRequest(namespace=name, keys=keys, deadline_seconds=1)),
                ("List", lambda name: pb.ListRequest(namespace=name, limit=10)),
                ("Delete", lambda name: pb.DeleteRequest(namespace=name, keys=keys)),
                ("Delete", lambda name: pb.DeleteRequest(namespace=name, all=True)),
            )
        )
        await self._both_refused(verb, make)

    async def numbers(self) -> None:
        """Release, renew and cancel what acme holds: as if it were not there."""
        lease = self.prey.lease
        if self.rng.random() < 0.5:
            release = pb.ReleaseRequest(lease=lease, outcome=self.rng.choice(OUTCOMES))
            assert not (await self.world.call("bolt", "Release", release)).found
            own = _match("bolt", self.prey.keys, MatchMode.PROBE)
            own.release.append(release)
            assert not (await self.world.call("bolt", "Match", own)).blocks
        else:
            renew = pb.RenewRequest(leases=[lease, 12345], lease_seconds=60.0)
            assert list((await self.world.call("bolt", "Renew", renew)).ended) == [lease, 12345]
            assert not (await self.world.call("bolt", "Cancel", pb.CancelRequest(prefetch=lease))).found
        self.counts["numbers"] += 1

    async def fetch(self) -> None:
        """Fetch what acme has leased: the words are those for a lease that never was."""
        nobodys = self.rng.getrandbits(63)
        payload = self.rng.random() < 0.8
        answers = []
        for lease in (self.prey.lease, nobodys):
            request = pb.FetchRequest(lease=lease, payload=payload)
            refusal = await self.world.refused("bolt", "Fetch", request)
            answers.append((refusal.code, refusal.text.replace(f"{lease:#x}", "")))
        assert answers[0] == answers[1]
        self.counts["Fetch"] += 1

    async def put_foreign(self) -> None:
        """Put into acme's namespace what would answer acme's prompts."""
        keys = self.rng.choice((self.prey.keys, self.rng.randbytes(64)))
        put = put_of("acme", keys, data=lambda block: bytes(blocks.PART.bytes_max))
        assert (await self.world.refused("bolt", "Put", put)).code is grpc.StatusCode.PERMISSION_DENIED
        self.counts["Put"] += 1

    async def open_foreign(self) -> None:
        """Open acme's namespace."""
        request = wire.open_to_wire(SPACES["acme"], root=root_of("bolt"))
        refusal = await self.world.refused("bolt", "Open", request)
        assert refusal.code is grpc.StatusCode.PERMISSION_DENIED
        self.counts["Open"] += 1

    async def slots(self) -> None:
        """Reserve slots to read what they held before; commit or abort a reservation of somebody."""
        name = SPACES[self.rng.choice(("acme", "bolt"))].fingerprint
        verb, request = self.rng.choice(
            (
                ("Reserve", pb.ReserveRequest(namespace=name, parent=root_of("bolt"), keys=bytes(32))),
                ("Commit", pb.CommitRequest(reservation=self.prey.lease, blocks=1, ack=pb.ACK_TIER_HOST)),
                ("Abort", pb.AbortRequest(reservation=self.prey.lease)),
            )
        )
        refusal = await self.world.refused("bolt", verb, request)
        assert refusal.code is grpc.StatusCode.PERMISSION_DENIED
        self.counts[verb] += 1

    def _keys(self) -> bytes:
        count = self.rng.randint(1, STORED)
        return self.rng.choice((self.prey.keys[: 32 * count], self.prey.keys[-32 * count :]))


def _match(tenant: str, keys: bytes, mode: MatchMode) -> pb.MatchRequest:
    return wire.match_to_wire(MatchRequest(namespace=SPACES[tenant].fingerprint, keys=keys, mode=mode))


def pry(place: Path, *, probes: int, seed: int) -> tuple[int, collections.Counter[str]]:
    """Make probes of all kinds; returns how many and of which kinds. A hit is an AssertionError."""
    with servant(place) as world:
        pryer = Pryer(world, seed=seed)

        async def main() -> int:
            await pryer.prepare()
            return await pryer.run(probes)

        return asyncio.run(main()), pryer.counts
