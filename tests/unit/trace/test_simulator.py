"""The simulator against a brute-force cache of single blocks."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvstore.trace.requests import TraceRequest
from kvstore.trace.simulator import Simulator


def brute_force(requests: list[TraceRequest], *, ttl_ms: float, capacity: int) -> list[int]:
    """Hit blocks of each request: a dict of last touches, evicted one block at a time, tails before heads."""
    touched: OrderedDict[int, int] = OrderedDict()
    hits = []
    for request in requests:
        now = request.timestamp_ms
        ids = [first + i for first, count in request.runs for i in range(count)]
        alive = [block in touched and now - touched[block] <= ttl_ms for block in ids]
        hits.append(alive.index(False) if False in alive else len(ids))
        for block in reversed(ids):
            touched[block] = now
            touched.move_to_end(block)
        while capacity and len(touched) > capacity:
            touched.popitem(last=False)
    return hits


def tree_trace(rng: random.Random, requests: int) -> list[TraceRequest]:
    """Requests over a growing tree, so that an id always means the same prefix."""
    children: dict[tuple[int, int], int] = {}
    found, now = [], 0
    for _ in range(requests):
        now += rng.choice([0, 0, 100, 1000, 5000])
        node, path = 0, []
        for _ in range(rng.randint(1, 14)):
            node = children.setdefault((node, rng.randrange(2)), len(children) + 1)
            path.append((node, 1))
        found.append(TraceRequest(now, 4 * len(path), 0, tuple(path)))
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("ttl_ms", "capacity"), [(float("inf"), 0), (6000, 0), (float("inf"), 40), (6000, 64)]
)
def test_hits_equal_those_of_a_cache_of_single_blocks(seed: int, ttl_ms: float, capacity: int) -> None:
    requests = tree_trace(random.Random(seed), 150)
    simulator = Simulator(block_tokens=4, ttl_seconds=ttl_ms / 1000, capacity_blocks=capacity)
    expected = brute_force(requests, ttl_ms=ttl_ms, capacity=capacity)
    assert [simulator.request(request) for request in requests] == expected


def test_residency_is_integrated_to_the_millisecond() -> None:
    requests = [
        TraceRequest(0, 8, 0, ((1, 2),)),
        TraceRequest(500, 4, 0, ((9, 1),)),
        TraceRequest(4000, 4, 0, ((9, 1),)),
    ]
    tally = Simulator(block_tokens=4, ttl_seconds=1.0).run(requests)
    assert tally.resident_blocks_peak == 3
    assert tally.resident_blocks_mean == pytest.approx((2 * 1.0 + 1 * 1.0) / 4.0, abs=1e-3)
