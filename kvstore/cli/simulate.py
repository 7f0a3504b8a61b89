"""`kvstore simulate`: what hit rate would this traffic have had, at these TTLs and capacities?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    percent_text,
    plain,
    progress,
)
from kvstore.cli.traces import (
    BlockOption,
    CapacityOption,
    FormatOption,
    GapOption,
    JsonOption,
    ModeOption,
    Policy,
    PolicyOption,
    RuleOption,
    StrictOption,
    TokenBytesOption,
    TraceArgument,
    TtlOption,
    blocks_of,
    classes_of,
    read_trace,
    rules_of,
    seconds_of,
)
from kvstore.core.eviction import POLICIES
from kvstore.errors import InvalidArgument
from kvstore.quantities import parse_bytes
from kvstore.retention import RetentionClass
from kvstore.trace.prices import Bill, Prices, read_prices
from kvstore.trace.requests import TraceFile, TraceFormat, TraceRequest
from kvstore.trace.simulator import SEGMENT_BYTES, Simulator, Tally
from kvstore.types import Tier, TtlMode

HostOption = Annotated[
    str,
    typer.Option(
        "--host-capacity", help="Host memory, in blocks (65536) or bytes (64GiB).", show_default=False
    ),
]
SsdOption = Annotated[
    str,
    typer.Option(
        "--ssd-capacity", help="An SSD tier below it, whole segments leaving first.", show_default=False
    ),
]
SegmentOption = Annotated[str, typer.Option("--segment-bytes", help="Size of a segment on SSD.")]
WarmUpOption = Annotated[
    str,
    typer.Option("--warm-up", help="Leave the beginning out of the counts: a share (25%) or a time (30m)."),
]
PricesOption = Annotated[
    Path | None,
    typer.Option("--prices", metavar="FILE", help="TOML with prices: adds GPU-hours and money."),
]


@dataclass(frozen=True, slots=True)
class Room:
    """What fits. Units: blocks in host memory (0: no limit), bytes on SSD (0: no such tier)."""

    host_blocks: int
    ssd_bytes: int
    segment_bytes: int
    block_bytes: int


def simulate(
    trace: TraceArgument,
    ttl: TtlOption = None,
    ttl_mode: ModeOption = None,
    capacity_blocks: CapacityOption = 0,
    host_capacity: HostOption = "",
    ssd_capacity: SsdOption = "",
    segment_bytes: SegmentOption = "256MiB",
    policy: PolicyOption = Policy("lru"),
    class_rule: RuleOption = None,
    bytes_per_token: TokenBytesOption = 0,
    warm_up: WarmUpOption = "0%",
    prices: PricesOption = None,
    form: FormatOption = None,
    block_size: BlockOption = 0,
    session_gap: GapOption = "120s",
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a trace of requests through the daemon's own index, order and retention on a virtual clock.

    A request looks up its blocks, then writes those it missed; every block it
    names is touched. Hit tokens are counted before the request's own write.
    Formats: Mooncake, kvcache-simulator and Bailian JSONL, sessions of
    kv-cache-tester, kvstore-runs.

    Examples:

      kvstore simulate trace.jsonl.gz --ttl 180s

      kvstore simulate trace.jsonl.gz --capacity-blocks 65536 --json

      kvstore simulate trace.jsonl --ttl 7d --ttl batch=1h --class-rule 'batch: type=file' --warm-up 25%

      kvstore simulate trace.jsonl --host-capacity 64GiB --ssd-capacity 2TiB --bytes-per-token 70000
    """
    rules = rules_of(class_rule)
    lowest = Tier.SSD if ssd_capacity else Tier.HOST
    classes = classes_of(ttl, ttl_mode, rules, lowest=lowest)
    priced = read_prices(prices) if prices else None
    file, requests = read_trace(
        trace, block_size=block_size, strict=strict, form=form, rules=rules, session_gap=session_gap
    )
    _check_times(file, requests, classes)
    room = _room(
        capacity_blocks, host_capacity, ssd_capacity, segment_bytes, bytes_per_token * file.block_tokens
    )
    if priced is not None and not room.block_bytes:
        raise InvalidArgument("--prices: storage is priced by bytes; --bytes-per-token is needed")
    skipped = _warm_up(warm_up, requests)
    tally = _run(file, requests, classes, room, policy.value, skipped)
    bill = _bill(priced, tally, room) if priced is not None else None
    document = _document(tally, file, classes, room, policy.value, skipped, bill)
    if as_json:
        emit_json(document)
    else:
        _sheet(tally, classes, room, bill, document).show()
    raise typer.Exit(EXIT_FINE)


