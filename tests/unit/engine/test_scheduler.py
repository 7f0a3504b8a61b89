"""Chunks by cost: they fill a time, end on blocks, and are worth the weights that a step reads."""

from __future__ import annotations

import pytest

from kvstore.engine.costs import StepCosts
from kvstore.engine.request import Request
from kvstore.engine.running import Running
from kvstore.engine.scheduler import Budget, Planned, plan

COSTS = StepCosts(step=0.1, row=0.001, seen=1e-6)
BUDGET = Budget(busy_seconds=0.3, idle_seconds=2.0)
BLOCK = 16


def sequence(prompt: int, *, computed: int = 0, generated: int = 0) -> Running:
    one = Running(Request(prompt=tuple(range(prompt)), max_new_tokens=8), list(range(prompt)), 0.0, print)
    one.ids += range(generated)
    one.computed = computed
    return one


def spans(
    *sequences: Running, costs: StepCosts = COSTS, flying: tuple[Planned, ...] = ()
) -> list[tuple[int, int]]:
    planned = plan(sequences, costs, BUDGET, block_tokens=BLOCK, flying=flying)
    return [(span.first, span.count) for span in planned]


def test_a_chunk_takes_the_time_that_there_is() -> None:
    ((first, count),) = spans(sequence(4000))
    assert (first, count % BLOCK) == (0, 0)
    assert COSTS.seconds([(0, count)]) <= BUDGET.idle_seconds < COSTS.seconds([(0, count + BLOCK)])
    assert spans(sequence(100)) == [(0, 100)]


def test_who_decodes_comes_first_and_makes_chunks_short() -> None:
    first, chunk = spans(sequence(4000), sequence(50, computed=50, generated=1))
    assert first == (50, 1)
    assert chunk[0] == 0
    assert 0 < COSTS.seconds([first, chunk]) <= BUDGET.busy_seconds


def test_nobody_starves() -> None:
    slow = StepCosts(step=0.1, row=1.0, seen=0.0)
    assert spans(sequence(100, computed=10), sequence(50, computed=50, generated=1), costs=slow) == [
        (50, 1),
        (10, 6),
    ]


def test_a_step_is_worth_the_weights_that_it_reads() -> None:
    heavy = StepCosts(step=1.0, row=0.01, seen=0.0)
    ((_, count),) = spans(sequence(4000), costs=heavy)
    assert count == pytest.approx(900, abs=BLOCK)


def test_the_step_behind_one_under_way_goes_on_where_it_will_end() -> None:
    one, other = sequence(4000), sequence(50, computed=50, generated=1)
    flying = (Planned(other, 50, 1), Planned(one, 0, 160))
    assert spans(one, other, flying=flying)[0] == (51, 1)
    assert spans(one, other, flying=flying)[1][0] == 160
    last = sequence(50, computed=57, generated=7)
    assert spans(last, flying=(Planned(last, 56, 1),)) == [], "its eighth token is the last"
    assert not Planned(one, 160, 10).holds, "it has not come so far"


def test_a_chunk_ends_where_an_equal_prompt_will_go_on() -> None:
    one = sequence(100)
    one.resumable = 80
    assert spans(one) == [(0, 80)]
    one.computed = 80
    assert spans(one) == [(80, 20)]
