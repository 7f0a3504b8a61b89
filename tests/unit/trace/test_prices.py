"""Prices and bills."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument
from kvstore.trace.prices import MONTH_SECONDS, Prices, read_prices

PRICES = Prices(
    gpu_hour=2.0,
    prefill_tokens_per_gpu_second=1000.0,
    ssd_gib_month=0.1,
    ssd_gib_bought=0.2,
    input_token_million=1.0,
    input_token_cached_million=0.1,
)


def test_a_bill_adds_up() -> None:
    month = PRICES.bill(
        input_tokens=10_000_000_000, hit_tokens=8_200_000_000, seconds=MONTH_SECONDS, ssd_bytes=100 * 2**30
    )
    assert month.gpu_hours == pytest.approx(500)
    assert month.gpu_cost == pytest.approx(1000)
    assert month.storage_cost == pytest.approx(10)
    assert month.revenue == pytest.approx(1800 + 820)
    assert month.margin == pytest.approx((2620 - 1010) / 2620)
    assert month.revenue_per_gpu_hour == pytest.approx(2620 / 500)
    assert month.cost_per_gpu_hour == pytest.approx(1010 / 500)
    saved = 8_200_000_000 / 1000 / 3600 * 2 - 10
    assert month.payback_seconds == pytest.approx(20 / saved * MONTH_SECONDS)


def test_storage_that_saves_less_than_it_costs_never_pays_back() -> None:
    bill = PRICES.bill(input_tokens=1000, hit_tokens=10, seconds=MONTH_SECONDS, ssd_bytes=2**40)
    assert math.isinf(bill.payback_seconds)


def test_prices_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("gpu_hour = 2\nprefill_tokens_per_gpu_second = 60_000\nssd_gib_month = 0.05\n")
    assert read_prices(path) == Prices(
        gpu_hour=2.0, prefill_tokens_per_gpu_second=60000.0, ssd_gib_month=0.05
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_hour = 2", "prefill_tokens_per_gpu_second must be given"),
        ("gpu_hours = 2", "'gpu_hours' is unknown; known: gpu_hour"),
        ("gpu_hour = -2", "gpu_hour must be a number >= 0, got -2"),
        ("gpu_hour = true", "gpu_hour must be a number"),
        ("gpu_hour = nan", "gpu_hour must be a number"),
        ("gpu_hour 2", "no TOML"),
    ],
)
def test_bad_prices_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_prices(path)
    with pytest.raises(InvalidArgument, match="No such file"):
        read_prices(tmp_path / "absent.toml")