def _run(
    file: TraceFile,
    requests: Sequence[TraceRequest],
    classes: Sequence[RetentionClass],
    room: Room,
    policy: str,
    skipped: int,
) -> Tally:
    simulator = Simulator(
        block_tokens=file.block_tokens,
        capacity_blocks=room.host_blocks,
        classes=classes,
        policy=POLICIES[policy](),
        block_bytes=room.block_bytes or 1,
        ssd_bytes=room.ssd_bytes,
        segment_bytes=room.segment_bytes,
    )
    with progress("simulate", total=len(requests)) as bar:
        return simulator.run(requests, bar.to, warm_up=skipped)


def _check_times(
    file: TraceFile, requests: Sequence[TraceRequest], classes: Sequence[RetentionClass]
) -> None:
    has_times = requests[0].timestamp_ms != requests[-1].timestamp_ms or len(requests) == 1
    if file.form is TraceFormat.SIMULATOR and not has_times:
        finite = [c.name for c in classes if math.isfinite(c.ttl_seconds)]
        if finite:
            raise InvalidArgument(
                f"trace {file.path}: it has no timestamps, so a TTL means nothing to it; use --ttl inf"
            )


def _room(
    capacity_blocks: int, host_capacity: str, ssd_capacity: str, segment_bytes: str, block_bytes: int
) -> Room:
    """Return what fits.

    Errors: InvalidArgument on options that contradict each other.
    """
    if capacity_blocks and host_capacity:
        raise InvalidArgument("--capacity-blocks and --host-capacity are the same thing: give one of the two")
    host = blocks_of(host_capacity, "--host-capacity", block_bytes=block_bytes) if host_capacity else 0
    host = host or capacity_blocks
    if not ssd_capacity:
        return Room(host, 0, SEGMENT_BYTES, block_bytes)
    if not block_bytes:
        raise InvalidArgument("--ssd-capacity: segments are made of bytes; --bytes-per-token is needed")
    if not host:
        raise InvalidArgument("--ssd-capacity: what lies above it? --host-capacity is needed")
    ssd = blocks_of(ssd_capacity, "--ssd-capacity", block_bytes=block_bytes) * block_bytes
    try:
        size = parse_bytes(segment_bytes)
    except ValueError as error:
        raise InvalidArgument(f"--segment-bytes {segment_bytes}: {error}") from error
    if ssd < 4 * size:
        raise InvalidArgument(
            f"--ssd-capacity {ssd_capacity}: four segments of {bytes_text(size)} must fit in, "
            f"got {bytes_text(ssd)}; see --segment-bytes"
        )
    return Room(host, ssd, size, block_bytes)


def _warm_up(text: str, requests: Sequence[TraceRequest]) -> int:
    """Return how many leading requests are not counted.

    Errors: InvalidArgument on what is no share or time, or leaves nothing.
    """
    if text.endswith("%"):
        try:
            skipped = int(len(requests) * float(text[:-1]) / 100)
        except ValueError as error:
            raise InvalidArgument(f"--warm-up {text}: expected a share, such as 25%") from error
    else:
        until = requests[0].timestamp_ms + 1000 * seconds_of(text, "--warm-up")
        skipped = sum(request.timestamp_ms < until for request in requests)
    if not 0 <= skipped < len(requests):
        raise InvalidArgument(f"--warm-up {text}: leaves none of {len(requests)} requests to count")
    return skipped


def _bill(prices: Prices, tally: Tally, room: Room) -> Bill:
    """Price what was counted, and the storage for it: the capacities, or what was needed at the peak."""
    host = room.host_blocks or (0 if room.ssd_bytes else tally.resident_blocks_peak)
    return prices.bill(
        input_tokens=tally.input_tokens,
        hit_tokens=tally.hit_tokens,
        seconds=tally.duration_seconds,
        ssd_bytes=room.ssd_bytes,
        host_bytes=host * room.block_bytes,
    )


def _document(
    tally: Tally,
    file: TraceFile,
    classes: Sequence[RetentionClass],
    room: Room,
    policy: str,
    skipped: int,
    bill: Bill | None,
) -> dict[str, Any]:
    by_tier = tally.hit_tokens_by_tier
    return {
        "trace": str(file.path),
        "format": str(file.form),
        "block_size": file.block_tokens,
        "ttl_seconds": classes[0].ttl_seconds,
        "ttl_mode": str(classes[0].mode),
        "capacity_blocks": room.host_blocks,
        "ssd_capacity_bytes": room.ssd_bytes,
        "policy": policy,
        "lines_skipped": file.lines_skipped,
        "warm_up_requests": skipped,
        "requests": tally.requests,
        "input_tokens": tally.input_tokens,
        "hit_tokens": tally.hit_tokens,
        **tally.rates(),
        "hit_tokens_by_tier": {str(tier): by_tier[tier] for tier in sorted(by_tier)},
        "resident_blocks_mean": tally.resident_blocks_mean,
        "resident_blocks_peak": tally.resident_blocks_peak,
        "ssd_bytes_mean": tally.ssd_bytes_mean,
        "ssd_bytes_peak": tally.ssd_bytes_peak,
        "stored_blocks": tally.stored_blocks,
        "written_bytes": tally.ssd_written_bytes or tally.stored_blocks * room.block_bytes,
        "prefill_tokens_saved": tally.hit_tokens,
        "duration_seconds": tally.duration_seconds,
        "classes": [_class_row(c, tally) for c in classes],
        "bill": asdict(bill) if bill else None,
    }


