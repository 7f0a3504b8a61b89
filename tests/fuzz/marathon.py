"""The long form of the wire fuzz: `python -m tests.fuzz.marathon --calls 100000 --seed 1`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.world import fuzz, fuzzed_daemon


def main() -> int:
    """Fuzz one daemon and print what came of it; a fault ends it with its seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin = time.monotonic()
    with fuzzed_daemon() as world:
        fuzzer, before, after = fuzz(world, calls=options.calls, seed=options.seed, warm=2000)
    lines = [f"{name:40} {count:9,}" for name, count in sorted(fuzzer.counts.items())]
    lines.append(f"{fuzzer.calls:,} calls, seed {options.seed}, {time.monotonic() - begin:.0f} s")
    lines.append(f"before: {before}")
    lines.append(f"after:  {after}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
