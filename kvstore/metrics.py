"""Every metric the daemon exports: one list with help texts, and the collector that Prometheus reads.

Counters and histograms come from kvstore.events, gauges from a snapshot taken at scrape time. A metric of the
list is always there, with 0 for label values nobody has counted yet: a dashboard never misses a series.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvstore.events import Events, Labels
from kvstore.types import MissReason, PutOutcome, Tier

T = TypeVar("T")


class Kind(StrEnum):
    """How a metric moves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric. `labels` are drawn from closed sets; those in LABEL_VALUES start at 0."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
METRICS: tuple[Metric, ...] = (
    Metric("kvstore_lookups_total", _C, "Leased matches."),
    Metric("kvstore_lookup_tokens_total", _C, "Tokens whose blocks were asked for by leased matches."),
    Metric("kvstore_hit_tokens_total", _C, "Tokens delivered, by where they were found.", ("tier", "class")),
    Metric("kvstore_misses_total", _C, "Matches that ended before the last key.", ("reason",)),
    Metric("kvstore_fetch_seconds", _H, "Seconds from a match to its last block in host memory.", ("tier",)),
    Metric("kvstore_stored_blocks_total", _C, "Blocks of puts, by what became of them.", ("outcome",)),
    Metric("kvstore_leases", _G, "Leases held now."),
    Metric("kvstore_reservations", _G, "Reservations open now."),
    Metric("kvstore_quarantined_slots", _G, "Slots that a late writer may still write to."),
    Metric("kvstore_write_queue_bytes", _G, "Bytes waiting for the SSD."),
    Metric("kvstore_loads_in_flight", _G, "Reads from SSD to host memory under way."),
    Metric("kvstore_loads_queued", _G, "Reads from SSD that wait for their turn."),
    Metric("kvstore_host_used_bytes", _G, "Bytes of the arena in use."),
    Metric("kvstore_ssd_used_bytes", _G, "Bytes of the data directory in use."),
    Metric("kvstore_nodes", _G, "Runs in the index that are awake."),
    Metric("kvstore_frames_asleep", _G, "Frames on SSD of which no key is in memory."),
    Metric("kvstore_frames_woken_total", _C, "Frames whose keys were read because a request needed them."),
    Metric("kvstore_frames_unreadable_total", _C, "Frames that could not be woken, or not in time."),
    Metric("kvstore_segments", _G, "Segment files in use."),
    Metric("kvstore_deletions_pending", _G, "Frames and segments whose deletion the disk has not confirmed."),
    Metric("kvstore_prefetches", _G, "Prefetches under way."),
    Metric("kvstore_leases_expired_total", _C, "Leases that ended by their deadline."),
    Metric("kvstore_reservations_expired_total", _C, "Reservations that ended without a commit."),
    Metric("kvstore_puts_incomplete_total", _C, "Puts dropped because a part never came."),
    Metric("kvstore_ssd_written_bytes_total", _C, "Bytes written to the SSD.", ("class",)),
    Metric("kvstore_ssd_copied_bytes_total", _C, "Bytes copied so that a segment could go.", ("reason",)),
    Metric("kvstore_ssd_errors_total", _C, "Failed operations of the SSD tier.", ("operation",)),
    Metric("kvstore_write_refusals_total", _C, "Runs that the SSD tier did not take."),
    Metric("kvstore_expired_bytes_total", _C, "Bytes that left because their time was over.", ("class",)),
    Metric("kvstore_evicted_bytes_total", _C, "Bytes that left for want of room.", ("tier",)),
    Metric("kvstore_ssd_unreadable_total", _C, "Reads of records whose key was not at hand.", ("key",)),
    Metric("kvstore_key_reload_failures_total", _C, "Reloads of the keys that failed; the old ones stayed."),
    Metric("kvstore_corrupt_total", _C, "Blocks whose digest was wrong.", ("tier",)),
    Metric("kvstore_scrubbed_bytes_total", _C, "Bytes of the SSD that the scrub has re-read."),
    Metric("kvstore_client_fallbacks_total", _C, "Client calls answered without the daemon.", ("reason",)),
    Metric(
        "kvstore_client_load_decisions_total",
        _C,
        "Matches by what a client made of them: load, load_part, recompute, try.",
        ("decision",),
    ),
    Metric("kvstore_sessions", _G, "Clients connected now."),
    Metric("kvstore_sessions_total", _C, "Clients that have connected."),
    Metric("kvstore_sessions_cut_total", _C, "Clients cut off for not reading their answers."),
    Metric("kvstore_rpc_errors_total", _C, "Requests answered with an error.", ("code",)),
    Metric("kvstore_rpc_refusals_total", _C, "Remote calls refused for a wrong or missing token."),
    Metric("kvstore_framed_bytes_total", _C, "Payload bytes of the framed path.", ("direction",)),
    Metric("kvstore_listener_failures_total", _C, "Listeners of the store that failed; the others heard."),
    Metric("kvstore_thread_failures_total", _C, "Supervised threads that ended by an error.", ("thread",)),
    Metric("kvstore_serving", _G, "1 while the daemon admits requests, else 0."),
    Metric("kvstore_uptime_seconds", _G, "Seconds since the daemon was ready."),
)  # fmt: skip
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

