"""Hit rates and advice as documents: sums of the recent past by what was asked to tell apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstore.core.hitrate import LIFE_EDGES, QUARTER, QUARTERS_KEPT, ROOM_EDGES, Cell, Key
from kvstore.core.ladder import Ladder
from kvstore.errors import InvalidArgument
from kvstore.namespace import Namespace
from kvstore.retention import DAY, HOUR
from kvstore.types import Fingerprint

BY = ("class", "tier", "tenant", "namespace")
WINDOW_MAX = QUARTER * (QUARTERS_KEPT - 1)
OTHER_TEXT = "(other)"


class HitRateDocuments:
    """Threads: any."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder

    def hit_rate(self, *, window_seconds: float, by: Sequence[str]) -> dict[str, Any]:
        """Return what was asked for and delivered in the window, a row for each group, largest first.

        Errors: InvalidArgument on a window or a `by` that is not known.
        """
        seconds = window_seconds or HOUR
        if not 0 < seconds <= WINDOW_MAX:
            raise InvalidArgument(
                f"hit-rate: a window is at most {WINDOW_MAX / HOUR:.0f} h, got {seconds:g} s"
            )
        unknown = [name for name in by if name not in BY]
        if unknown:
            raise InvalidArgument(f"hit-rate: by one of {', '.join(BY)}, got {unknown[0]!r}")
        cells = self._ladder.hit_rates(seconds)
        names = {namespace.fingerprint: namespace for namespace in self._ladder.namespaces()}
        groups: defaultdict[tuple[tuple[str, str], ...], Cell] = defaultdict(Cell)
        for key, cell in cells.items():
            groups[tuple(_labels(key, names, by).items())].add(cell)
        rows = [{**dict(labels), **_row(cell)} for labels, cell in groups.items()]
        rows.sort(key=lambda row: -row["asked_tokens"])
        return {
            "window_seconds": seconds,
            "by": list(by),
            "rows": rows,
            "total": _row(_sum(cells.values())),
        }

    def advice(self) -> dict[str, Any]:
        """Return per class what was lost to expiry and to eviction in the last hour and day, and what a
        longer life or more room would have kept.
        """
        table = self._ladder.class_table().classes
        document: dict[str, Any] = {"classes": {}}
        for window, seconds in (("hour", HOUR), ("day", DAY)):
            by_class: defaultdict[str, Cell] = defaultdict(Cell)
            for (_, name), cell in self._ladder.hit_rates(seconds).items():
                by_class[name].add(cell)
            for name, held_by in table.items():
                row = document["classes"].setdefault(
                    name, {"ttl_seconds": held_by.ttl_seconds, "quota_bytes": held_by.quota_bytes}
                )
                row[window] = _losses(by_class[name], ttl_seconds=held_by.ttl_seconds)
        return document


def _labels(key: Key, names: Mapping[Fingerprint, Namespace], by: Sequence[str]) -> dict[str, str]:
    space, name = key
    namespace = names.get(Fingerprint(space))
    labels: dict[str, str] = {}
    if "class" in by:
        labels["class"] = name or OTHER_TEXT
    if "tenant" in by:
        labels["tenant"] = namespace.tenant if namespace else OTHER_TEXT
    if "namespace" in by:
        labels["namespace"] = space.hex() or OTHER_TEXT
        labels["model"] = namespace.model if namespace else ""
    return labels


def _sum(cells: Iterable[Cell]) -> Cell:
    total = Cell()
    for cell in cells:
        total.add(cell)
    return total


def _row(cell: Cell) -> dict[str, Any]:
    hit = sum(cell.hits.values())
    return {
        "requests": cell.requests,
        "full_hits": cell.full_hits,
        "asked_tokens": cell.asked,
        "hit_tokens": hit,
        "hit_rate": hit / cell.asked if cell.asked else None,
        "hit_tokens_by_tier": dict(cell.hits),
        "missed_tokens_by_reason": dict(cell.missed),
        "requests_by_reason": dict(cell.misses),
    }


def _losses(cell: Cell, *, ttl_seconds: float) -> dict[str, Any]:
    longer = [(edge, kept) for edge, kept in _kept(cell.lost_to_expiry, LIFE_EDGES) if edge > ttl_seconds]
    return {
        "lost_to_expiry_tokens": sum(cell.lost_to_expiry.values()),
        "longer_life": [{"ttl_seconds": edge, "kept_tokens": kept} for edge, kept in longer],
        "lost_to_eviction_tokens": sum(cell.lost_to_eviction.values()),
        "more_room": [
            {"bytes": int(edge), "kept_tokens": kept}
            for edge, kept in _kept(cell.lost_to_eviction, ROOM_EDGES)
        ],
    }


def _kept(lost: Mapping[int, int], edges: Sequence[float]) -> list[tuple[float, int]]:
    """Return for each edge that keeps more than the one before how many tokens it would have kept."""
    kept, found = 0, []
    for index, edge in enumerate(edges):
        if lost.get(index):
            kept += lost[index]
            found.append((edge, kept))
    return found
