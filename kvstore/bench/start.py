"""start: seconds from the daemon's command to the first answer, with ten million blocks on SSD."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from collections.abc import Iterator

from kvstore.bench import prompt, rows
from kvstore.bench.filling import AGENT, Filled, fill
from kvstore.bench.harness import Bench
from kvstore.bench.prompt import Prompt
from kvstore.bench.rows import Row, RowSpec
from kvstore.bench.scale import BLOCKS, BLOCKS_QUICK, START_SECONDS, child, told
from kvstore.cli.child import ChildDaemon
from kvstore.client import Client, OpenNamespace
from kvstore.errors import TierUnavailable
from kvstore.types import AckTier, MatchMode, key_count

CLEAN_STARTS, CLEAN_STARTS_QUICK = 3, 1
WRITTEN_BEFORE_KILL = 300


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group."""
    with bench.scratch() as directory:
        blocks = BLOCKS_QUICK if bench.is_quick else BLOCKS
        filled = fill(directory / "data", blocks=blocks, shape=AGENT, tell=bench.tell)
        daemon = child(bench, directory)
        try:
            yield from _rows(bench, daemon, filled)
        finally:
            daemon.stop()


def _rows(bench: Bench, daemon: ChildDaemon, filled: Filled) -> Iterator[Row]:
    def row(spec: RowSpec, taken: list[float]) -> Row:
        each = ", ".join(f"{seconds:.1f}" for seconds in taken)
        return Row(spec, statistics.median(taken), f"{each} s, files in the page cache; {told(filled)}")

    clean = []
    for number in range(CLEAN_STARTS_QUICK if bench.is_quick else CLEAN_STARTS):
        bench.tell(f"clean start {number + 1}")
        clean.append(_first_match(daemon, filled))
        daemon.stop()
    yield row(rows.START_CLEAN, clean)
    bench.tell("start after kill -9")
    daemon.start(deadline_seconds=START_SECONDS)
    _write(daemon)
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.stop()
    yield row(rows.START_KILLED, [_first_match(daemon, filled)])
    daemon.stop()
    bench.tell("start without the index")
    shutil.rmtree(daemon.data / "index")
    yield row(rows.START_REBUILD, [_first_match(daemon, filled)])


def _first_match(daemon: ChildDaemon, filled: Filled) -> float:
    """Start, and ask for blocks that were there before; returns the seconds of both."""
    began = time.perf_counter()
    daemon.start(deadline_seconds=START_SECONDS)
    with Client(daemon.address) as client:
        match = _open(client).match(
            filled.sample, mode=MatchMode.PROBE, deadline_seconds=prompt.DEADLINE_SECONDS
        )
        seconds = time.perf_counter() - began
    if match.blocks < key_count(filled.sample):
        raise TierUnavailable(f"start: {match.blocks} of {key_count(filled.sample)} blocks: {match.reason}")
    return seconds


def _write(daemon: ChildDaemon) -> None:
    """Let the daemon have something to lose: acknowledged blocks in a segment that nobody seals."""
    source = prompt.random_bytes(WRITTEN_BEFORE_KILL, prompt.BLOCK_BYTES, seed=5)
    with Client(daemon.address) as client:
        Prompt.draw(_open(client), WRITTEN_BEFORE_KILL, seed=5).store(source, ack=AckTier.SSD)


def _open(client: Client) -> OpenNamespace:
    return client.open(prompt.block_major("filled"))
