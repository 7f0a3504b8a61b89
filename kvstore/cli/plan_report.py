"""What a sweep found, as a sheet for people and as a document for machines: points, knee, verdict, money."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvstore.cli.output import Sheet, bytes_text, count_text, duration_text
from kvstore.trace.planner import Point, knee_of
from kvstore.trace.prices import Bill, Prices
from kvstore.types import TtlMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A sweep: points by capacity, then TTL. Units: wall seconds, bytes of a block (0: unknown)."""

    trace: Path
    block_tokens: int
    requests: int
    lines_skipped: int
    duration_seconds: float
    ttl_mode: TtlMode
    series: list[list[Point]]
    block_bytes: int
    prices: Prices | None
    refused: str

    @property
    def knee(self) -> int | None:
        """The index of the last TTL at the first capacity that was worth its bytes."""
        return knee_of(self.series[0])

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        points, knee = self.series[0], self.knee
        if knee is None:
            return (
                f"No knee: within the {duration_text(self.duration_seconds)} of this trace every longer TTL "
                "was worth its bytes; only a longer trace can tell more."
            )
        chosen, longer = points[knee], points[knee + 1 :]
        best = max(longer, key=lambda point: point.token_hit_rate)
        worth = max(0.0, 100 * (best.token_hit_rate - chosen.token_hit_rate))
        cost = best.resident_blocks_mean / max(1.0, chosen.resident_blocks_mean)
        before = points[max(0, knee - 2) : knee + 1]
        shown = ", ".join(f"{ttl_name(point.ttl_seconds)} {point.token_hit_rate:.1%}" for point in before)
        beyond = f"beyond {ttl_name(chosen.ttl_seconds)} is worth {worth:.2f} points"
        return f"{shown}; {beyond} and costs {cost:.1f}x the bytes."

    @property
    def dips(self) -> list[str]:
        """Where a longer TTL hits less: with a fixed one a parent ends before its children."""
        found = []
        for points in self.series:
            for shorter, longer in pairwise(points):
                if longer.token_hit_rate < shorter.token_hit_rate:
                    found.append(
                        f"{ttl_name(longer.ttl_seconds)} hits less than {ttl_name(shorter.ttl_seconds)}: "
                        f"{longer.token_hit_rate:.3%} against {shorter.token_hit_rate:.3%}"
                    )
        return found

    def bill(self, point: Point) -> Bill | None:
        """Return the bill of a point; storage is bought for the most that stays at any time."""
        if self.prices is None:
            return None
        return self.prices.bill(
            input_tokens=point.input_tokens,
            hit_tokens=point.hit_tokens,
            seconds=self.duration_seconds,
            ssd_bytes=point.resident_blocks_peak * self.block_bytes,
        )

    def document(self) -> dict[str, Any]:
        """Return everything as one object."""
        points = [point for points in self.series for point in points]
        return {
            "trace": str(self.trace),
            "block_size": self.block_tokens,
            "duration_seconds": self.duration_seconds,
            "ttl_mode": str(self.ttl_mode),
            "lines_skipped": self.lines_skipped,
            "points": [self._row(point) for point in points],
            "knee_ttl_seconds": None if self.knee is None else self.series[0][self.knee].ttl_seconds,
            "verdict": self.verdict,
            "dips": self.dips,
            "refused": self.refused or None,
        }

    def _row(self, point: Point) -> dict[str, Any]:
        size = round(point.resident_blocks_mean * self.block_bytes) if self.block_bytes else None
        row = {**asdict(point), "resident_bytes_mean": size}
        bill = self.bill(point)
        if bill is not None:
            row["bill"] = {
                **asdict(bill),
                "cost": bill.cost,
                "margin": bill.margin,
                "revenue_per_gpu_hour": bill.revenue_per_gpu_hour,
                "cost_per_gpu_hour": bill.cost_per_gpu_hour,
                "payback_seconds": bill.payback_seconds,
            }
        return row

    def sheet(self) -> Sheet:
        """Return everything as tables and the verdict."""
        sheet = Sheet()
        since = "write" if self.ttl_mode is TtlMode.FIXED else "last touch"
        lasted = duration_text(self.duration_seconds)
        sheet.line(f"{count_text(self.requests)} requests over {lasted}; TTL counts from the {since}")
        if self.refused:
            sheet.line(self.refused)
        columns = ["TTL", "hit rate, tokens>", "second half>", "blocks, mean>", "peak>"]
        columns += ["bytes, mean>"] if self.block_bytes else []
        for points in self.series:
            knee = self.knee if points is self.series[0] else None
            rows = [self._cells(point, is_knee=i == knee) for i, point in enumerate(points)]
            sheet.table(_title(points), [*columns, ""], rows)
            self._money(sheet, points)
        for dip in self.dips:
            sheet.line(dip)
        sheet.line(self.verdict)
        return sheet

    def _cells(self, point: Point, *, is_knee: bool) -> list[str]:
        cells = [
            ttl_name(point.ttl_seconds),
            f"{point.token_hit_rate:.2%}",
            f"{point.token_hit_rate_half:.2%}",
            count_text(point.resident_blocks_mean),
            count_text(point.resident_blocks_peak),
        ]
        if self.block_bytes:
            cells.append(bytes_text(point.resident_blocks_mean * self.block_bytes))
        return [*cells, "<- knee" if is_knee else ""]

    def _money(self, sheet: Sheet, points: Sequence[Point]) -> None:
        columns = ["TTL", "accelerator-hours>", "saved>", "earned per hour>", "cost per hour>", "margin>"]
        rows = []
        for point in points:
            bill = self.bill(point)
            if bill is None:
                return
            rows.append(
                [
                    ttl_name(point.ttl_seconds),
                    f"{bill.gpu_hours:,.2f}",
                    f"{bill.gpu_hours_saved:,.2f}",
                    f"{bill.revenue_per_gpu_hour:,.2f}",
                    f"{bill.cost_per_gpu_hour:,.2f}",
                    f"{bill.margin:.1%}" if math.isfinite(bill.margin) else "-",
                    duration_text(bill.payback_seconds) if bill.storage_bought else "nothing bought",
                ]
            )
        title = f"{_title(points)}: money; storage for the peak, hours are of prefill"
        sheet.table(title, [*columns, "storage pays back in>"], rows)


def ttl_name(ttl_seconds: float) -> str:
    """Return a TTL in words."""
    return "never expires" if math.isinf(ttl_seconds) else duration_text(ttl_seconds)


def _title(points: Sequence[Point]) -> str:
    capacity = points[0].capacity_blocks
    return f"At most {count_text(capacity)} blocks" if capacity else "Room for all"
