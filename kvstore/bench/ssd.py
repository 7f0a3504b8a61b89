"""ssd: reading records from disk into the arena, and a hit that comes from disk, through the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.bench import fio, prompt, rows
from kvstore.bench.harness import Bench, timed
from kvstore.bench.local_tier import LocalTier
from kvstore.bench.prompt import BLOCK_BYTES, BLOCKS, PROMPTS_IN_TURN, TURN_ARENA_BYTES, Array, Prompt
from kvstore.bench.rows import Row
from kvstore.client import Client
from kvstore.errors import TierUnavailable
from kvstore.types import Tier

WINDOW_SECONDS, WINDOW_SECONDS_QUICK = 1.0, 0.5
BAR_HUGE_PAGES = 0.9


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group."""
    payload = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=4)
    with _local_tier(bench, payload) as local:
        yield _read(bench, local)
        yield _hit(bench, local, payload)


@contextmanager
def _local_tier(bench: Bench, payload: Array) -> Iterator[LocalTier]:
    bench.tell("writing a segment")
    with (
        bench.scratch() as directory,
        LocalTier(
            prompt.block_major("ssd"), directory, shared_memory=bench.shared_memory, blocks=BLOCKS
        ) as local,
    ):
        local.store(payload)
        yield local


def _read(bench: Bench, local: LocalTier) -> Row:
    if not fio.is_installed():
        reason = "not measured: fio is not installed (apt-get install fio)"
        return Row(rows.SSD_READ, None, reason, lacks="fio")
    window = WINDOW_SECONDS_QUICK if bench.is_quick else WINDOW_SECONDS
    files = local.segment_files
    size = BLOCKS * BLOCK_BYTES
    timings = bench.alternate(
        "ssd_read",
        warm_up=1,
        read=lambda: local.seconds_of_one(window_seconds=window),
        fio=lambda: size / fio.read_bytes_per_second(files, window_seconds=window),
    )
    is_huge = local.has_huge_pages
    note = (
        f"fio {size / timings.median('fio') / 1e9:.2f} GB/s; arena in {'huge' if is_huge else '4 KiB'} pages"
    )
    return timings.row(rows.SSD_READ, "read", "fio", note=note, bar=BAR_HUGE_PAGES if is_huge else None)


def _hit(bench: Bench, local: LocalTier, payload: Array) -> Row:
    into = prompt.warm_buffer(BLOCKS, BLOCK_BYTES)
    with bench.daemon(arena_bytes=TURN_ARENA_BYTES) as child, Client(child.address) as client:
        turn = Prompt.in_turn(client.open(prompt.block_major("ssd")), payload, tell=bench.tell)

        def hit() -> float:
            due = next(turn)
            return timed(lambda: _fetch_from_ssd(due, into))

        timings = bench.alternate(
            "ssd_hit", warm_up=PROMPTS_IN_TURN, hit=hit, read=lambda: timed(local.read_all)
        )
    return timings.row(rows.SSD_HIT, "hit", "read", note="every block from SSD, digests checked twice")


def _fetch_from_ssd(stored: Prompt, into: Array) -> None:
    fetched = stored.fetch(into, verify=True)
    from_ssd = sum(run.count for run in fetched.tiers if run.tier is Tier.SSD)
    if from_ssd < stored.blocks:
        raise TierUnavailable(f"only {from_ssd} of {stored.blocks} blocks came from SSD")
