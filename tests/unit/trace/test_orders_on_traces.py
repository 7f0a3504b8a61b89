"""What the order that learns keeps of real traffic, beside the least recent order and the best possible."""

from __future__ import annotations

import pytest

from kvstore.cli.traces import classes_of
from kvstore.core.eviction import EvictionPolicy, ExactLru
from kvstore.core.eviction_density import HitDensity
from kvstore.trace.classing import parse_rules
from kvstore.trace.optimum import Future
from kvstore.trace.simulator import Simulator
from kvstore.trace.tally import Tally
from kvstore.types import Tier, TtlMode
from tests.unit.trace.test_reference import CONVERSATION, DEV, SMALL, SYNTHETIC, TRACES, loaded

pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason="the reference traces are not beside this checkout"
)


def gained(name: str, room: int, *rules: str) -> tuple[float, float]:
    """How far density is above the least recent order, and how far the best possible is."""
    chosen = parse_rules(rules)
    size, requests, reference = loaded(name, rules=chosen)
    classes = classes_of(["inf"], TtlMode.SLIDING, chosen, lowest=Tier.HOST)

    def hits(policy: EvictionPolicy) -> Tally:
        simulator = Simulator(block_tokens=size, capacity_blocks=room, classes=classes, policy=policy)
        return simulator.run(requests)

    tally, known = hits(HitDensity()), reference["lru"].get(str(room))
    lru = known["tok"] if known is not None else hits(ExactLru()).rates()["token_hit_rate"]
    best = Future(requests).hit_tokens(block_tokens=size, capacity_blocks=room) / tally.input_tokens
    return tally.rates()["token_hit_rate"] - lru, best - lru


@pytest.mark.slow
@pytest.mark.parametrize("room", [8192, 16384])
def test_of_chat_a_seventh_of_what_is_possible_is_gained(room: int) -> None:
    more, possible = gained(CONVERSATION, room)
    assert possible > 0.1
    assert more >= 0.15 * possible


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "room", "least"), [(SYNTHETIC, 4096, 0.0), (SMALL, 4096, 0.0), (SMALL, 1024, -0.002)]
)
def test_other_traffic_does_not_pay_for_it(name: str, room: int, least: float) -> None:
    assert gained(name, room)[0] >= least


@pytest.mark.long
@pytest.mark.parametrize("room", [4096, 8192, 16384, 32768, 65536])
def test_of_agents_a_seventh_is_gained_when_the_end_of_a_turn_is_told(room: int) -> None:
    """An answer that ended with a call of a tool is followed by another request in seconds."""
    more, possible = gained(DEV, room, "chat: stop=end_turn")
    assert more >= 0.15 * possible


@pytest.mark.long
@pytest.mark.parametrize(("room", "share"), [(16384, 0.15), (32768, 0.15), (65536, 0.1)])
def test_of_agents_something_is_gained_without_classes(room: int, share: float) -> None:
    more, possible = gained(DEV, room)
    assert more >= share * possible
