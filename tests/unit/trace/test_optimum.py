"""The bound that no order beats: against a search of everything that a cache could do."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path

import pytest

from kvstore.trace.optimum import DENSE_IDS_MAX, Future
from kvstore.trace.requests import TraceFile, TraceRequest
from kvstore.trace.simulator import Simulator

TRACES = Path(__file__).parents[4] / "shared" / "traces"


def some_trace(rng: random.Random, *, far: int = 0) -> list[TraceRequest]:
    """Requests of one to three blocks among seven."""
    return [
        TraceRequest(i, 4 * size, 0, tuple((far + block, 1) for block in sorted(rng.sample(range(7), size))))
        for i, size in enumerate(rng.choices((1, 2, 3), k=9))
    ]


def best_of_all(requests: list[TraceRequest], room: int) -> int:
    """Hit blocks when every choice of what to keep is tried."""
    wanted = [frozenset(first for first, _ in request.runs) for request in requests]

    @cache
    def from_here(index: int, kept: frozenset[int]) -> int:
        if index == len(wanted):
            return 0
        possible = sorted(kept | wanted[index])
        choices = itertools.combinations(possible, min(room, len(possible)))
        return len(kept & wanted[index]) + max(from_here(index + 1, frozenset(c)) for c in choices)

    return from_here(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all_choices(seed: int) -> None:
    requests = some_trace(random.Random(seed))
    for room in (1, 2, 4):
        expected = 4 * best_of_all(requests, room)
        assert Future(requests).hit_tokens(block_tokens=4, capacity_blocks=room) == expected


def test_ids_may_lie_far_apart() -> None:
    near, far = some_trace(random.Random(1)), some_trace(random.Random(1), far=DENSE_IDS_MAX)
    answers = {Future(r).hit_tokens(block_tokens=4, capacity_blocks=3) for r in (near, far)}
    assert len(answers) == 1


@pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not here")
def test_with_room_for_all_it_is_what_the_simulator_finds() -> None:
    file = TraceFile(TRACES / "mooncake_synthetic.jsonl.gz")
    requests = file.sorted()[:400]
    found = Future(requests).hit_tokens(block_tokens=file.block_tokens, capacity_blocks=1 << 30)
    assert found == Simulator(block_tokens=file.block_tokens).run(requests).hit_tokens
