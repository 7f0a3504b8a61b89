"""A process that writes frames to a real disk and says what it was promised, until it is killed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kvstore.clock import SystemClock
from kvstore.testing.frames import BuiltFrame, FrameBuilder
from kvstore.tiers.base import FrameLocation
from tests.support.ssd import MIB, recovered_ssd

WAIT_SECONDS = 30.0


def frame_of(seed: int, number: int) -> BuiltFrame:
    """Return frame `number` of a victim; the parent builds the same to compare."""
    builder = FrameBuilder(seed=seed * 1_000_000 + number)
    return builder.frame(1 + number % 9, bucket=f"bucket-{number % 3}")


def main(directory: Path, seed: int) -> None:
    """Write, and now and then delete, for ever."""
    tier = recovered_ssd(directory, clock=SystemClock(), seed=seed, segment_bytes_max=MIB)
    tier.register(FrameBuilder().namespace)
    choice = random.Random(seed)
    living: dict[int, FrameLocation] = {}
    number = 0
    while True:
        numbers = range(number, number + choice.randint(1, 4))
        number = numbers.stop
        futures = tier.write([frame_of(seed, i).write for i in numbers])
        for i, future in zip(numbers, futures, strict=True):
            location = future.result(WAIT_SECONDS).location
            assert location is not None
            living[i] = location
            say(f"written {i}")
        if choice.random() < 0.3:
            i = choice.choice(sorted(living))
            say(f"deleting {i}")
            tier.delete([living.pop(i)]).result(WAIT_SECONDS)
            say(f"deleted {i}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
