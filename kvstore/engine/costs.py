"""What a step costs on this machine: measured once, so that chunks are sized by time and not by tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.clock import Clock
from kvstore.engine.attention import Span, StepAttention, rows_of
from kvstore.engine.model import Model
from kvstore.engine.pool import KvPool
from kvstore.engine.windows import WindowRows

ROUNDS = 2


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: a fixed part, a part per row, and a part per row and token that it attends to."""

    step: float
    row: float
    seen: float

    def seconds(self, spans: Iterable[tuple[int, int]]) -> float:
        """Return the estimate for (first, count) spans."""
        return self.step + sum(self.span(first, count) for first, count in spans)

    def span(self, first: int, count: int) -> float:
        """Return what `count` rows behind `first` tokens add to a step."""
        return count * (self.row + self.seen * (first + count / 2))

    def rows_within(self, seconds: float, *, first: int) -> int:
        """Return how many rows behind `first` tokens fit into a time."""
        if seconds <= 0:
            return 0
        # seen/2 n^2 + (row + seen first) n = seconds
        linear, half = self.row + self.seen * first, self.seen / 2
        if half <= 0:
            return int(seconds / linear)
        return int(((linear * linear + 4 * half * seconds) ** 0.5 - linear) / (2 * half))

    def __str__(self) -> str:
        fixed, row, seen = (
            f"{self.step * 1e3:.2f} ms",
            f"{self.row * 1e3:.3f} ms",
            f"{self.seen * 1e9:.1f} ns",
        )
        return f"{fixed} a step, {row} a row, {seen} a row and token that it sees"


def calibrate(model: Model, pool: KvPool, clock: Clock) -> StepCosts:
    """Time three shapes of a step on the pool's own pages, before anything is in them."""
    limit = pool.page_count * pool.block_tokens
    many = min(256, limit // 2)
    past = max(0, min(2048, limit - many))
    one = min(_timed(model, pool, clock, first=0, count=1) for _ in range(ROUNDS))
    near = min(_timed(model, pool, clock, first=0, count=many) for _ in range(ROUNDS))
    far = min(_timed(model, pool, clock, first=past, count=many) for _ in range(ROUNDS))
    row = max(1e-7, (near - one) / (many - 1))
    seen = max(0.0, (far - near) / (many * past)) if past else 0.0
    return StepCosts(step=max(0.0, one - row), row=row, seen=seen)


def _timed(model: Model, pool: KvPool, clock: Clock, *, first: int, count: int) -> float:
    pages = range(1, 1 + -(-(first + count) // pool.block_tokens))
    device, dtype = model.weights.device, model.weights.dtype
    span = Span(first, count, pages, WindowRows.blank(model.config, first, dtype=dtype, device=device))
    rows = rows_of([[0] * count], [span], device=device)
    begun = clock.monotonic()
    model.forward(rows, StepAttention(model.config, pool, [span], dtype)).cpu()
    return clock.monotonic() - begun
