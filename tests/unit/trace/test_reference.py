"""The simulator against reference values of real traces: to the fifth decimal, and to the block."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvstore.quantities import parse_seconds
from kvstore.trace.classing import ClassRules
from kvstore.trace.requests import TraceFile, TraceRequest
from kvstore.trace.simulator import Simulator
from kvstore.types import TtlMode

TRACES = Path(__file__).parents[4] / "shared" / "traces"
"""Real traces lie beside a developer's checkout and are no part of it."""
CLOSE = 5e-6
SMALL, DEV = "agentic_cc_small", "agentic_cc_dev"
CONVERSATION, SYNTHETIC = "mooncake_conversation", "mooncake_synthetic"
pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason="the reference traces are not beside this checkout"
)


@cache
def loaded(name: str, rules: ClassRules | None = None) -> tuple[int, list[TraceRequest], dict[str, Any]]:
    """Block size, requests and reference values of a trace."""
    file = TraceFile(next(TRACES.glob(f"{name}.*jsonl.gz")), rules=rules)
    return file.block_tokens, file.sorted(), json.loads((TRACES / f"reference/{name}.stats.json").read_text())


def check(name: str, row: str) -> None:
    """Simulate one row, named as `sliding 180s`, `fixed 12h` or `lru 4096`, and compare all that is known."""
    kind, value = row.split()
    size, requests, reference = loaded(name)
    tally = Simulator(
        block_tokens=size,
        ttl_seconds=math.inf if kind == "lru" or value == "inf" else parse_seconds(value),
        ttl_mode=TtlMode.FIXED if kind == "fixed" else TtlMode.SLIDING,
        capacity_blocks=int(value) if kind == "lru" else 0,
    ).run(requests)
    rates, where = tally.rates(), f"{name}, {row}"
    assert (tally.requests, tally.input_tokens) == (reference["requests"], reference["input_tokens"])
    if kind == "fixed":
        assert rates["token_hit_rate"] == pytest.approx(reference["ttl_fixed"][value], abs=CLOSE), where
        return
    known = reference["lru"][value] if kind == "lru" else reference["ttl_sliding"][value]
    assert rates["token_hit_rate"] == pytest.approx(known["tok"], abs=CLOSE), where
    assert rates["token_hit_rate_half"] == pytest.approx(known["half"], abs=CLOSE), where
    assert rates["block_hit_rate"] == pytest.approx(known["blk"], abs=CLOSE), where
    if kind == "sliding":
        assert rates["request_hit_rate"] == pytest.approx(known["req_any"], abs=CLOSE), where
        resident = reference["resident"][value]
        assert tally.resident_blocks_peak == resident["peak_blocks"], where
        assert tally.resident_blocks_mean == pytest.approx(resident["mean_blocks"], rel=1e-5), where


@pytest.mark.parametrize("row", ["sliding 10min", "lru 4096"])
def test_agents(row: str) -> None:
    check(SMALL, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row"),
    [
        (SMALL, "fixed 180s"),
        (SMALL, "lru 256"),
        (CONVERSATION, "sliding 180s"),
        (CONVERSATION, "fixed 10min"),
        (CONVERSATION, "lru 2048"),
        (SYNTHETIC, "sliding 60s"),
        (SYNTHETIC, "lru 8192"),
        (SYNTHETIC, "lru 64"),
    ],
)
def test_chat_and_agents(name: str, row: str) -> None:
    check(name, row)


@pytest.mark.slow
def test_time_and_room_together_are_never_better_than_either() -> None:
    size, requests, reference = loaded(SYNTHETIC)
    both = Simulator(block_tokens=size, ttl_seconds=60.0, capacity_blocks=8192).run(requests)
    rate = both.rates()["token_hit_rate"]
    assert rate <= min(reference["ttl_sliding"]["60s"]["tok"], reference["lru"]["8192"]["tok"])
    assert both.resident_blocks_peak <= 8192


@pytest.mark.long
@pytest.mark.parametrize(
    "row", ["sliding 180s", "sliding 12h", "fixed 12h", "fixed 1d", "lru 61119", "lru 65536", "lru 1048576"]
)
def test_many_agents(row: str) -> None:
    check(DEV, row)


@pytest.mark.long
@pytest.mark.parametrize("name", [SMALL, CONVERSATION, SYNTHETIC])
def test_every_row(name: str) -> None:
    reference = loaded(name)[2]
    for kind, rows in (("sliding", "ttl_sliding"), ("fixed", "ttl_fixed"), ("lru", "lru")):
        for value in reference[rows]:
            check(name, f"{kind} {value}")
