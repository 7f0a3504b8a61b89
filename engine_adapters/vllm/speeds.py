"""What the tiers give, as the scheduler knows it: workers measure it where they load, and tell it with what
became of their loads.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from engine_adapters.vllm.messages import RankSpeed
from kvstore.client.recompute import REMEMBER_SECONDS
from kvstore.clock import Clock
from kvstore.types import Tier


class RankSpeeds:
    """The latest word of every rank. A load is over when all ranks have it, so the slowest one counts.

    What was never measured counts as free: the first load shows it. Threads: the scheduler's only.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._block_seconds: dict[Tier, dict[str, float]] = {}
        self._measured_at: dict[Tier, float] = {}

    def note(self, told: Iterable[RankSpeed]) -> None:
        """Take note of what ranks measured. They tell all they know: what is as before is not new."""
        for speed in told:
            ranks = self._block_seconds.setdefault(speed.tier, {})
            if ranks.get(speed.rank) != speed.block_seconds:
                ranks[speed.rank] = speed.block_seconds
                self._measured_at[speed.tier] = self._clock.monotonic()

    def block_seconds(self, tier: Tier) -> float:
        """Return how long a block from a tier takes until all ranks have it."""
        return max(self._block_seconds.get(tier, {}).values(), default=0.0)

    def may_try(self, tier: Tier) -> bool:
        """Say whether the last measurement and the last trial are old. Changes nothing."""
        now = self._clock.monotonic()
        return now - self._measured_at.get(tier, now) >= REMEMBER_SECONDS

    def tried(self, tier: Tier) -> None:
        """A trial begins: no other one for a while, whatever becomes of it."""
        self._measured_at[tier] = self._clock.monotonic()


def wait_seconds(ahead: Iterable[float], *, threads: int) -> float:
    """Return when one of so many threads is free, given what the loads ahead take, in their order."""
    free_at = [0.0] * threads
    for seconds in ahead:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    return free_at[0]
