"""What a longer TTL or more room would buy: a sweep of simulations, and the knee in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from kvstore.core.eviction import POLICIES
from kvstore.errors import InvalidArgument
from kvstore.retention import RetentionClass
from kvstore.trace.classing import ClassRules
from kvstore.trace.optimum import Future
from kvstore.trace.requests import TraceFile, TraceRequest
from kvstore.trace.simulator import Simulator
from kvstore.types import TtlMode

Result = TypeVar("Result")

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
    input_tokens: int
    hit_tokens: int


def ttls_within(duration_seconds: float) -> tuple[float, ...]:
    """Return the usual TTLs that a trace of this length can tell apart, and "never" at the end."""
    return (*(ttl for ttl in TTL_SECONDS if ttl <= duration_seconds), math.inf)


def beyond(ttls: Sequence[float], duration_seconds: float) -> list[float]:
    """Return the TTLs that a trace of this length can say nothing of: it shows no reuse beyond itself."""
    return [ttl for ttl in ttls if duration_seconds < ttl < math.inf]


_loaded: dict[str, tuple[int, list[TraceRequest]]] = {}
"""The trace of this worker process, read once."""


def _load(path: str, block_tokens: int, rules: ClassRules | None = None) -> tuple[int, list[TraceRequest]]:
    if path not in _loaded:
        file = TraceFile(Path(path), block_tokens=block_tokens, rules=rules)
        _loaded[path] = (file.block_tokens, file.sorted())
    return _loaded[path]


def _simulate(
    path: str, block_tokens: int, ttl_seconds: float, capacity_blocks: int, ttl_mode: TtlMode
) -> Point:
    size, requests = _load(path, block_tokens)
    simulator = Simulator(
        block_tokens=size, ttl_seconds=ttl_seconds, ttl_mode=ttl_mode, capacity_blocks=capacity_blocks
    )
    tally = simulator.run(requests)
    rates = tally.rates()
    return Point(
        ttl_seconds,
        capacity_blocks,
        rates["token_hit_rate"],
        rates["token_hit_rate_half"],
        tally.resident_blocks_mean,
        tally.resident_blocks_peak,
        tally.input_tokens,
        tally.hit_tokens,
    )


def sweep(
    path: Path,
    *,
    block_tokens: int,
    ttls: Sequence[float],
    capacities: Sequence[int],
    ttl_mode: TtlMode = TtlMode.SLIDING,
    jobs: int,
    on_done: Callable[[int], None],
) -> list[Point]:
    """Simulate every TTL at every capacity, `jobs` at a time; returns them by capacity, then TTL.

    Every point is simulated, none is inferred from its neighbours: a fixed TTL is not monotone.
    """
    wanted = [(str(path), block_tokens, ttl, room, ttl_mode) for room in capacities for ttl in ttls]
    return _all_of(_simulate, wanted, jobs=jobs, on_done=on_done)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hit rates of the orders of eviction at a capacity, and of a cache that knows the future."""

    capacity_blocks: int
    token_hit_rates: dict[str, float]
    optimum: float

    @property
    def gap(self) -> float:
        """How far least recently used is from the bound."""
        return self.optimum - self.token_hit_rates["lru"]

    def closed(self, policy: str) -> float:
        """The share of that gap that a policy closes."""
        gained = self.token_hit_rates[policy] - self.token_hit_rates["lru"]
        return gained / self.gap if self.gap > 0 else 0.0


def compare(
    path: Path,
    *,
    block_tokens: int,
    capacities: Sequence[int],
    rules: ClassRules,
    classes: Sequence[RetentionClass],
    jobs: int,
    on_done: Callable[[int], None],
) -> list[Comparison]:
    """Run every order of eviction at every capacity, beside the bound of `optimum`: there nothing expires."""
    names = [*POLICIES, ""]
    wanted = [(str(path), block_tokens, room, name, rules, classes) for room in capacities for name in names]
    rates = _all_of(_rate, wanted, jobs=jobs, on_done=on_done)
    rows = [rates[i : i + len(names)] for i in range(0, len(rates), len(names))]
    return [
        Comparison(room, dict(zip(POLICIES, row, strict=False)), row[-1])
        for room, row in zip(capacities, rows, strict=True)
    ]


def _rate(
    path: str,
    block_tokens: int,
    capacity_blocks: int,
    policy: str,
    rules: ClassRules,
    classes: Sequence[RetentionClass],
) -> float:
    """Return the token hit rate of a policy, or with "" the bound."""
    size, requests = _load(path, block_tokens, rules)
    if policy:
        simulator = Simulator(
            block_tokens=size,
            capacity_blocks=capacity_blocks,
            classes=classes,
            policy=POLICIES[policy](),
        )
        return simulator.run(requests).rates()["token_hit_rate"]
    hits = Future(requests).hit_tokens(block_tokens=size, capacity_blocks=capacity_blocks)
    return hits / max(1, sum(request.input_tokens for request in requests))


def _all_of(
    work: Callable[..., Result],
    wanted: Sequence[tuple[Any, ...]],
    *,
    jobs: int,
    on_done: Callable[[int], None],
) -> list[Result]:
    """Do independent pieces of work, `jobs` processes at a time; each of them reads the trace once."""
    found: dict[int, Result] = {}
    if jobs == 1:
        for index, arguments in enumerate(wanted):
            found[index] = work(*arguments)
            on_done(len(found))
        _loaded.clear()
    else:
        # A fresh interpreter each: a fork would inherit whatever threads the caller runs.
        with ProcessPoolExecutor(min(jobs, len(wanted)), mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(work, *arguments): i for i, arguments in enumerate(wanted)}
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                on_done(len(found))
    return [found[index] for index in range(len(wanted))]


def knee_of(points: Sequence[Point]) -> int | None:
    """Return the index of the last TTL that was worth its bytes, None when the whole scale was.

    The gain over the best of the shorter ones is weighed per doubling of the mean of resident blocks: a fixed
    TTL is not monotone, and to climb out of a dip is no gain.
    """
    if len(points) < 2:
        return None
    best = last = 0
    for index, point in enumerate(points[1:], 1):
        if _points_per_doubling(points[best], point) >= POINTS_PER_DOUBLING:
            last = index
        if point.token_hit_rate > points[best].token_hit_rate:
            best = index
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
