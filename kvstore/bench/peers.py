"""A peer beside kvstore: the same bytes, the same machine, the same run. `scripts/peers.sh` starts it.

    python -m kvstore.bench.peers redis --python PYTHON [--rounds N] [--json FILE]

The peer's worker runs in an environment of its own (scripts/peers) and is told what to do line by line. A get
ends when all bytes lie in a private, warm buffer of the caller's, on both sides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.bench import prompt
from kvstore.bench.harness import ROUNDS, Bench, Timings, milliseconds, timed
from kvstore.bench.machine import describe
from kvstore.bench.prompt import BLOCK_BYTES, BLOCKS, Prompt, copy_blocks
from kvstore.bench.put import drain
from kvstore.cli.connection import Daemon
from kvstore.client import Client
from kvstore.errors import TierUnavailable

ARENA_BYTES = 256 << 20
PEERS = ("redis", "lmcache", "mooncake")
CHECKOUT = Path(__file__).parents[2]


class Worker:
    """A peer's process; a context manager that ends it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        if (line := self._line()) != "ready":
            self._end()
            raise TierUnavailable(f"peer: {line or 'it ended before it was ready'}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        with self._process as process:  # closes its pipes and waits
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()

    def do(self, order: str) -> float:
        """Let it do something; returns the seconds that it took.

        Errors: TierUnavailable with what went wrong.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        line = self._line()
        if not line or line.startswith("error"):
            raise TierUnavailable(f"peer: {order}: {line or 'it ended'}")
        return float(line)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def measure(bench: Bench, worker: Worker) -> Iterator[tuple[str, Timings]]:
    """Yield the timings of `kvstore`, `peer` and `copy`, by what is done."""
    source = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=7)
    into = prompt.warm_buffer(BLOCKS, BLOCK_BYTES)
    seeds = itertools.count(1)
    with (
        bench.daemon(arena_bytes=ARENA_BYTES) as child,
        Daemon(child.address) as admin,
        Client(child.address) as client,
    ):
        namespace = client.open(prompt.block_major("peers"))
        kept = Prompt.draw(namespace, BLOCKS, seed=0)
        kept.store(source, retention_class=prompt.HOST_ONLY)

        def copy() -> float:
            return timed(lambda: copy_blocks(source, into))

        def put() -> float:
            fresh = Prompt.draw(namespace, BLOCKS, seed=next(seeds))
            taken = timed(lambda: fresh.store(source, retention_class=prompt.HOST_ONLY))
            drain(admin)
            namespace.delete(fresh.keys)
            return taken

        def get() -> float:
            return timed(lambda: kept.fetch(into, verify=True))

        yield "put", bench.alternate("put", kvstore=put, peer=lambda: worker.do("put"), copy=copy)
        yield "get", bench.alternate("get", kvstore=get, peer=lambda: worker.do("get"), copy=copy)
        worker.do("check")
        yield (
            "look_up",
            bench.alternate(
                "look_up", kvstore=lambda: timed(kept.match_once), peer=lambda: worker.do("look_up")
            ),
        )


def main() -> None:
    """Run one comparison and print it."""
    parser = argparse.ArgumentParser(description="Measure a peer beside kvstore.")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the peer's environment")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with (
        _bench(chosen.rounds) as bench,
        Worker(_command(chosen.python, chosen.peer)) as worker,
    ):
        machine = describe(bench.directory, bench.shared_memory)
        rows = [_row(what, timings) for what, timings in measure(bench, worker)]
    lines = [f"{chosen.peer}, {BLOCKS} blocks of {BLOCK_BYTES:,} B, load {machine['load_average']}"]
    lines += [
        f"{row['what']:8} kvstore {row['kvstore']:>9}  {chosen.peer} {row['peer']:>9}  "
        f"{row['ratio']:.1f}x the time of kvstore  (plain copy {row['copy']})"
        for row in rows
    ]
    sys.stdout.write("\n".join((*lines, "")))
    if chosen.json is not None:
        chosen.json.write_text(
            json.dumps({"peer": chosen.peer, "machine": machine, "rows": rows}, indent=2) + "\n"
        )


def _command(python: Path, peer: str) -> list[str]:
    return [str(python), "-m", f"scripts.peers.{peer}_worker", str(BLOCKS), str(BLOCK_BYTES)]


def _tell(text: str) -> None:
    sys.stderr.write(f"\x1b[K{text}\r")


@contextmanager
def _bench(rounds: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="kvstore-peers-") as folder:
        yield Bench(
            rounds=rounds,
            is_quick=False,
            directory=Path(folder),
            shared_memory=Path("/dev/shm"),
            tell=_tell,
        )


def _row(what: str, timings: Timings) -> dict[str, Any]:
    medians = {name: timings.median(name) for name in timings.seconds}
    shown = {name: milliseconds(seconds) for name, seconds in medians.items()}
    return {"what": what, "copy": "-", **shown, "ratio": round(medians["peer"] / medians["kvstore"], 2)}


if __name__ == "__main__":
    main()
