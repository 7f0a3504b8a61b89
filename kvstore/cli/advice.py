"""What classes lost lately, and what a longer life or more room would have kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.cli.output import Sheet, bytes_text, count_text, duration_text, percent_text, plain

WINDOWS = ("hour", "day")
ENOUGH_SHARE = 0.9
"""Of what any choice would have kept: the least one that keeps this much is named."""


def advice_sheet(document: Mapping[str, Any]) -> Sheet:
    """Return the page: losses per class, then a sentence for each that could be helped."""
    page = Sheet()
    rows, sentences = [], []
    for name, item in document["classes"].items():
        lost = [item[window][f"lost_to_{why}_tokens"] for why in ("expiry", "eviction") for window in WINDOWS]
        if any(lost):
            rows.append((plain(name), duration_text(item["ttl_seconds"]), *map(count_text, lost)))
        sentences += _sentences(name, item)
    columns = ("class", "life", "expiry, 1 h>", "expiry, 1 d>", "eviction, 1 h>", "eviction, 1 d>")
    page.table("Tokens lost to", columns, rows)
    for sentence in sentences:
        page.line(sentence)
    if not rows:
        page.line("nothing was asked for in the last day that had expired or been evicted")
    return page


def _sentences(name: str, item: Mapping[str, Any]) -> list[str]:
    day, found = item["day"], []
    longer = _least(day["longer_life"])
    if longer:
        found.append(
            f"{name}: a life of {duration_text(longer['ttl_seconds'])} instead of "
            f"{duration_text(item['ttl_seconds'])} would have kept "
            f"{_share(longer, day['lost_to_expiry_tokens'])} lost to expiry in the last day"
        )
    more = _least(day["more_room"])
    if more:
        found.append(
            f"{name}: {bytes_text(more['bytes'])} more room would have kept "
            f"{_share(more, day['lost_to_eviction_tokens'])} lost to eviction in the last day"
        )
    return found


def _least(choices: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the least choice that keeps nearly all that any would."""
    most = max((choice["kept_tokens"] for choice in choices), default=0)
    return next((choice for choice in choices if choice["kept_tokens"] >= ENOUGH_SHARE * most), None)


def _share(choice: Mapping[str, Any], lost: int) -> str:
    kept = choice["kept_tokens"]
    return f"{count_text(kept)} tokens ({percent_text(kept, lost)}) of those"