def _class_row(held_by: RetentionClass, tally: Tally) -> dict[str, Any]:
    mine = tally.by_class.get(held_by.name)
    counts = asdict(mine) if mine else {"requests": 0, "input_tokens": 0, "hit_tokens": 0}
    return {
        "class": held_by.name,
        "ttl_seconds": held_by.ttl_seconds,
        "ttl_mode": str(held_by.mode),
        **counts,
    }


def _sheet(
    tally: Tally,
    classes: Sequence[RetentionClass],
    room: Room,
    bill: Bill | None,
    document: dict[str, Any],
) -> Sheet:
    sheet = Sheet()
    lasted = tally.duration_seconds
    sheet.line(
        f"{count_text(tally.requests)} requests over {duration_text(lasted)}; {_life(classes)}; {_fits(room)}"
    )
    if document["warm_up_requests"]:
        sheet.line(f"{count_text(document['warm_up_requests'])} requests before them only warmed the store")
    sheet.table("Simulation", ["what", "value>"], [*_rows(tally, room), *_money(bill)])
    if len(classes) > 1:
        rows = [_class_cells(row) for row in document["classes"]]
        sheet.table("Classes", ["class", "TTL>", "requests>", "input tokens>", "hit>"], rows)
    longest = max((c.ttl_seconds for c in classes if math.isfinite(c.ttl_seconds)), default=0.0)
    if lasted < longest:
        sheet.line(f"the trace is {duration_text(lasted)} long: it cannot show reuse beyond that")
    return sheet


def _life(classes: Sequence[RetentionClass]) -> str:
    if len(classes) > 1:
        return "each class by its own TTL"
    since = "write" if classes[0].mode is TtlMode.FIXED else "last touch"
    ttl = classes[0].ttl_seconds
    return "a block stays " + ("for ever" if math.isinf(ttl) else f"{duration_text(ttl)} after its {since}")


def _fits(room: Room) -> str:
    host = f"room for {count_text(room.host_blocks)} blocks" if room.host_blocks else "room for all"
    return f"{host} and {bytes_text(room.ssd_bytes)} of SSD" if room.ssd_bytes else host


def _rows(tally: Tally, room: Room) -> list[tuple[str, str]]:
    rates = tally.rates()
    rows = [
        ("hit rate, tokens", f"{rates['token_hit_rate']:.3%}"),
        ("hit rate, tokens of the second half", f"{rates['token_hit_rate_half']:.3%}"),
        ("hit rate, blocks", f"{rates['block_hit_rate']:.3%}"),
        ("requests with a hit", f"{rates['request_hit_rate']:.3%}"),
        ("input tokens", count_text(tally.input_tokens)),
        ("of these hit: prefill saved", count_text(tally.hit_tokens)),
    ]
    if room.ssd_bytes:
        by_tier = sorted(tally.hit_tokens_by_tier.items())
        rows += [(f"hit rate, tokens from {t}", percent_text(n, tally.input_tokens)) for t, n in by_tier]
    rows += [
        ("resident blocks, mean", count_text(round(tally.resident_blocks_mean))),
        ("resident blocks, peak", count_text(tally.resident_blocks_peak)),
        ("blocks stored", count_text(tally.stored_blocks)),
    ]
    if room.block_bytes:
        written = tally.ssd_written_bytes or tally.stored_blocks * room.block_bytes
        rows += [
            ("resident bytes, mean", bytes_text(tally.resident_blocks_mean * room.block_bytes)),
            ("bytes written", bytes_text(written)),
        ]
    return rows


def _money(bill: Bill | None) -> list[tuple[str, str]]:
    if bill is None:
        return []
    return [
        ("accelerator-hours of prefill", f"{bill.gpu_hours:,.2f}"),
        ("accelerator-hours saved", f"{bill.gpu_hours_saved:,.2f}"),
        ("cost of prefill", f"{bill.gpu_cost:,.2f}"),
        ("cost saved", f"{bill.gpu_cost_saved:,.2f}"),
        ("cost of the storage", f"{bill.storage_cost:,.2f}"),
        ("revenue of input tokens", f"{bill.revenue:,.2f}"),
    ]


def _class_cells(row: dict[str, Any]) -> list[str]:
    return [
        plain(row["class"]),
        duration_text(row["ttl_seconds"]),
        count_text(row["requests"]),
        count_text(row["input_tokens"]),
        percent_text(row["hit_tokens"], row["input_tokens"]),
    ]
