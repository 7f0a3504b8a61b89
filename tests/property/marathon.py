"""Long random histories without shrinking: `python -m tests.property.marathon --seed 1 --steps 1000000`.

Each history runs on a setting of its own. A failure names the seed of its history and the step; `--only SEED`
plays that one again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.property.history import play, some_setting, some_steps
from tests.property.world import World

HISTORY_STEPS = 2000


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_history(seed: int, *, steps: int, check_every: int) -> World:
    """Play the history of a seed, with everything compared at its end."""
    rng = random.Random(seed)
    world = World(some_setting(rng), seed=seed)
    play(world, some_steps(rng, steps), check_every=check_every)
    world.after_step(deep=True)
    return world


def marathon(*, seed: int, steps: int, check_every: int, seconds: float = float("inf")) -> tuple[int, int]:
    """Play histories until so many steps are done or the time is up; returns steps and histories."""
    started, done, histories = time.monotonic(), 0, 0
    while done < steps and time.monotonic() - started < seconds:
        count = min(HISTORY_STEPS, steps - done)
        mine = seed * 1_000_000 + histories
        try:
            run_history(mine, steps=count, check_every=check_every)
        except BaseException:
            say(f"failed: --only {mine} --steps {count} --check-every {check_every}")
            raise
        done, histories = done + count, histories + 1
        if histories % 25 == 0:
            say(f"{done} steps in {histories} histories, {time.monotonic() - started:.0f} s")
    return done, histories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--check-every", type=int, default=50, help="steps between comparisons of everything")
    parser.add_argument("--only", type=int, help="the seed of one history to play again")
    chosen = parser.parse_args()
    if chosen.only is not None:
        run_history(chosen.only, steps=chosen.steps, check_every=chosen.check_every)
        say("passed")
        return
    done, histories = marathon(
        seed=chosen.seed, steps=chosen.steps, check_every=chosen.check_every, seconds=chosen.seconds
    )
    say(f"passed: {done} steps in {histories} histories, seed {chosen.seed}")


if __name__ == "__main__":
    main()
