"""prefetch: what is left to wait for when a prompt came from SSD while its request was queued."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvstore.bench import prompt, rows
from kvstore.bench.harness import Bench, timed
from kvstore.bench.prompt import (
    BLOCK_BYTES,
    BLOCKS,
    DEADLINE_SECONDS,
    PROMPTS_IN_TURN,
    TURN_ARENA_BYTES,
    Array,
    Prompt,
)
from kvstore.bench.rows import Row
from kvstore.client import Client
from kvstore.errors import DeadlineExceeded, TierUnavailable
from kvstore.types import MatchMode

POLL_SECONDS = 0.002


def run(bench: Bench) -> Iterator[Row]:
    """Measure the row of the group."""
    source = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=8)
    into = prompt.warm_buffer(BLOCKS, BLOCK_BYTES)
    with bench.daemon(arena_bytes=TURN_ARENA_BYTES) as child, Client(child.address) as client:
        turn = Prompt.in_turn(client.open(prompt.block_major("prefetch")), source, tell=bench.tell)

        def prefetched() -> float:
            due = next(turn)
            _bring(due)
            return timed(lambda: _first_block(due, into))

        def resident() -> float:
            due = next(turn)
            _bring(due)
            _first_block(due, into)
            return timed(lambda: _first_block(due, into))

        timings = bench.alternate("prefetch", warm_up=PROMPTS_IN_TURN, prefetched=prefetched, hit=resident)
    yield timings.row(rows.PREFETCH, "prefetched", "hit", note="match, and one block copied")


def _bring(due: Prompt) -> None:
    """Prefetch a prompt that is on SSD alone, and wait as long as an engine's queue would.

    Errors: TierUnavailable when it was in host memory; DeadlineExceeded.
    """
    answer = due.namespace.prefetch(due.keys, deadline_seconds=DEADLINE_SECONDS)
    if not answer.loading:
        raise TierUnavailable(f"prefetch: {answer.resident} of {due.blocks} blocks were in host memory")
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not due.namespace.match(due.keys, mode=MatchMode.PROBE, deadline_seconds=DEADLINE_SECONDS).ready:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"prefetch: not all is resident after {DEADLINE_SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def _first_block(due: Prompt, into: Array) -> None:
    namespace = due.namespace
    match = namespace.match(due.keys, deadline_seconds=DEADLINE_SECONDS)
    fetched = namespace.fetch(match, into, blocks=1, deadline_seconds=DEADLINE_SECONDS)
    namespace.release(match, used=fetched.blocks)
    if match.blocks < due.blocks or not match.ready or not fetched.blocks:
        raise TierUnavailable(f"prefetch: {match.blocks} of {due.blocks} blocks found: {match.reason}")
