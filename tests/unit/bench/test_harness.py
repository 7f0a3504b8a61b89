"""The instrument: turns alternate, ratios point the right way, a row that fails says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.bench import rows
from kvstore.bench.groups import GROUPS, Group
from kvstore.bench.harness import Bench, Timings
from kvstore.bench.rows import Row
from kvstore.cli.bench import choose, measure
from kvstore.errors import InvalidArgument, TierUnavailable


def bench(tmp_path: Path, *, rounds: int = 4, said: list[str] | None = None) -> Bench:
    told = said if said is not None else []
    return Bench(rounds=rounds, is_quick=True, directory=tmp_path, shared_memory=tmp_path, tell=told.append)


def test_turns_alternate_and_warm_up_does_not_count(tmp_path: Path) -> None:
    order: list[str] = []

    def action(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    timings = bench(tmp_path).alternate(
        "row", warm_up=2, a=lambda: action("a", 1.0), b=lambda: action("b", 2.0)
    )
    assert timings.seconds == {"a": [1.0] * 4, "b": [2.0] * 4}
    turns = ["".join(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert turns == ["ba", "ab"] * 3


def test_progress_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    bench(tmp_path, rounds=2, said=said).alternate("row", warm_up=1, a=lambda: 1.0)
    assert said == ["row, round 0 of 2", "row, round 1 of 2", "row, round 2 of 2"]


def test_a_ratio_of_medians_points_the_right_way() -> None:
    timings = Timings({"thing": [2.0, 2.0, 9.0], "base": [1.0, 1.0, 1.0]})
    assert timings.row(rows.HOST_HIT, "thing", "base").value == 0.5
    assert timings.row(rows.MATCH_600, "thing", "base").value == 2.0


def test_bars() -> None:
    assert Row(rows.HOST_HIT, 0.9, "").reaches_bar is True
    assert Row(rows.HOST_HIT, 0.89, "").reaches_bar is False
    assert Row(rows.MATCH_600, 1.5, "").reaches_bar is True
    assert Row(rows.MATCH_600, 1.6, "").reaches_bar is False
    assert Row(rows.HOST_HIT, None, "no fio").reaches_bar is None
    assert Row(rows.SSD_READ, 0.8, "", bar=0.9).reaches_bar is False


def test_a_row_has_the_fields_of_the_contract() -> None:
    plain = Row(rows.MATCH_600, 1.25, "detail").to_plain()
    assert plain == {
        "name": "match_600",
        "value": 1.25,
        "better": "lower",
        "bar": 1.5,
        "baseline": rows.EMPTY_RPC,
        "unit": "ratio",
        "detail": "detail",
    }


def test_groups_are_chosen_by_name_once() -> None:
    assert [group.name for group in choose(["put", "host", "put"])] == ["put", "host"]
    with pytest.raises(InvalidArgument, match=r"'nope'; there is: host, put, steps, ssd, encryption, match"):
        choose(["host", "nope"])


def test_each_row_belongs_to_one_group() -> None:
    names = [spec.name for group in GROUPS.values() for spec in group.rows]
    assert len(names) == len(set(names))


def test_rows_that_a_failure_left_out_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Group, context: Bench) -> Iterator[Row]:
        yield Row(self.rows[0], 1.0, "")
        raise TierUnavailable("the disk is gone")

    monkeypatch.setattr(Group, "run", run)
    taken: list[Row] = []
    measure(GROUPS["host"], bench(tmp_path), taken.append)
    assert [row.value for row in taken] == [1.0, None, None]
    assert taken[-1].detail == "not measured: the disk is gone"