LABEL_VALUES: Mapping[str, tuple[str, ...]] = {
    "tier": (Tier.HOST, Tier.SSD),
    "reason": tuple(MissReason),
    "outcome": tuple(outcome for outcome in PutOutcome if outcome is not PutOutcome.RESERVED),
    "direction": ("in", "out"),
    "key": ("missing", "wrong", "shredded"),
}
"""Closed label sets; `class` is completed by the configured classes."""


class EventsCollector(Collector):
    """Reads the events and the gauges at each scrape.

    Threads: called by the endpoint's threads; `gauges` must be thread-safe and quick.
    """

    def __init__(
        self, events: Events, *, gauges: Callable[[], Mapping[str, float]], classes: Iterable[str]
    ) -> None:
        self._events = events
        self._gauges = gauges
        self._values = {**LABEL_VALUES, "class": tuple(classes)}

    def collect(self) -> Iterator[Family]:
        """Yield every metric of the list, then what is counted but not listed."""
        counters, histograms = self._events.counters(), self._events.histograms()
        gauges = self._gauges()
        for metric in METRICS:
            if metric.kind is Kind.GAUGE:
                yield GaugeMetricFamily(metric.name, metric.help, value=gauges.get(metric.name, 0.0))
            elif metric.kind is Kind.COUNTER:
                yield self._counter(metric, _series_of(metric.name, counters))
            else:
                yield self._histogram(metric, _series_of(metric.name, histograms))
        unlisted = {name for name, _ in counters if name not in BY_NAME}
        for name in sorted(unlisted):
            series = _series_of(name, counters)
            labels = tuple(sorted({key for have in series for key, _ in have}))
            yield self._counter(Metric(name, Kind.COUNTER, "Not described.", labels), series)

    def _counter(self, metric: Metric, series: Mapping[Labels, float]) -> Family:
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        rows = dict.fromkeys(self._expected(metric), 0.0)
        for have, value in series.items():
            row = _row(metric, have)
            rows[row] = rows.get(row, 0.0) + value
        for row, value in rows.items():
            family.add_metric(row, value)
        return family

    def _histogram(self, metric: Metric, series: Mapping[Labels, list[float]]) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        edges = [*(repr(edge) for edge in Events.BUCKETS_SECONDS), "+Inf"]
        rows = {row: [0.0] * (len(edges) + 1) for row in self._expected(metric)}
        rows |= {_row(metric, have): cells for have, cells in series.items()}
        for row, cells in rows.items():
            buckets = list(zip(edges, itertools.accumulate(cells[:-1]), strict=True))
            family.add_metric(row, buckets, sum_value=cells[-1])
        return family

    def _expected(self, metric: Metric) -> Iterator[tuple[str, ...]]:
        # A label outside the closed sets appears with its first count.
        yield from itertools.product(*(self._values.get(label, ()) for label in metric.labels))


def _series_of(name: str, table: Mapping[tuple[str, Labels], T]) -> dict[Labels, T]:
    return {labels: value for (have, labels), value in table.items() if have == name}


def _row(metric: Metric, have: Labels) -> tuple[str, ...]:
    given = dict(have)
    return tuple(given.get(label, "") for label in metric.labels)
