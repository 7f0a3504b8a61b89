"""The torture in short: a few kills under load, nothing wrong, nothing lost; `make torture` is long."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from kvstore.api import OutcomeRun
from kvstore.types import PutOutcome
from tests.torture.plan import KILLS, plan
from tests.torture.supervisor import Torture
from tests.torture.worker import durable_blocks


def test_the_same_seed_gives_the_same_plan() -> None:
    first, second = ([*islice(plan(seed), 200)] for seed in (7, 7))
    assert first == second
    assert [*islice(plan(8), 200)] != first
    assert Counter(step.blow for step in first).keys() >= KILLS


def test_without_kills_the_daemon_lives_on() -> None:
    assert not KILLS & {step.blow for step in islice(plan(1, kills=False), 200)}


def test_what_is_promised_ends_where_another_put_begins() -> None:
    outcomes = (PutOutcome.DUPLICATE, 4), (PutOutcome.STORED_SSD, 3), (PutOutcome.IN_FLIGHT, 2)
    runs = (*(OutcomeRun(*each) for each in outcomes), OutcomeRun(PutOutcome.STORED_SSD, 5))
    assert durable_blocks(runs) == 7
    assert durable_blocks(runs[2:]) == 0
    assert durable_blocks(runs[:1]) == 0


def test_a_flood_does_not_starve_a_quiet_client() -> None:
    with Torture(seed=12, clients=0) as torture:
        torture.flood(seconds=0.5, sessions=8)
        summary = torture.summary
    assert summary.is_clean, (summary.faults, summary.line())
    assert summary.flooded is not None
    assert summary.flooded.matches > 10, summary.line()


@pytest.mark.slow
def test_a_few_kills_under_load() -> None:
    with Torture(seed=11) as torture:
        summary = torture.run(seconds=60.0, kills_max=2)
    assert summary.is_clean, (summary.faults, summary.line())
    assert summary.kills >= 2
    assert summary.counts["hits"], summary.line()
    assert summary.acked, summary.line()
