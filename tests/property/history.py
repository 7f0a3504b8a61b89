"""Histories: which deed comes when, and how a run of them is told, replayed and compared."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.property import deeds, fates
from tests.property.world import Setting, World

WEIGHTS: dict[str, float] = {
    "put_whole": 20,
    "reserve_part": 9,
    "commit_some": 7,
    "abort_some": 3,
    "write_late": 1,
    "match": 24,
    "watch": 9,
    "release_some": 8,
    "renew": 2,
    "probe": 6,
    "touch": 4,
    "prefetch": 4,
    "cancel": 2,
    "delete": 1.2,
    "delete_namespace": 0.15,
    "list_all": 0.6,
    "status": 0.4,
    "tick": 9,
    "run_io": 9,
    "session_ends": 0.8,
    "client_comes_or_goes": 0.8,
    "faults": 0.8,
    "verify": 0.2,
    "reopen": 0.25,
    "crash": 0.25,
}
DEEDS: dict[str, deeds.Deed] = {name: getattr(deeds, name, None) or getattr(fates, name) for name in WEIGHTS}
NAMES = list(WEIGHTS)


def some_setting(rng: random.Random) -> Setting:
    """A store of any size and shape."""
    return Setting(
        pages=rng.choice([24, 40, 90, 300, 4096, 4096, 4096]),
        policy=rng.choice(["lru", "lru", "s3fifo", "density", "density"]),
        manual=rng.random() < 0.5,
        parts=rng.choice([1, 1, 2, 3]),
        side=rng.choice(["", "", "trailing_blocks", "checkpoint"]),
        flat=rng.random() < 0.35,
        capacity=rng.choice([0, 0, 0, 40_000, 200_000]),
        load_bytes=rng.choice([4096, 8192, 20_000]),
        loads_in_flight=rng.choice([1, 2, 16]),
        queue_bytes=rng.choice([1, 30_000, 1 << 20]),
        frames_per_segment=rng.choice([1, 2, 4, 8]),
    )


def some_steps(rng: random.Random, count: int) -> list[tuple[str, int]]:
    names = rng.choices(NAMES, [WEIGHTS[name] for name in NAMES], k=count)
    return [(name, rng.getrandbits(32)) for name in names]


def step(world: World, name: str, seed: int, *, deep: bool) -> None:
    """Do one deed, let the oracle follow, compare."""
    world.steps += 1
    DEEDS[name](world, random.Random(seed))
    world.after_step(deep=deep)


def play(world: World, steps: Sequence[tuple[str, int]], *, check_every: int = 1, first: int = 0) -> None:
    """Do deeds; a failure says which one and how to get there again."""
    for index, (name, seed) in enumerate(steps, start=first):
        deep = index % check_every == 0
        try:
            step(world, name, seed, deep=deep)
        except BaseException as error:
            error.add_note(f"step {index}: {name} {seed} of {world.setting}")
            raise
        if deep:
            world.may_undo_acks = False
