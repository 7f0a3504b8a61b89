"""Counters of one connector, in the plain form that vLLM carries from workers to its log and its metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping

METRICS: Mapping[str, tuple[str, str]] = {
    "lookups": ("", "requests that asked the store"),
    "lookup_seconds": ("", "time that lookups and leases kept the scheduler"),
    "lookup_tokens": ("", "prompt tokens that were asked for"),
    "hit_tokens": ("tier", "prompt tokens that the store delivered, by where they lay; counted on delivery"),
    "misses": ("reason", "lookups that ended before the last block, by why"),
    "load_decisions": ("decision", "hits by what was made of them: load, load_part, recompute, try"),
    "failed_loads": ("reason", "loads that delivered less than was promised; the rest was computed"),
    "loads": ("", "loads that ended, per worker"),
    "load_seconds": ("", "time from order to end of loads, per worker"),
    "load_bytes": ("", "bytes loaded, per worker"),
    "stored_blocks": ("outcome", "blocks offered to the store, by what became of them, per worker"),
    "save_bytes": ("", "bytes copied out of the engine's cache, per worker"),
    "save_seconds": ("", "time that the saving thread was busy, per worker"),
    "dropped_blocks": ("reason", "blocks that were not offered: queue full, preempted, behind a failed load"),
}
"""name -> (label, help). In Prometheus: vllm:kvstore_<name>_total."""
Counts = dict[str, float]
"""Key `name` or `name/label value`."""


class Tally:
    """Counts until somebody takes them. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counts = {}

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Count; `name` is one of METRICS, which says whether it has a label."""
        assert bool(METRICS[name][0]) == bool(label), name
        key = f"{name}/{label}" if label else name
        with self._lock:
            self._counts[key] = self._counts.get(key, 0.0) + amount

    def take(self) -> Counts:
        """Return what was counted since the last time."""
        with self._lock:
            counts, self._counts = self._counts, {}
            return counts


def added(one: Counts, other: Counts) -> Counts:
    """Return the sum of two sets of counts."""
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in sorted(one.keys() | other.keys())}


def split(key: str) -> tuple[str, str]:
    """Return (name, label value) of a key."""
    name, _, label = key.partition("/")
    return name, label


def readable(counts: Counts) -> dict[str, int | float]:
    """Return counts for a log line: whole numbers where they are, seconds rounded."""
    return {
        key.replace("/", "_"): int(value) if value == int(value) else round(value, 4)
        for key, value in sorted(counts.items())
    }
