"""Metrics: every name of the list is there from the first scrape, and the sources emit no other name."""

from __future__ import annotations

import ast
import itertools
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvstore.clock import ManualClock
from kvstore.core.ladder import Ladder
from kvstore.events import Events
from kvstore.metrics import BY_NAME, METRICS, EventsCollector, Kind
from tests.support.memory import PrivateMemory
from tests.tidy.tree import product_sources

FIXED_NAMES = tuple(
    """
kvstore_lookup_tokens_total kvstore_hit_tokens_total kvstore_misses_total kvstore_fetch_seconds
kvstore_stored_blocks_total kvstore_leases kvstore_write_queue_bytes kvstore_ssd_written_bytes_total
kvstore_expired_bytes_total kvstore_evicted_bytes_total kvstore_corrupt_total kvstore_client_fallbacks_total
""".split()  # noqa: SIM905
)
GRAMMAR = re.compile(r"kvstore_[a-z]+(_[a-z]+)*")


def scrape(events: Events, gauges: dict[str, float] | None = None) -> str:
    registry = CollectorRegistry()
    registry.register(EventsCollector(events, gauges=lambda: gauges or {}, classes=["agent", "chat"]))
    return generate_latest(registry).decode()


@pytest.mark.parametrize("name", FIXED_NAMES)
def test_the_fixed_names_are_there_at_zero(name: str) -> None:
    text = scrape(Events())
    family = name.removesuffix("_total")
    assert re.search(rf"^# TYPE {family}(_total)? ", text, re.MULTILINE)
    assert re.search(rf"^{name}(_count)?({{.*}})? 0\.0$", text, re.MULTILINE)


def test_counts_land_in_their_series() -> None:
    events = Events()
    events.add("kvstore_hit_tokens_total", 128, tier="ssd", **{"class": "chat"})
    events.add("kvstore_rpc_errors_total", code="overloaded")
    text = scrape(events, {"kvstore_leases": 3})
    assert 'kvstore_hit_tokens_total{class="chat",tier="ssd"} 128.0' in text
    assert 'kvstore_hit_tokens_total{class="agent",tier="host"} 0.0' in text
    assert 'kvstore_rpc_errors_total{code="overloaded"} 1.0' in text
    assert "kvstore_leases 3.0" in text


def test_a_histogram_is_cumulative() -> None:
    events = Events()
    for seconds in (0.0004, 0.003, 99.0):
        events.observe("kvstore_fetch_seconds", seconds, tier="ssd")
    text = scrape(events)
    assert 'kvstore_fetch_seconds_bucket{le="0.005",tier="ssd"} 2.0' in text
    assert 'kvstore_fetch_seconds_bucket{le="+Inf",tier="ssd"} 3.0' in text
    assert 'kvstore_fetch_seconds_count{tier="ssd"} 3.0' in text


def test_what_is_not_listed_is_exported_all_the_same() -> None:
    events = Events()
    events.add("kvstore_surprises_total", 2, kind="a")
    assert 'kvstore_surprises_total{kind="a"} 2.0' in scrape(events)


def test_names_follow_one_grammar() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert GRAMMAR.fullmatch(metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert metric.help.endswith(".")


def test_every_gauge_has_a_source() -> None:
    host, clock = PrivateMemory(8), ManualClock()
    ladder = Ladder(host=host, ssd=None, clock=clock, events=Events(), new_number=itertools.count(1).__next__)
    mine = {"kvstore_sessions", "kvstore_serving", "kvstore_uptime_seconds"}
    assert mine | ladder.gauges().keys() == {m.name for m in METRICS if m.kind is Kind.GAUGE}


def emitted() -> set[tuple[str, str]]:
    """Return (file, name) of every metric that a source counts under a literal name or a constant."""
    found = set()
    for source in product_sources():
        constants = {
            target.id: node.value.value
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            first = node.args[0]
            value = constants.get(first.id) if isinstance(first, ast.Name) else getattr(first, "value", None)
            if (
                node.func.attr in ("add", "observe")
                and isinstance(value, str)
                and value.startswith("kvstore_")
            ):
                found.add((source.path, value))
    return found


def test_every_emitted_metric_is_listed() -> None:
    # A client counts in its own process, where no endpoint of ours exports it.
    ours = ((path, name) for path, name in emitted() if not path.startswith("kvstore/client/"))
    strangers = sorted((path, name) for path, name in ours if name not in BY_NAME)
    assert not strangers, f"add these to kvstore/metrics.py, with a help text: {strangers}"
