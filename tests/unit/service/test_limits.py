"""Buckets, places and budgets: what fits passes, what does not is told what, limit and got."""

from __future__ import annotations

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import Overloaded
from kvstore.service.limits import Bucket, Budget, Places


def passes(bucket: Bucket) -> bool:
    try:
        bucket.take()
    except Overloaded:
        return False
    return True


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    clock = ManualClock()
    bucket = Bucket("token", per_second=10, clock=clock)
    assert sum(passes(bucket) for _ in range(100)) == 20
    clock.advance(0.5)
    assert sum(passes(bucket) for _ in range(100)) == 5
    clock.advance(1000)
    assert sum(passes(bucket) for _ in range(100)) == 20


def test_a_bucket_says_what_limit_got_and_when() -> None:
    bucket = Bucket("token", per_second=2, clock=ManualClock())
    for _ in range(4):
        bucket.take()
    with pytest.raises(
        Overloaded, match="token: the limit is 2 requests a second, got 5 within the last one"
    ) as caught:
        bucket.take()
    assert caught.value.retry_after_ms == 500


def test_what_ends_work_is_counted_and_passes() -> None:
    clock = ManualClock()
    bucket = Bucket("token", per_second=2, clock=clock)
    for _ in range(1000):
        bucket.take(may_refuse=False)
    assert not passes(bucket)
    clock.advance(3)
    assert passes(bucket)


def test_no_rate_is_no_limit() -> None:
    bucket = Bucket("token", per_second=0, clock=ManualClock())
    assert all(passes(bucket) for _ in range(1000))


def test_places_are_counted_by_key_and_come_back() -> None:
    places = Places("streams", each_max=2)
    with places.place("a"), places.place("a"), places.place("b"):
        with pytest.raises(Overloaded, match="streams: the limit is 2 at a time, got one more"):
            places.place("a").__enter__()
        assert len(places) == 3
    assert len(places) == 0
    with places.place("a"):
        assert len(places) == 1


def test_a_budget_is_given_back() -> None:
    budget = Budget("framed puts", bytes_max=100)
    with budget.holding(60):
        budget.take(40)
        with pytest.raises(Overloaded, match="the limit is 100 bytes at a time, 100 are held, got 1 more"):
            budget.take(1)
        budget.give(40)
    assert budget.held == 0
