"""How much of expiry is done at once: whoever matches meanwhile waits for one step."""

from __future__ import annotations

from itertools import pairwise

from kvstore.trace.requests import TraceRequest
from kvstore.trace.simulator import Simulator

RUNS = 40


def test_a_step_lets_one_frame_go_and_a_turn_many() -> None:
    simulator = Simulator(block_tokens=4, ttl_seconds=100.0, ssd_bytes=1 << 30, capacity_blocks=1 << 12)
    for number in range(RUNS):
        simulator.request(TraceRequest(1000 + number, 40, 0, ((100 * number + 1, 10),)))
    catalog = simulator.ladder.catalog
    assert sum(len(segment.frames) for segment in catalog.segments) == RUNS
    simulator._clock.advance(101.0)
    left: list[tuple[int, int]] = []

    def look() -> None:
        left.append((sum(len(segment.frames) for segment in catalog.segments), len(catalog.policy)))

    look()
    simulator.ladder.tick(pause=look)
    look()
    frames, nodes = zip(*left, strict=True)
    assert max(before - after for before, after in pairwise(frames)) == 1
    assert max(before - after for before, after in pairwise(nodes)) == 1
    assert frames[-1] == nodes[-1] == 0
