"""What a longer TTL or more room would buy: a sweep of simulations, and the knee in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

from kvstore.errors import InvalidArgument
from kvstore.trace.requests import TraceFile, TraceRequest
from kvstore.trace.simulator import Simulator

HOUR, DAY = 3600.0, 86400.0
TTL_SECONDS = (60.0, 180.0, 300.0, 600.0, 1800.0, HOUR, 4 * HOUR, 12 * HOUR, DAY, 3 * DAY, 7 * DAY)
POINTS_PER_DOUBLING = 0.5
"""Below this many points of hit rate for twice the resident blocks, longer is not worth its bytes."""


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation. Units: wall seconds (inf: never expires), blocks (0: no limit), rates as fractions."""

    ttl_seconds: float
    capacity_blocks: int
    token_hit_rate: float
    token_hit_rate_half: float
    resident_blocks_mean: float
    resident_blocks_peak: int


def ttls_within(duration_seconds: float) -> tuple[float, ...]:
    """Return the usual TTLs that a trace of this length can tell apart, and "never" at the end."""
    return (*(ttl for ttl in TTL_SECONDS if ttl <= duration_seconds), math.inf)


_loaded: dict[str, tuple[int, list[TraceRequest]]] = {}
"""The trace of this worker process, read once."""


def _simulate(path: str, block_tokens: int, ttl_seconds: float, capacity_blocks: int) -> Point:
    if path not in _loaded:
        file = TraceFile(Path(path), block_tokens=block_tokens)
        _loaded[path] = (file.block_tokens, file.sorted())
    size, requests = _loaded[path]
    tally = Simulator(block_tokens=size, ttl_seconds=ttl_seconds, capacity_blocks=capacity_blocks).run(
        requests
    )
    rates = tally.rates()
    return Point(
        ttl_seconds,
        capacity_blocks,
        rates["token_hit_rate"],
        rates["token_hit_rate_half"],
        tally.resident_blocks_mean,
        tally.resident_blocks_peak,
    )


def sweep(
    path: Path,
    *,
    block_tokens: int,
    ttls: Sequence[float],
    capacities: Sequence[int],
    jobs: int,
    on_done: Callable[[int], None],
) -> list[Point]:
    """Simulate every TTL at every capacity, `jobs` at a time; returns them by capacity, then TTL."""
    wanted = [(ttl, capacity) for capacity in capacities for ttl in ttls]
    if jobs == 1:
        return _one_by_one(str(path), block_tokens, wanted, on_done)
    found: dict[tuple[float, int], Point] = {}
    # A fresh interpreter each: a fork would inherit whatever threads the caller runs.
    with ProcessPoolExecutor(min(jobs, len(wanted)), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_simulate, str(path), block_tokens, ttl, room) for ttl, room in wanted]
        for done, future in enumerate(as_completed(futures), 1):
            point = future.result()
            found[(point.ttl_seconds, point.capacity_blocks)] = point
            on_done(done)
    return [found[key] for key in wanted]


def _one_by_one(
    path: str, block_tokens: int, wanted: Sequence[tuple[float, int]], on_done: Callable[[int], None]
) -> list[Point]:
    points = []
    for ttl, room in wanted:
        points.append(_simulate(path, block_tokens, ttl, room))
        on_done(len(points))
    _loaded.clear()
    return points


def knee_of(points: Sequence[Point]) -> int | None:
    """Return the index of the last TTL that was worth its bytes, None when the whole scale was.

    From one TTL to the next, the gain is weighed per doubling of the mean of resident blocks.
    """
    if len(points) < 2:
        return None
    worth = [_points_per_doubling(a, b) >= POINTS_PER_DOUBLING for a, b in pairwise(points)]
    last = max((index + 1 for index, is_worth in enumerate(worth) if is_worth), default=0)
    return None if last == len(points) - 1 else last


def _points_per_doubling(shorter: Point, longer: Point) -> float:
    gain = 100 * (longer.token_hit_rate - shorter.token_hit_rate)
    doublings = math.log2(max(1.0, longer.resident_blocks_mean) / max(1.0, shorter.resident_blocks_mean))
    if doublings <= 0:
        return math.inf if gain > 0 else 0.0
    return gain / doublings


def check_scale(ttls: Sequence[float], capacities: Sequence[int]) -> None:
    """Check what a caller wants swept.

    Errors: InvalidArgument.
    """
    if not ttls or not capacities:
        raise InvalidArgument("plan: at least one TTL and one capacity are needed")
    if any(not ttl > 0 for ttl in ttls):
        raise InvalidArgument(f"plan: every TTL must be positive, got {min(ttls)}")
    if any(capacity < 0 for capacity in capacities):
        raise InvalidArgument(f"plan: a capacity is >= 0 blocks, got {min(capacities)}")
