"""Counters and observations that the core emits; the Prometheus endpoint and `status` read them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

Labels = tuple[tuple[str, str], ...]


class Events:
    """A thread-safe table of counters and fixed-bucket histograms, keyed by metric name and labels.

    Names follow `kvstore_<noun>_<unit>[_total]`; labels come from closed sets, never hashes or request ids.
    """

    BUCKETS_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._histograms: dict[tuple[str, Labels], list[float]] = {}

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        key = (name, tuple(sorted(labels.items())) if labels else ())
        with self._lock:
            self._counters[key] += amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Record one duration in a histogram: a cell per bucket, one for +Inf, then the sum."""
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            cells = self._histograms.setdefault(key, [0.0] * (len(self.BUCKETS_SECONDS) + 2))
            cells[bisect_left(self.BUCKETS_SECONDS, seconds)] += 1
            cells[-1] += seconds

    def counters(self) -> Mapping[tuple[str, Labels], float]:
        """Return a copy of all counters."""
        with self._lock:
            return dict(self._counters)

    def histograms(self) -> Mapping[tuple[str, Labels], list[float]]:
        """Return a copy of all histograms: a count per bucket, one for +Inf, then the sum in seconds."""
        with self._lock:
            return {key: list(cells) for key, cells in self._histograms.items()}

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a counter over all label sets that contain `labels`."""
        wanted = set(labels.items())
        with self._lock:
            return sum(v for (n, have), v in self._counters.items() if n == name and wanted <= set(have))
