"""`kvstore simulate`: what hit rate would this traffic have had, at that TTL and capacity?"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.output import (
    EXIT_FINE,
    EXIT_PROBLEM,
    Sheet,
    complain,
    count_text,
    duration_text,
    emit_json,
    progress,
)
from kvstore.errors import InvalidArgument
from kvstore.quantities import parse_seconds
from kvstore.trace.requests import TraceFile, TraceRequest
from kvstore.trace.simulator import Simulator, Tally
from kvstore.types import TtlMode


class Policy(StrEnum):
    """The orders in which blocks can leave."""

    LRU = "lru"


FAULTS_SHOWN = 5
TraceArgument = Annotated[
    Path,
    typer.Argument(
        help="Mooncake JSONL or kvstore-runs/1, plain or gzip.", metavar="TRACE", show_default=False
    ),
]
TtlOption = Annotated[
    str, typer.Option("--ttl", help="How long a block stays after its last touch: 180s, 30m, 3d, inf.")
]
CapacityOption = Annotated[
    int,
    typer.Option(
        "--capacity-blocks", min=0, help="Blocks that fit, the least recent leaving first; 0: no limit."
    ),
]
BlockOption = Annotated[
    int, typer.Option("--block-size", min=0, help="Tokens of a block; 0: what the file says, else 512.")
]
ModeOption = Annotated[
    TtlMode, typer.Option("--ttl-mode", help="sliding: from the last touch; fixed: from the write.")
]
PolicyOption = Annotated[
    Policy,
    typer.Option("--policy", help="What leaves first when the room is used up: lru, exact to the block."),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="A bad line ends the run with exit code 1.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def simulate(
    trace: TraceArgument,
    ttl: TtlOption = "inf",
    ttl_mode: ModeOption = TtlMode.SLIDING,
    capacity_blocks: CapacityOption = 0,
    policy: PolicyOption = Policy.LRU,
    block_size: BlockOption = 0,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a trace of requests through the daemon's own index, order and retention on a virtual clock.

    A request looks up its blocks, then writes those it missed; every block it
    names is touched. Hit tokens are counted before the request's own write.

    Examples:

      kvstore simulate trace.jsonl.gz --ttl 180s

      kvstore simulate trace.jsonl.gz --capacity-blocks 65536 --json
    """
    seconds = ttl_of(ttl)
    file, requests = read_trace(trace, block_size=block_size, strict=strict)
    simulator = Simulator(
        block_tokens=file.block_tokens,
        ttl_seconds=seconds,
        ttl_mode=ttl_mode,
        capacity_blocks=capacity_blocks,
    )
    with progress("simulate", total=len(requests)) as bar:
        tally = simulator.run(requests, on_progress=bar.to)
    document = _document(tally, file, seconds, ttl_mode, capacity_blocks, policy)
    if as_json:
        emit_json(document)
    else:
        _sheet(tally, document).show()
    raise typer.Exit(EXIT_FINE)


def read_trace(trace: Path, *, block_size: int, strict: bool) -> tuple[TraceFile, list[TraceRequest]]:
    """Return a trace and its requests in order; bad lines are told, and with `strict` end the command.

    Errors: InvalidArgument on a file that is no trace or holds no request.
    """
    faults: list[tuple[int, str]] = []
    file = TraceFile(
        trace, block_tokens=block_size, complain=lambda number, fault: faults.append((number, fault))
    )
    requests = file.sorted()
    _report_faults(trace, faults)
    if faults and strict:
        raise typer.Exit(EXIT_PROBLEM)
    if not requests:
        raise InvalidArgument(f"trace {trace}: no request in it")
    return file, requests


def ttl_of(ttl: str) -> float:
    """Return a TTL in seconds; `inf` never expires.

    Errors: InvalidArgument.
    """
    if ttl == "inf":
        return math.inf
    try:
        seconds = parse_seconds(ttl)
    except ValueError as error:
        raise InvalidArgument(f"--ttl {ttl}: {error}") from error
    if not seconds > 0:
        raise InvalidArgument(f"--ttl {ttl}: must be positive")
    return seconds


def _report_faults(trace: Path, faults: list[tuple[int, str]]) -> None:
    """Tell of bad lines by number, a few of them."""
    for number, fault in faults[:FAULTS_SHOWN]:
        complain(f"{trace}:{number}: skipped: {fault}")
    if len(faults) > FAULTS_SHOWN:
        complain(f"{trace}: {len(faults)} bad lines skipped in all")


def _document(
    tally: Tally, file: TraceFile, ttl_seconds: float, ttl_mode: TtlMode, capacity_blocks: int, policy: Policy
) -> dict[str, Any]:
    return {
        "trace": str(file.path),
        "block_size": file.block_tokens,
        "ttl_seconds": ttl_seconds,
        "ttl_mode": str(ttl_mode),
        "capacity_blocks": capacity_blocks,
        "policy": str(policy),
        "lines_skipped": file.lines_skipped,
        "requests": tally.requests,
        "input_tokens": tally.input_tokens,
        "hit_tokens": tally.hit_tokens,
        **tally.rates(),
        "resident_blocks_mean": tally.resident_blocks_mean,
        "resident_blocks_peak": tally.resident_blocks_peak,
        "duration_seconds": tally.duration_seconds,
    }


def _sheet(tally: Tally, document: dict[str, Any]) -> Sheet:
    sheet = Sheet()
    ttl, capacity, lasted = document["ttl_seconds"], document["capacity_blocks"], tally.duration_seconds
    since = "write" if document["ttl_mode"] == TtlMode.FIXED else "last touch"
    kept = "for ever" if math.isinf(ttl) else f"{duration_text(ttl)} after its {since}"
    room = f"room for {count_text(capacity)} blocks" if capacity else "room for all"
    sheet.line(
        f"{count_text(tally.requests)} requests over {duration_text(lasted)}; a block stays {kept}; {room}"
    )
    rows = [
        ("hit rate, tokens", f"{tally.rates()['token_hit_rate']:.3%}"),
        ("hit rate, tokens of the second half", f"{tally.rates()['token_hit_rate_half']:.3%}"),
        ("hit rate, blocks", f"{tally.rates()['block_hit_rate']:.3%}"),
        ("requests with a hit", f"{tally.rates()['request_hit_rate']:.3%}"),
        ("input tokens", count_text(tally.input_tokens)),
        ("of these hit", count_text(tally.hit_tokens)),
        ("resident blocks, mean", count_text(round(tally.resident_blocks_mean))),
        ("resident blocks, peak", count_text(tally.resident_blocks_peak)),
    ]
    sheet.table("Simulation", ["what", "value>"], rows)
    if lasted < ttl < math.inf:
        sheet.line(f"the trace is {duration_text(lasted)} long: it cannot show reuse beyond that")
    return sheet
