"""`python -m tests.torture --seed N --seconds S`: one run, its summary, and exit code 1 on any violation."""

from __future__ import annotations

import argparse
import sys

from tests.torture.supervisor import Torture


def main() -> int:
    """Run once and print what came of it."""
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--kills", type=int, default=1 << 30, help="end after so many; 0: the daemon lives on"
    )
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument(
        "--encrypted", action=argparse.BooleanOptionalAction, help="without it the seed decides"
    )
    given = parser.parse_args()
    with Torture(seed=given.seed, clients=given.clients, encrypted=given.encrypted) as torture:
        torture.flood(seconds=min(5.0, given.seconds / 10))
        summary = torture.run(seconds=given.seconds, kills_max=given.kills)
    for fault in summary.faults[:50]:
        sys.stdout.write(f"VIOLATED {fault}\n")
    sys.stdout.write(summary.line() + "\n")
    return 0 if summary.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
