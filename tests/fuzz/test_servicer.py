"""Wild requests against the servicer in process: each is answered or refused, and nothing is held after."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc

from kvstore.rpc.v1 import data_pb2 as pb
from tests.fuzz.messages import UNARY, Known, Stranger
from tests.fuzz.probes import SPACES, Refused, Servant, keys_of, root_of, servant

CALLS = 3000
HELD = ("kvstore_leases", "kvstore_reservations", "kvstore_prefetches", "kvstore_quarantined_slots")
VERBS = {name.rpartition("/")[2]: kind for name, kind in UNARY.items() if ".Data/" in name}
VERBS.pop("Nothing")
NEVER = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


async def wild(world: Servant, stranger: Stranger) -> set[str]:
    """Make calls as one tenant; return the verbs that were also answered."""
    answered = set()
    for _ in range(CALLS):
        verb = stranger.rng.choice((*VERBS, "Put", "Fetch"))
        try:
            if verb == "Put":
                await world.call("acme", verb, stranger.put_requests())
            elif verb == "Fetch":
                await world.call("acme", verb, stranger.request(pb.FetchRequest))
            else:
                reply = await world.call("acme", verb, stranger.request(VERBS[verb]))
                stranger.known.learn(getattr(reply, "lease", 0))
            answered.add(verb)
        except Refused as refusal:
            if refusal.code in NEVER:
                raise AssertionError(f"{verb}: {refusal}") from refusal
    return answered


def test_wild_requests_are_answered_or_refused(tmp_path: Path) -> None:
    known = Known(
        canonicals=[space.canonical() for space in SPACES.values()],
        fingerprints=[space.fingerprint for space in SPACES.values()],
        roots=[root_of(tenant) for tenant in SPACES],
        keys=[keys_of(tenant) for tenant in SPACES],
    )
    with servant(tmp_path) as world:
        answered = asyncio.run(wild(world, Stranger(random.Random(7), known)))
        assert {"Open", "Match", "Touch", "List", "Renew", "Release", "Put"} <= answered
        for lease in known.ever:
            world.verbs.release(pb.ReleaseRequest(lease=lease, outcome=pb.RELEASE_OUTCOME_UNUSED))
        gauges = world.verbs.ladder.gauges()
        assert not {name: gauges[name] for name in HELD if gauges[name]}
        assert world.budget.held == 0
