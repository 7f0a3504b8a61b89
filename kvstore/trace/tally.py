"""What a simulation counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.api import TierRun
from kvstore.trace.blocks import TraceRequest
from kvstore.types import Tier


@dataclass(slots=True)
class ClassTally:
    """The part of one retention class."""

    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request: leading blocks that hit, the tiers they came from, blocks stored behind."""

    hit_blocks: int = 0
    tiers: Sequence[TierRun] = ()
    stored_blocks: int = 0


@dataclass(slots=True)
class Tally:
    """What a simulation counts. Units: tokens and blocks as named; resident blocks over virtual time.

    Stored blocks include those that a warm-up stored.
    """

    block_tokens: int = 1
    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    requests_with_hit: int = 0
    half_input_tokens: int = 0
    half_hit_tokens: int = 0
    stored_blocks: int = 0
    resident_blocks_mean: float = 0.0
    resident_blocks_peak: int = 0
    ssd_bytes_mean: float = 0.0
    ssd_bytes_peak: int = 0
    ssd_written_bytes: int = 0
    duration_seconds: float = 0.0
    hit_tokens_by_tier: dict[Tier, int] = field(default_factory=dict)
    by_class: dict[str, ClassTally] = field(default_factory=dict)

    def count(self, request: TraceRequest, served: Served, *, retention_class: str, in_half: bool) -> None:
        """Add one request."""
        hit = request.hit_tokens(served.hit_blocks, block_tokens=self.block_tokens)
        self.requests += 1
        self.input_tokens += request.input_tokens
        self.hit_tokens += hit
        self.blocks += request.blocks
        self.hit_blocks += served.hit_blocks
        self.requests_with_hit += served.hit_blocks > 0
        if in_half:
            self.half_input_tokens += request.input_tokens
            self.half_hit_tokens += hit
        mine = self.by_class.setdefault(retention_class, ClassTally())
        mine.requests += 1
        mine.input_tokens += request.input_tokens
        mine.hit_tokens += hit
        self._count_tiers(request, served)

    def _count_tiers(self, request: TraceRequest, served: Served) -> None:
        start, before = 0, 0
        for run in served.tiers:
            start = min(start + run.count, served.hit_blocks)
            until = request.hit_tokens(start, block_tokens=self.block_tokens)
            self.hit_tokens_by_tier[run.tier] = self.hit_tokens_by_tier.get(run.tier, 0) + until - before
            before = until

    def rates(self) -> dict[str, float]:
        """Return the hit rates; of what is in each name."""
        return {
            "token_hit_rate": self.hit_tokens / max(1, self.input_tokens),
            "token_hit_rate_half": self.half_hit_tokens / max(1, self.half_input_tokens),
            "block_hit_rate": self.hit_blocks / max(1, self.blocks),
            "request_hit_rate": self.requests_with_hit / max(1, self.requests),
        }
