"""`kvstore plan`: what would a longer TTL buy, and where does it stop to be worth its bytes?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.output import (
    EXIT_FINE,
    duration_text,
    emit_json,
    progress,
)
from kvstore.cli.plan_policies import show_policies
from kvstore.cli.plan_report import Outcome
from kvstore.cli.traces import (
    BlockOption,
    JsonOption,
    RuleOption,
    StrictOption,
    TraceArgument,
    read_trace,
    rules_of,
    ttl_of,
)
from kvstore.errors import InvalidArgument
from kvstore.trace.planner import beyond, check_scale, sweep, ttls_within
from kvstore.trace.prices import Prices, read_prices
from kvstore.trace.requests import TraceFile, TraceRequest
from kvstore.types import TtlMode

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
PricesOption = Annotated[
    Path | None,
    typer.Option(
        "--prices", metavar="FILE", help="TOML with prices: adds what each TTL costs, earns and pays back."
    ),
]
PlanModeOption = Annotated[
    TtlMode, typer.Option("--ttl-mode", help="sliding: from the last touch; fixed: from the write.")
]
PoliciesOption = Annotated[
    bool,
    typer.Option(
        "--policies", help="Compare the orders of eviction at these capacities, and the best possible."
    ),
]
JobsOption = Annotated[int, typer.Option("--jobs", min=1, help="Simulations at a time.")]


def plan(
    trace: TraceArgument,
    ttl: TtlsOption = "",
    capacity_blocks: CapacitiesOption = "0",
    block_size: BlockOption = 0,
    bytes_per_token: TokenBytesOption = 0,
    ttl_mode: PlanModeOption = TtlMode.SLIDING,
    prices: PricesOption = None,
    policies: PoliciesOption = False,
    class_rule: RuleOption = None,
    plot: PlotOption = None,
    jobs: JobsOption = max(1, min(2, os.cpu_count() or 1)),
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a trace at several TTLs and capacities, and name the knee.

    The knee is the last TTL that still buys half a point of hit rate for every
    doubling of the blocks that stay. A trace cannot show reuse beyond its own
    length: TTLs longer than it are refused, "never" stands for all of them.

    Examples:

      kvstore plan trace.jsonl.gz --bytes-per-token 131072 --plot plan.png

      kvstore plan trace.jsonl.gz --ttl 10m,1h,inf --capacity-blocks 0,65536 --json

      kvstore plan trace.jsonl.gz --policies --capacity-blocks 4096,16384,65536
    """
    file, requests = read_trace(trace, block_size=block_size, strict=strict)
    capacities = [_capacity(text) for text in capacity_blocks.split(",")]
    if policies:
        show_policies(file, capacities, rules_of(class_rule), jobs=jobs, as_json=as_json)
        raise typer.Exit(EXIT_FINE)
    if class_rule:
        raise InvalidArgument(
            "--class-rule tells the orders of --policies what to learn apart; add --policies"
        )
    outcome = _outcome(
        file,
        requests,
        ttls=[ttl_of(text) for text in ttl.split(",")] if ttl else [],
        capacities=capacities,
        ttl_mode=ttl_mode,
        bytes_per_token=bytes_per_token,
        prices=prices,
        jobs=jobs,
    )
    if plot is not None:
        _draw(plot, outcome)
    if as_json:
        emit_json(outcome.document())
    else:
        outcome.sheet().show()
    raise typer.Exit(EXIT_FINE)


def _outcome(
    file: TraceFile,
    requests: Sequence[TraceRequest],
    *,
    ttls: list[float],
    capacities: list[int],
    ttl_mode: TtlMode,
    bytes_per_token: int,
    prices: Path | None,
    jobs: int,
) -> Outcome:
    duration = (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000
    asked = ttls or list(ttls_within(duration))
    refused = beyond(asked, duration)
    shown = [value for value in asked if value not in refused]
    if refused and not shown:
        raise InvalidArgument(_refusal(refused, duration))
    check_scale(shown, capacities)
    block_bytes = bytes_per_token * file.block_tokens
    money = _prices(prices, block_bytes)
    with progress("plan", total=len(shown) * len(capacities)) as bar:
        points = sweep(
            file.path,
            block_tokens=file.block_tokens,
            ttls=shown,
            capacities=capacities,
            ttl_mode=ttl_mode,
            jobs=jobs,
            on_done=bar.to,
        )
    return Outcome(
        trace=file.path,
        block_tokens=file.block_tokens,
        requests=len(requests),
        lines_skipped=file.lines_skipped,
        duration_seconds=duration,
        ttl_mode=ttl_mode,
        series=[points[i : i + len(shown)] for i in range(0, len(points), len(shown))],
        block_bytes=block_bytes,
        prices=money,
        refused=_refusal(refused, duration) if refused else "",
    )


def _draw(plot: Path, outcome: Outcome) -> None:
    from kvstore.cli.plan_picture import draw

    draw(
        plot,
        outcome.series[0],
        outcome.knee,
        title=f"{outcome.trace.name}: hit rate and what stays, by TTL",
        since="write" if outcome.ttl_mode is TtlMode.FIXED else "last touch",
        block_bytes=outcome.block_bytes,
    )


def _prices(path: Path | None, block_bytes: int) -> Prices | None:
    if path is not None and not block_bytes:
        raise InvalidArgument("--prices: storage is priced by bytes; --bytes-per-token is needed")
    return read_prices(path) if path is not None else None


def _refusal(ttls: Sequence[float], duration: float) -> str:
    names = ", ".join(duration_text(ttl) for ttl in ttls)
    return (
        f"--ttl {names}: refused, this trace is {duration_text(duration)} long and cannot show reuse beyond "
        "that; inf shows all that it has"
    )


def _capacity(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidArgument(f"--capacity-blocks {text}: must be a number of blocks") from error
