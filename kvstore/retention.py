"""Retention classes: how long each kind of traffic deserves to stay."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.types import Tier, TtlMode

HOUR = 3600.0
DAY = 24 * HOUR


@dataclass(frozen=True, slots=True)
class RetentionClass:
    """A traffic class and the life it gives to the blocks it touches.

    Units: ttl_seconds is wall time, math.inf means "until evicted"; quota_bytes 0 means no quota.
    """

    name: str
    ttl_seconds: float
    mode: TtlMode = TtlMode.SLIDING
    lowest_tier: Tier = Tier.SSD
    quota_bytes: int = 0

    def end(self, *, touched_at: float, written_at: float) -> float:
        """Return the wall time at which a run held by this class expires."""
        return (touched_at if self.mode is TtlMode.SLIDING else written_at) + self.ttl_seconds

    @property
    def reaches_ssd(self) -> bool:
        """Say whether blocks of this class may leave host memory."""
        return self.lowest_tier in (Tier.SSD, Tier.SHARED)


SHIPPED_CLASSES: tuple[RetentionClass, ...] = (
    RetentionClass("agent", 3 * DAY),
    RetentionClass("chat", 7 * DAY),
    RetentionClass("batch", 1 * HOUR),
    RetentionClass("system", 30 * DAY),
    RetentionClass("handoff", 60.0, TtlMode.FIXED, Tier.HOST),
    RetentionClass("swa", 180.0, TtlMode.SLIDING, Tier.HOST),
)
DEFAULT_CLASS = "agent"
