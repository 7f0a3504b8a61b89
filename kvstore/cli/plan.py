"""`kvstore plan`: what would a longer TTL buy, and where does it stop to be worth its bytes?"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.output import (
    EXIT_FINE,
    Sheet,
    bytes_text,
    count_text,
    duration_text,
    emit_json,
    progress,
)
from kvstore.cli.traces import BlockOption, JsonOption, StrictOption, TraceArgument, read_trace, ttl_of
from kvstore.errors import InvalidArgument
from kvstore.trace.planner import Point, check_scale, knee_of, sweep, ttls_within
from kvstore.trace.requests import TraceFile

TtlsOption = Annotated[
    str, typer.Option("--ttl", help="TTLs to try, comma separated; empty: the usual ones.")
]
CapacitiesOption = Annotated[
    str, typer.Option("--capacity-blocks", help="Capacities to try, comma separated; 0 is no limit.")
]
TokenBytesOption = Annotated[
    int,
    typer.Option(
        "--bytes-per-token", min=0, help="KV bytes of one token of your model; shows bytes beside blocks."
    ),
]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw it: a .png, .svg or .pdf file.")]
JobsOption = Annotated[int, typer.Option("--jobs", min=1, help="Simulations at a time.")]


def plan(
    trace: TraceArgument,
    ttl: TtlsOption = "",
    capacity_blocks: CapacitiesOption = "0",
    block_size: BlockOption = 0,
    bytes_per_token: TokenBytesOption = 0,
    plot: PlotOption = None,
    jobs: JobsOption = max(1, min(4, os.cpu_count() or 1)),
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a trace at several TTLs and capacities, and name the knee.

    The knee is the last TTL that still buys half a point of hit rate for every
    doubling of the blocks that stay. A trace cannot show reuse beyond its own
    length: TTLs longer than it are left out, "never" stands for all of them.

    Examples:

      kvstore plan trace.jsonl.gz --bytes-per-token 131072 --plot plan.png

      kvstore plan trace.jsonl.gz --ttl 10m,1h,inf --capacity-blocks 0,65536 --json
    """
    file, requests = read_trace(trace, block_size=block_size, strict=strict)
    duration = (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000
    ttls = [ttl_of(text) for text in ttl.split(",")] if ttl else list(ttls_within(duration))
    capacities = [_capacity(text) for text in capacity_blocks.split(",")]
    check_scale(ttls, capacities)
    with progress("plan", total=len(ttls) * len(capacities)) as bar:
        points = sweep(
            trace, block_tokens=file.block_tokens, ttls=ttls, capacities=capacities, jobs=jobs, on_done=bar.to
        )
    series = [points[i : i + len(ttls)] for i in range(0, len(points), len(ttls))]
    knee = knee_of(series[0])
    verdict = _verdict(series[0], knee, duration)
    block_bytes = bytes_per_token * file.block_tokens
    if plot is not None:
        from kvstore.cli.plan_picture import draw

        draw(
            plot,
            series[0],
            knee,
            title=f"{trace.name}: hit rate and what stays, by TTL",
            block_bytes=block_bytes,
        )
    if as_json:
        emit_json(_document(file, duration, points, knee, verdict, block_bytes))
    else:
        _sheet(len(requests), duration, series, knee, verdict, block_bytes).show()
    raise typer.Exit(EXIT_FINE)


def _capacity(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidArgument(f"--capacity-blocks {text}: must be a number of blocks") from error


def _name(ttl_seconds: float) -> str:
    return "never expires" if math.isinf(ttl_seconds) else duration_text(ttl_seconds)


def _verdict(points: Sequence[Point], knee: int | None, duration: float) -> str:
    """Return the answer in one sentence."""
    longest = points[-1]
    if knee is None:
        return (
            f"No knee: within the {duration_text(duration)} of this trace every longer TTL was worth its "
            "bytes; only a longer trace can tell more."
        )
    chosen = points[knee]
    worth = 100 * (longest.token_hit_rate - chosen.token_hit_rate)
    cost = longest.resident_blocks_mean / max(1.0, chosen.resident_blocks_mean)
    before = points[max(0, knee - 2) : knee + 1]
    shown = ", ".join(f"{_name(point.ttl_seconds)} {point.token_hit_rate:.1%}" for point in before)
    beyond = f"beyond {_name(chosen.ttl_seconds)} is worth {worth:.2f} points"
    return f"{shown}; {beyond} and costs {cost:.1f}x the bytes."


def _document(
    file: TraceFile,
    duration: float,
    points: Sequence[Point],
    knee: int | None,
    verdict: str,
    block_bytes: int,
) -> dict[str, Any]:
    rows = [
        {
            **asdict(point),
            "resident_bytes_mean": round(point.resident_blocks_mean * block_bytes) if block_bytes else None,
        }
        for point in points
    ]
    return {
        "trace": str(file.path),
        "block_size": file.block_tokens,
        "duration_seconds": duration,
        "lines_skipped": file.lines_skipped,
        "points": rows,
        "knee_ttl_seconds": None if knee is None else points[knee].ttl_seconds,
        "verdict": verdict,
    }


def _sheet(
    requests: int,
    duration: float,
    series: Sequence[Sequence[Point]],
    knee: int | None,
    verdict: str,
    block_bytes: int,
) -> Sheet:
    sheet = Sheet()
    sheet.line(
        f"{count_text(requests)} requests over {duration_text(duration)}; TTL counts from the last touch"
    )
    columns = ["TTL", "hit rate, tokens>", "second half>", "blocks, mean>", "peak>"]
    columns += ["bytes, mean>"] if block_bytes else []
    for points in series:
        capacity = points[0].capacity_blocks
        title = f"At most {count_text(capacity)} blocks" if capacity else "Room for all"
        rows = [
            _row(point, block_bytes, is_knee=points is series[0] and i == knee)
            for i, point in enumerate(points)
        ]
        sheet.table(title, [*columns, ""], rows)
    sheet.line(verdict)
    return sheet


def _row(point: Point, block_bytes: int, *, is_knee: bool) -> list[str]:
    cells = [
        _name(point.ttl_seconds),
        f"{point.token_hit_rate:.2%}",
        f"{point.token_hit_rate_half:.2%}",
        count_text(point.resident_blocks_mean),
        count_text(point.resident_blocks_peak),
    ]
    if block_bytes:
        cells.append(bytes_text(point.resident_blocks_mean * block_bytes))
    return [*cells, "<- knee" if is_knee else ""]
