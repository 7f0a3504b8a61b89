"""`kvstore status`: what the daemon is doing, on one screen."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.text import Text

from kvstore.cli.connection import AddressOption, CaOption, Daemon, JsonOption, TokenOption
from kvstore.cli.output import (
    EXIT_FINE,
    EXIT_PROBLEM,
    Sheet,
    bytes_text,
    console,
    count_text,
    duration_text,
    emit_json,
    percent_text,
    plain,
    styled,
)

COUNTER = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})?")
WRITTEN_DAYS = (1, 7, 30)
LADDER = ("hbm", "host", "ssd", "shared")
STATE_STYLES = {"ok": "green", "serving": "green", "degraded": "yellow", "read_only": "yellow", "down": "red"}


def status(
    address: AddressOption = None,
    watch: Annotated[
        float | None,
        typer.Option("--watch", "-w", metavar="SECONDS", min=0.1, help="Draw again every so often."),
    ] = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Show tiers, classes, hit rates by tier, queues and health.

    A hit rate says of what: tokens delivered, out of tokens asked for. Exit
    code 1 when a tier is not healthy, or when no daemon answers.

    Examples:

      kvstore status

      kvstore status --watch 2

      kvstore status --json | jq .gauges
    """
    with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
        if watch is not None and not as_json:
            with suppress(KeyboardInterrupt):
                _watch(daemon, watch)
            raise typer.Exit
        document = daemon.status()
    if as_json:
        emit_json(document)
    else:
        sheet(document).show()
    raise typer.Exit(EXIT_FINE if is_healthy(document) else EXIT_PROBLEM)


def is_healthy(document: Mapping[str, Any]) -> bool:
    """Return whether every tier is in full working order."""
    return all(tier.get("state", "ok") in ("ok", "disabled") for tier in document.get("tiers", ()))


def _watch(daemon: Daemon, seconds: float) -> None:
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(sheet(daemon.status()).drawn(), refresh=True)
            time.sleep(seconds)


def sheet(document: Mapping[str, Any]) -> Sheet:
    """Return the status page."""
    page = Sheet()
    page.line(_headline(document))
    gauges: Mapping[str, float] = document.get("gauges", {})
    page.table(
        "Tiers", ("tier", "state", "used>", "capacity>", "full>", "blocks>", "detail"), _tiers(document)
    )
    for what, text in _notes(document):
        page.line(Text(f"{what}: {text}", "dim"))
    page.table("Hit rate, of tokens asked for", ("tier", "tokens>", "rate>"), _hit_rates(document))
    columns = ("class", "life", "mode", "lowest tier", "blocks>", "host>", "ssd>")
    page.table("Retention classes", columns, _classes(document))
    page.table("Written to SSD", ("class", "today>", "7 days>", "30 days>"), _written(document))
    page.table("Misses: matches that ended early, by reason", ("reason", "matches>"), _misses(document))
    page.table(
        "Queues", ("what", "now>"), [(_spoken(key), _amount(key, gauges[key])) for key in _queues(gauges)]
    )
    return page


def _headline(document: Mapping[str, Any]) -> Text:
    state = "healthy" if is_healthy(document) else "not healthy"
    words = [f"kvstore {document.get('version', '')}".strip()]
    if "pid" in document:
        words.append(f"pid {document['pid']}")
    if "uptime_seconds" in document:
        words.append(f"up {duration_text(document['uptime_seconds'])}")
    return Text.assemble(" · ".join(words), " · ", (state, "green" if state == "healthy" else "red"))


def _notes(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the start found, and how far the scrub is."""
    recovery = document.get("recovery") or {}
    scrubs = [str(tier["scrub"]) for tier in document.get("tiers", ()) if tier.get("scrub")]
    recovered = [str(recovery["text"])] if recovery.get("text") else []
    return [("recovered", text) for text in recovered] + [("scrub", text) for text in scrubs]


def _tiers(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for tier in document.get("tiers", ()):
        used, capacity = tier.get("used_bytes", 0), tier.get("capacity_bytes", 0)
        state = str(tier.get("state", "ok"))
        rows.append(
            (
                plain(str(tier.get("tier", ""))),
                styled(state, STATE_STYLES.get(state, "yellow")),
                bytes_text(used),
                bytes_text(capacity),
                percent_text(used, capacity),
                count_text(tier.get("blocks", 0)),
                plain(str(tier.get("detail", ""))),
            )
        )
    return rows


def labelled(counters: Mapping[str, float], name: str, label: str) -> dict[str, float]:
    """Return one counter summed by one of its labels."""
    sums: defaultdict[str, float] = defaultdict(float)
    for key, value in counters.items():
        found = COUNTER.fullmatch(key)
        if found is None or found["name"] != name:
            continue
        pairs = dict(pair.split("=", 1) for pair in (found["labels"] or "").split(",") if "=" in pair)
        sums[pairs.get(label, "").strip('"')] += value
    return dict(sums)


def _hit_rates(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    counters = document.get("counters", {})
    asked = sum(labelled(counters, "kvstore_lookup_tokens_total", "").values())
    by_tier = labelled(counters, "kvstore_hit_tokens_total", "tier")
    if not asked:
        return []
    names = [name for name in LADDER if name in by_tier]
    rows: list[tuple[str, ...]] = [
        (name, count_text(by_tier[name]), percent_text(by_tier[name], asked)) for name in names
    ]
    hits = sum(by_tier.values())
    rows.append((styled("all", "bold"), count_text(hits), percent_text(hits, asked)))
    rows.append((styled("asked for", "dim"), count_text(asked), ""))
    return rows


def _classes(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            plain(str(item.get("class", ""))),
            duration_text(item.get("ttl_seconds")),
            str(item.get("mode", "")),
            str(item.get("lowest_tier", "")),
            count_text(item.get("blocks", 0)),
            bytes_text(item.get("host_bytes", 0)),
            bytes_text(item.get("ssd_bytes", 0)),
        )
        for item in document.get("classes", ())
    ]


def _written(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row a class; the days are UTC's, today included."""
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(WRITTEN_DAYS))
    for tier in document.get("tiers", ()):
        for item in tier.get("written", ()):
            age = (date.fromisoformat(tier["today"]) - date.fromisoformat(item["day"])).days
            for at, days in enumerate(WRITTEN_DAYS):
                sums[str(item["class"])][at] += int(item["bytes"]) if age < days else 0
    rows = sorted(sums.items(), key=lambda row: -row[1][-1])
    return [(plain(name), *map(bytes_text, amounts)) for name, amounts in rows if amounts[-1]]


def _misses(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    reasons = labelled(document.get("counters", {}), "kvstore_misses_total", "reason")
    ranked = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return [(reason, count_text(count)) for reason, count in ranked if count]


def _queues(gauges: Mapping[str, float]) -> list[str]:
    return [key for key in sorted(gauges) if not key.endswith("_used_bytes")]


def _spoken(key: str) -> str:
    return key.removeprefix("kvstore_").removesuffix("_bytes").replace("_", " ")


def _amount(key: str, value: float) -> str:
    return bytes_text(value) if key.endswith("_bytes") else count_text(value)
