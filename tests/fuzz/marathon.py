"""The long forms: `python -m tests.fuzz.marathon --calls 100000 --probes 100000 --seed 1`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.probes import pry
from tests.fuzz.world import fuzz, fuzzed_daemon


def main() -> int:
    """Fuzz one daemon, let one tenant pry, and print what came of it; a fault ends it with its seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000, help="wild calls; 0 for none")
    parser.add_argument("--probes", type=int, default=100_000, help="probes across tenants; 0 for none")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.calls:
        wild_calls(options.calls, options.seed)
    if options.probes:
        probes_across_tenants(options.probes, options.seed)
    return 0


def wild_calls(calls: int, seed: int) -> None:
    """Fuzz one daemon."""
    begin = time.monotonic()
    with fuzzed_daemon() as world:
        fuzzer, before, after = fuzz(world, calls=calls, seed=seed, warm=min(2000, calls))
    lines = [f"{name:40} {count:9,}" for name, count in sorted(fuzzer.counts.items())]
    lines.append(f"{fuzzer.calls:,} calls, seed {seed}, {time.monotonic() - begin:.0f} s")
    lines.append(f"before: {before}")
    lines.append(f"after:  {after}")
    sys.stdout.write("\n".join(lines) + "\n")


def probes_across_tenants(probes: int, seed: int) -> None:
    """Let one tenant pry into what another has stored."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvs-") as place:
        made, counts = pry(Path(place), probes=probes, seed=seed)
    lines = [f"{name:40} {count:9,}" for name, count in sorted(counts.items())]
    lines.append(f"{made:,} probes, 0 hits, seed {seed}, {time.monotonic() - begin:.0f} s")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
