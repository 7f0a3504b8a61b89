"""What expires when, as a table with bars and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvstore.cli.output import Sheet, bytes_text, count_text, plain
from kvstore.cli.picture import picture

ROWS_MAX = 24
BAR_CELLS = 30
Sums = dict[str, float]

HoursOption = Annotated[int, typer.Option("--hours", metavar="N", min=1, max=2208, help="How far to look.")]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw it: a .png, .svg or .pdf file.", show_default=False),
]


def forecast_sheet(document: Mapping[str, Any]) -> Sheet:
    """Return the forecast page: a row per stretch of hours, a bar for its bytes."""
    names = _names(document)
    step = -(-int(document["hours"]) // ROWS_MAX)
    rows = []
    stretches = _stretches(document, step)
    most = max((sums["bytes"] for sums in stretches.values()), default=0.0)
    for first, sums in stretches.items():
        bar = "█" * max(1, round(BAR_CELLS * sums["bytes"] / most)) if sums["bytes"] else ""
        label = f"{first} h" if step == 1 else f"{first}-{first + step} h"
        by_class = [bytes_text(sums[name]) if sums[name] else "-" for name in names]
        rows.append((label, count_text(sums["blocks"]), bytes_text(sums["bytes"]), *by_class, bar))
    page = Sheet()
    columns = ("in", "blocks>", "bytes>", *(f"{plain(name)}>" for name in names), "")
    page.table("Expires, if nothing is touched again", columns, rows)
    for key, words in (("expired", "expired already, hidden, not yet removed"), ("later", "later, or never")):
        sums = _sum([item[key] for item in document["classes"].values()])
        page.line(Text(f"{words}: {count_text(sums['blocks'])} blocks, {bytes_text(sums['bytes'])}", "dim"))
    return page


def _names(document: Mapping[str, Any]) -> list[str]:
    """Return the classes of which something expires in time."""
    return [name for name, item in document["classes"].items() if item["hours"]]


def _sum(amounts: Iterable[Mapping[str, float]]) -> Sums:
    sums: Sums = {"blocks": 0.0, "bytes": 0.0}
    for amount in amounts:
        for key in sums:
            sums[key] += amount[key]
    return sums


def _stretches(document: Mapping[str, Any], step: int) -> dict[int, Sums]:
    """Return blocks and bytes, in all and by class, of each stretch of `step` hours, by its first hour."""
    sums: dict[int, Sums] = {first: defaultdict(float) for first in range(0, int(document["hours"]), step)}
    for name, item in document["classes"].items():
        for hour, amount in item["hours"].items():
            row = sums[int(hour) // step * step]
            row["blocks"] += amount["blocks"]
            row["bytes"] += amount["bytes"]
            row[name] += amount["bytes"]
    return sums


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture: bytes that expire in each hour, stacked by class.

    Errors: InvalidArgument on a suffix that is none of .png, .svg, .pdf, or without matplotlib.
    """
    with picture(path, title="What expires when, if nothing is touched again") as axes:
        stretches = _stretches(document, 1)
        below = [0.0] * len(stretches)
        most = max(sums["bytes"] for sums in stretches.values())
        unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
        for name in _names(document):
            sizes = [sums[name] / size for sums in stretches.values()]
            axes.bar(list(stretches), sizes, width=1.0, align="edge", bottom=below, label=name)
            below = [a + b for a, b in zip(below, sizes, strict=True)]
        axes.set_xlabel("hours from now")
        axes.set_ylabel(f"expires, {unit} an hour")
        axes.margins(x=0)
        axes.grid(axis="y", alpha=0.25)
        if _names(document):
            axes.legend()
