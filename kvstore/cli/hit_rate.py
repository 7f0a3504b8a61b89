"""`kvstore hit-rate`: what the running daemon delivered of what was asked for, and what stopped the rest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.live import Live

from kvstore.cli.answers import ask
from kvstore.cli.connection import AddressOption, CaOption, Daemon, JsonOption, TokenOption
from kvstore.cli.output import (
    Sheet,
    console,
    count_text,
    duration_text,
    percent_text,
    plain,
    styled,
)
from kvstore.errors import InvalidArgument
from kvstore.quantities import parse_seconds
from kvstore.rpc.v1 import admin_pb2 as pb

LADDER = ("hbm", "host", "ssd", "shared")
REASONS_SHOWN = 3


def hit_rate(
    window: Annotated[
        str, typer.Option("--window", "-w", metavar="TIME", help="How far back: 5m, 1h; a day at most.")
    ] = "1h",
    by: Annotated[
        str, typer.Option("--by", metavar="WHAT,...", help="Of class, tier, tenant, namespace.")
    ] = "class,tier",
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch", metavar="SECONDS", min=0.1, help="Draw again every so often.", show_default=False
        ),
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Show hit rates of the recent past: tokens delivered of tokens asked for, with the reasons of misses.

    Delivered is what clients said they used when they released their lease;
    probes do not count. Groups beyond a bounded number are put together as
    "(other)".

    Examples:

      kvstore hit-rate --window 5m

      kvstore hit-rate --by class,tenant,tier --watch 2
    """
    try:
        seconds = parse_seconds(window)
    except ValueError as error:
        raise InvalidArgument(f"--window: {error}") from error
    names = [name.strip() for name in by.split(",") if name.strip()]
    request = pb.HitRateRequest(window_seconds=seconds, by=names)
    if watch is not None and not as_json:
        with Daemon(address, token=token, tls_ca=tls_ca) as daemon, suppress(KeyboardInterrupt):
            _watch(daemon, request, watch)
        return
    ask("HitRate", request, sheet, address=address, token=token, tls_ca=tls_ca, as_json=as_json)


def _watch(daemon: Daemon, request: pb.HitRateRequest, seconds: float) -> None:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(sheet(daemon.document("HitRate", request)).drawn(), refresh=True)
            time.sleep(seconds)


def sheet(document: Mapping[str, Any]) -> Sheet:
    """Return the page."""
    page = Sheet()
    labels = [name for name in document["by"] if name != "tier"]
    total = document["total"]
    tiers = (
        [tier for tier in LADDER if tier in total["hit_tokens_by_tier"]] if "tier" in document["by"] else []
    )
    columns = (
        *labels, "requests>", "all found>", "tokens asked>", "hit>", "rate>",
        *(f"{tier}>" for tier in tiers), "missed, by reason",
    )  # fmt: skip
    rows = [_cells(row, [_label(row, name) for name in labels], tiers) for row in document["rows"]]
    if labels and rows:
        rows.append(_cells(total, [styled("all", "bold"), *[""] * (len(labels) - 1)], tiers))
    title = f"Hit rate of the last {duration_text(document['window_seconds'])}, of tokens asked for"
    page.table(title, columns, rows)
    if not document["rows"]:
        page.line("nothing was asked for in that time")
    return page


def _label(row: Mapping[str, Any], name: str) -> str:
    if name == "namespace":
        return plain(f"{row['namespace'][:12]} {row['model']}".strip())
    return plain(str(row[name]) or '""')


def _cells(row: Mapping[str, Any], labels: list[str], tiers: list[str]) -> tuple[str, ...]:
    asked = row["asked_tokens"]
    missed = sorted(row["missed_tokens_by_reason"].items(), key=lambda item: -item[1])
    reasons = [f"{reason} {percent_text(tokens, asked)}" for reason, tokens in missed[:REASONS_SHOWN]]
    return (
        *labels,
        count_text(row["requests"]),
        count_text(row["full_hits"]),
        count_text(asked),
        count_text(row["hit_tokens"]),
        percent_text(row["hit_tokens"], asked),
        *(percent_text(row["hit_tokens_by_tier"].get(tier, 0), asked) for tier in tiers),
        ", ".join(reasons),
    )
