"""The same history under many settings: where a setting must not matter, no answer changes."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from tests.property.history import play, some_steps
from tests.property.world import Setting, World

# What has expired is still there or not as segments and sweeps have it, so nothing on disk may expire.
PLAIN = Setting(faults=False, longest_pause=31.0)
LEFT_OUT = {"faults", "verify", "crash"}
VARIANTS: dict[str, dict[str, Any]] = {
    "arena": {"pages": 9000},
    "slabs": {"pages": 65536},
    "policy": {"policy": "s3fifo"},
    "learning policy": {"policy": "density"},
    "loads": {"load_bytes": 4096, "loads_in_flight": 1},
    "big loads": {"load_bytes": 1 << 20},
    "slow disk": {"manual": True},
    "short queue": {"queue_bytes": 1},
    "segments": {"frames_per_segment": 1},
    "long segments": {"frames_per_segment": 64},
}


def answers(setting: Setting, *, seed: int, steps: int, without: frozenset[str] = frozenset()) -> list[Any]:
    """What the store said, step by step."""
    world = World(setting, seed=seed)
    left_out = LEFT_OUT | without
    wanted = [
        (name, number) for name, number in some_steps(random.Random(seed), steps) if name not in left_out
    ]
    play(world, wanted, check_every=25)
    return world.log


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("side", ["", "trailing_blocks"])
def test_settings_that_must_not_matter_do_not(flat: bool, side: str) -> None:
    plain = dataclasses.replace(PLAIN, flat=flat, side=side)
    expected = answers(plain, seed=11, steps=250, without=frozenset({"reopen"}))
    assert len(expected) > 100
    for name, changed in VARIANTS.items():
        found = answers(
            dataclasses.replace(plain, **changed), seed=11, steps=250, without=frozenset({"reopen"})
        )
        assert found == expected, f"{name} changes an answer"


def test_a_restart_changes_no_answer_of_what_reaches_the_disk() -> None:
    expected = answers(PLAIN, seed=12, steps=250)
    for name in ("policy", "learning policy", "loads", "segments"):
        found = answers(dataclasses.replace(PLAIN, **VARIANTS[name]), seed=12, steps=250)
        assert found == expected, f"{name} changes an answer"


def test_the_number_of_parts_changes_no_answer_of_whole_puts() -> None:
    without = frozenset({"reserve_part", "commit_some", "reopen"})
    one, two = (
        answers(dataclasses.replace(PLAIN, parts=parts), seed=13, steps=250, without=without)
        for parts in (1, 2)
    )
    assert one == two
