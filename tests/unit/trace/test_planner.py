"""The sweep and the knee."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvstore.cli.main import run
from kvstore.trace.planner import Point, knee_of, ttls_within


def series(*pairs: tuple[float, float]) -> list[Point]:
    """Points of (hit rate in per cent, resident blocks)."""
    return [
        Point(60.0 * 2**i, 0, rate / 100, rate / 100, blocks, int(blocks))
        for i, (rate, blocks) in enumerate(pairs)
    ]


def test_the_knee_is_the_last_step_that_was_worth_its_bytes() -> None:
    assert (
        knee_of(series((78.3, 13_227), (89.2, 21_159), (95.3, 63_797), (95.9, 98_844), (96.2, 285_911))) == 3
    )
    assert knee_of(series((50, 100), (50.1, 200), (50.2, 400))) == 0


def test_a_scale_that_was_worth_it_to_its_end_has_no_knee() -> None:
    assert knee_of(series((10, 100), (20, 200), (30, 400))) is None
    assert knee_of(series((10, 100))) is None


def test_a_trace_is_not_asked_what_it_cannot_show() -> None:
    assert ttls_within(400.0) == (60.0, 180.0, 300.0, math.inf)


def trace(path: Path) -> Path:
    """A session that comes back after 30 s, one after 200 s."""
    lines = [
        {"timestamp": t * 1000, "input_length": 8, "output_length": 1, "hash_ids": ids, "block_size": 4}
        for t, ids in ((0, [1, 2]), (30, [1, 2]), (50, [5, 6]), (250, [5, 6]), (700, [7, 8]))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_plan_sweeps_and_says_the_same_as_single_simulations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path / "t.jsonl")
    assert (
        run(["plan", str(path), "--ttl", "60s,5m,inf", "--capacity-blocks", "0,2", "--jobs", "1", "--json"])
        == 0
    )
    points = json.loads(capsys.readouterr().out)["points"]
    assert [(p["capacity_blocks"], p["token_hit_rate"]) for p in points[:3]] == [(0, 0.2), (0, 0.4), (0, 0.4)]
    assert [p["token_hit_rate"] for p in points[3:]] == [0.2, 0.4, 0.4]
    for ttl, point in zip(("60s", "5m", "inf"), points, strict=False):
        assert run(["simulate", str(path), "--ttl", ttl, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["hit_tokens"] == round(point["token_hit_rate"] * 40)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    path, picture = trace(tmp_path / "t.jsonl"), tmp_path / "plan.svg"
    assert run(["plan", str(path), "--jobs", "1", "--bytes-per-token", "1024", "--plot", str(picture)]) == 0
    assert "<svg" in picture.read_text()[:400]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ttl", "60s,-1s"], "--ttl -1s"),
        (["--capacity-blocks", "many"], "--capacity-blocks many"),
        (["--plot", "plan.bmp"], "must end in .png"),
    ],
)
def test_misuse_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run(["plan", str(trace(tmp_path / "t.jsonl")), "--jobs", "1", *options]) == 2
    assert message in capsys.readouterr().err
