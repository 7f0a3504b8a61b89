"""How much of expiry is done at once, and by whom: whoever matches meanwhile waits for one step."""

from __future__ import annotations

from itertools import pairwise

from kvstore.core.housekeeping import PAUSE_SECONDS
from kvstore.trace.requests import TraceRequest
from kvstore.trace.simulator import Simulator
from kvstore.types import MissReason
from tests.unit.core.test_moves import HOUR, OneSegment, stored

RUNS = 40
NO_LEASE = 0


class Ended:
    """A store of RUNS runs, of a frame each, all of which have ended; `leave` says what is left."""

    def __init__(self) -> None:
        simulator = Simulator(block_tokens=4, ttl_seconds=100.0, ssd_bytes=1 << 30, capacity_blocks=1 << 12)
        for number in range(RUNS):
            simulator.request(TraceRequest(1000 + number, 40, 0, ((100 * number + 1, 10),)))
        self.ladder, self._clock = simulator.ladder, simulator._clock
        assert self.frames() == RUNS
        self._clock.advance(101.0)

    def frames(self) -> int:
        return sum(len(segment.frames) for segment in self.ladder.catalog.segments)

    def release(self, count: int) -> None:
        """End so many leases, one whenever a step is due."""
        for _ in range(count):
            self._clock.advance(PAUSE_SECONDS)
            self.ladder.release(NO_LEASE, used=0)


def test_a_step_lets_one_frame_go_and_a_turn_many() -> None:
    ended = Ended()
    left: list[tuple[int, int]] = []

    def look() -> None:
        left.append((ended.frames(), len(ended.ladder.catalog.policy)))

    look()
    ended.ladder.tick(pause=look)
    look()
    frames, nodes = zip(*left, strict=True)
    assert max(before - after for before, after in pairwise(frames)) == 1
    assert max(before - after for before, after in pairwise(nodes)) == 1
    assert frames[-1] == nodes[-1] == 0


def test_a_release_does_the_step_that_is_due() -> None:
    ended = Ended()
    ended.release(1000)
    assert ended.frames() == RUNS, "no turn has begun"
    ended.ladder.tick(pause=lambda: ended.release(2))
    left = [ended.frames()]
    while left[-1]:
        ended.release(1)
        ended.ladder.release(NO_LEASE, used=0)  # too early for another step
        left.append(ended.frames())
    assert max(before - after for before, after in pairwise(left)) == 1
    assert len(left) < 3 * RUNS


def test_a_tick_leaves_its_turn_to_releases_that_are_faster() -> None:
    ended, pauses = Ended(), [0]

    def busy() -> None:
        pauses[0] += 1
        ended.release(2)

    ended.ladder.tick(pause=busy)
    assert pauses == [1]
    ended.release(10)
    ended.ladder.tick(pause=busy)
    assert pauses == [1], "nothing to do meanwhile"
    assert ended.frames() > 0
    ended.release(2)
    ended._clock.advance(0.1)
    ended.ladder.tick(pause=lambda: ended.release(1))
    assert ended.frames() == 0, "releases that are too slow help, and the tick goes on"


def test_a_segment_that_goes_another_way_halfway_leaves_nothing_on_disk() -> None:
    rig = OneSegment(pages=2048)
    stored(rig, 20)
    rig.clock.advance(2 * HOUR)
    catalog = rig.ladder.catalog
    (segment,) = catalog.segments

    def take_the_rest() -> None:
        if len(segment.frames) == 10:
            for frame in list(segment.frames):
                assert frame.location is not None
                catalog.graves.bury(frame.location, frame.fingerprint)
                catalog.forget_on_ssd(frame, MissReason.EVICTED)

    rig.ladder.tick(pause=take_the_rest)
    assert rig.disk.frames == {}
    assert not catalog.segments.going
