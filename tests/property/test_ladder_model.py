"""Random histories of the ladder against an oracle that knows exactly what must be there.

Never wrong bytes, never more or less than the oracle says, and every structure whole after every step.
"""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from tests.property.history import NAMES, WEIGHTS, play, some_setting, some_steps
from tests.property.marathon import marathon, run_history
from tests.property.world import World
from tests.support.model import Cell

STEPS = st.lists(
    st.tuples(
        st.sampled_from([name for name in NAMES for _ in range(max(1, round(WEIGHTS[name])))]),
        st.integers(0, 2**32 - 1),
    ),
    min_size=20,
    max_size=70,
)
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)


@settings(max_examples=60, deadline=None, phases=PHASES)
@given(seed=st.integers(0, 2**32 - 1), steps=STEPS)
def test_every_step_of_a_short_history_is_as_the_oracle_says(seed: int, steps: list[tuple[str, int]]) -> None:
    play(World(some_setting(random.Random(seed)), seed=seed), steps)


def test_long_histories_are_as_the_oracle_says() -> None:
    done, _ = marathon(seed=3, steps=4_000, check_every=40)
    assert done == 4_000


def test_a_lease_holds_blocks_where_its_own_touch_put_them() -> None:
    """To be written they had been given a frame of their own; the lease held the old one, empty by then."""
    run_history(71_000_057, steps=2_000, check_every=200)


def test_a_move_does_not_end_the_answer_of_an_owner() -> None:
    """Blocks that a lease held moved, and its owner was told of more of them than before."""
    run_history(31_337_000_061, steps=2_000, check_every=200)


def test_a_side_part_on_ssd_has_all_its_blocks_there() -> None:
    """One of several was in flight: the last alone was looked for."""
    run_history(53_000_000_542, steps=2_000, check_every=50)


@pytest.mark.long
def test_very_long_histories_are_as_the_oracle_says() -> None:
    done, _ = marathon(seed=4, steps=60_000, check_every=50)
    assert done == 60_000


def test_a_failure_says_how_to_get_there_again() -> None:
    world = World(some_setting(random.Random(1)), seed=1)
    steps = some_steps(random.Random(1), 3)
    world.models[0].blocks[b"of nobody"] = Cell("agent", world.now)
    with pytest.raises(AssertionError) as caught:
        play(world, steps)
    assert f"step 0: {steps[0][0]} {steps[0][1]}" in caught.value.__notes__[0]
