"""Load or recompute: how many blocks of a match are worth loading, by the measured speed of the tiers and the
engine's own pace. A store that is slower than the engine must not be waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.api import TierRun
from kvstore.clock import Clock
from kvstore.types import Tier

DECISIONS = "kvstore_client_load_decisions_total"
NEW_SHARE = 0.3
"""The weight of a new measurement."""
REMEMBER_SECONDS = 10.0
"""A tier that was too slow is tried again after so long, with few blocks."""
TRIAL_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """Load the first `blocks` blocks of a match, counted from its start, and compute the rest.

    `trial`: the last few of them only show whether this tier is fast again. Units: estimated seconds of
    loading what is loaded, and of computing the same.
    """

    blocks: int
    load_seconds: float = 0.0
    recompute_seconds: float = 0.0
    trial: Tier | None = None

    def decision(self, *, first: int, found: int) -> str:
        """Name what it makes of a match of `found` blocks, for a reader that has the first `first`."""
        if self.blocks >= found:
            return "load"
        if self.trial is not None:
            return "try"
        return "load_part" if self.blocks > first else "recompute"


def choose(
    tiers: Sequence[TierRun],
    *,
    first: int,
    block_load_seconds: Callable[[Tier], float],
    block_recompute_seconds: float,
    may_try: Callable[[Tier], bool] = lambda _: False,
    wait_seconds: float = 0.0,
) -> Choice:
    """Return how many leading blocks are worth loading by a reader that has the first `first`.

    Blocks come in order, so a slow stretch is loaded only for the sake of what lies behind it. A tier that
    was left out for its speed gives TRIAL_BLOCKS when `may_try` says so. `wait_seconds` pass before a load
    begins.
    """
    best, start = Choice(first), 0
    load, recompute, most = wait_seconds, 0.0, 0.0
    left_out: TierRun | None = None
    for run in tiers:
        count = start + run.count - max(start, first)
        start += run.count
        if count <= 0:
            continue
        cost = block_load_seconds(run.tier)
        load, recompute = load + count * cost, recompute + count * block_recompute_seconds
        saved = recompute - load
        if saved >= most:  # also when the pace of the engine is not known yet, and counts as endless
            best, most, left_out = Choice(start, load, recompute), saved, None
        elif left_out is None:
            left_out = TierRun(run.tier, count)
    if left_out is None or not may_try(left_out.tier):
        return best
    more = min(TRIAL_BLOCKS, left_out.count)
    return Choice(
        best.blocks + more,
        best.load_seconds + more * block_load_seconds(left_out.tier),
        best.recompute_seconds + more * block_recompute_seconds,
        trial=left_out.tier,
    )


def tiers_between(tiers: Sequence[TierRun], first: int, end: int) -> tuple[TierRun, ...]:
    """Return where blocks [first, end) were found, given the same of all from the first block on."""
    kept: list[TierRun] = []
    start = 0
    for run in tiers:
        count = min(start + run.count, end) - max(start, first)
        if count > 0:
            kept.append(TierRun(run.tier, count))
        start += run.count
    return tuple(kept)


class TierSpeeds:
    """Seconds per byte of each tier, as the fetches of this process came. What was never measured counts as
    free: the first fetch shows it, and its own deadline bounds what that costs.

    Threads: any.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._byte_seconds: dict[Tier, float] = {}
        self._measured_at: dict[Tier, float] = {}
        self._tried_at: dict[Tier, float] = {}

    def note(self, tiers: Sequence[TierRun], *, block_bytes: int, seconds: float, came: bool = True) -> None:
        """Learn from a fetch; of several tiers each takes its share of the time by what was known before.

        With `came` false nothing came in all that time: the tiers are at least so slow.
        """
        total = sum(run.count for run in tiers) * block_bytes
        if not total or seconds <= 0.0:
            return
        with self._lock:
            even = seconds / total
            known = {run.tier: self._byte_seconds.get(run.tier, even) for run in tiers}
            expected = sum(run.count * block_bytes * known[run.tier] for run in tiers)
            if not came and seconds < expected and self._byte_seconds.keys() >= known.keys():
                return  # as expected: given up too early to tell
            now = self._clock.monotonic()
            for tier, before in known.items():
                is_old = now - self._measured_at.get(tier, now) >= REMEMBER_SECONDS
                share = 1.0 if is_old else NEW_SHARE
                self._byte_seconds[tier] = (1 - share) * before + share * before * seconds / expected
                self._measured_at[tier] = now

    def block_seconds(self, tier: Tier, *, block_bytes: int) -> float:
        """Return how long a block from a tier takes."""
        with self._lock:
            return self._byte_seconds.get(tier, 0.0) * block_bytes

    def known(self) -> dict[Tier, float]:
        """Return what was measured so far."""
        with self._lock:
            return dict(self._byte_seconds)

    def may_try(self, tier: Tier) -> bool:
        """Say whether the last measurement and the last trial are old; a trial begins then."""
        now = self._clock.monotonic()
        with self._lock:
            last = max(self._measured_at.get(tier, now), self._tried_at.get(tier, 0.0))
            if now - last < REMEMBER_SECONDS:
                return False
            self._tried_at[tier] = now
            return True
