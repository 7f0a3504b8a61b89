"""The picture of a plan: hit rate and resident size against TTL, the knee marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from kvstore.cli.output import duration_text
from kvstore.cli.picture import picture
from kvstore.trace.planner import Point

HIT_COLOUR, SIZE_COLOUR, KNEE_COLOUR = "#1f5fa8", "#c2571a", "#444444"


def draw(
    path: Path, points: Sequence[Point], knee: int | None, *, title: str, since: str, block_bytes: int
) -> None:
    """Write the picture.

    Errors: InvalidArgument on a suffix that is none of .png, .svg, .pdf, or without matplotlib.
    """
    with picture(path, title=title) as hits:
        places = range(len(points))
        rates = [100 * point.token_hit_rate for point in points]
        unit = block_bytes / 2**30 if block_bytes else 1.0
        sizes = [point.resident_blocks_mean * unit for point in points]
        hits.plot(places, rates, "o-", color=HIT_COLOUR, linewidth=2)
        for place, rate in zip(places, rates, strict=True):
            hits.annotate(
                f"{rate:.1f}",
                (place, rate),
                (0, 7),
                textcoords="offset points",
                ha="center",
                color=HIT_COLOUR,
            )
        hits.set_ylabel("hit rate, % of input tokens", color=HIT_COLOUR)
        hits.set_ylim(max(0.0, min(rates) - 12), min(100.0, max(rates) + 10))
        hits.set_xticks(list(places), [_tick(point.ttl_seconds) for point in points])
        hits.set_xlabel(f"TTL since the {since}")
        hits.grid(axis="y", alpha=0.25)
        size = hits.twinx()
        size.bar(places, sizes, width=0.5, color=SIZE_COLOUR, alpha=0.25)
        size.set_yscale("log")
        size.set_ylabel("resident, mean, " + ("GiB" if block_bytes else "blocks"), color=SIZE_COLOUR)
        hits.set_zorder(size.get_zorder() + 1)
        hits.patch.set_visible(False)
        if knee is not None:
            hits.axvline(knee, color=KNEE_COLOUR, linestyle="--", linewidth=1)
            hits.annotate(
                f"knee: {_tick(points[knee].ttl_seconds)}",
                (knee, hits.get_ylim()[0]),
                (6, 8),
                textcoords="offset points",
            )


def _tick(ttl_seconds: float) -> str:
    return "never\nexpires" if math.isinf(ttl_seconds) else duration_text(ttl_seconds)
