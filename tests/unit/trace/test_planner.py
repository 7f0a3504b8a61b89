"""The sweep and the knee."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import run
from kvstore.trace.planner import Point, knee_of, ttls_within


def series(*pairs: tuple[float, float]) -> list[Point]:
    """Points of (hit rate in per cent, resident blocks)."""
    return [
        Point(60.0 * 2**i, 0, rate / 100, rate / 100, blocks, int(blocks), 100, int(rate))
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


def test_to_climb_out_of_a_dip_is_no_gain() -> None:
    assert knee_of(series((50, 100), (90, 200), (88, 400), (90.1, 500))) == 1


def test_what_a_trace_cannot_show_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path / "t.jsonl")
    assert run(["plan", str(path), "--ttl", "7d", "--jobs", "1"]) == 2
    assert "--ttl 7 d: refused, this trace is 11 min 40 s long" in capsys.readouterr().err
    assert run(["plan", str(path), "--ttl", "60s,7d", "--jobs", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["ttl_seconds"] for point in found["points"]] == [60.0]
    assert "cannot show reuse beyond that" in found["refused"]


def fixed_dip(path: Path) -> Path:
    """With 60 s the parent ends early and is written anew in time; with 100 s it ends when it is needed."""
    lines = [
        {"timestamp": t * 1000, "input_length": 4 * n, "hash_ids": [*range(1, n + 1)], "block_size": 4}
        for t, n in ((0, 1), (50, 10), (70, 2), (109, 10))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_fixed_ttl_is_not_taken_for_monotone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(fixed_dip(tmp_path / "t.jsonl")), "--ttl-mode", "fixed", "--jobs", "1"]
    assert run([*command, "--ttl", "60s,100s,inf", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["hit_tokens"] for point in found["points"]] == [44, 12, 52]
    assert found["dips"] == ["1 min 40 s hits less than 1 min: 13.043% against 47.826%"]
    assert found["ttl_mode"] == "fixed"


def test_prices_say_what_a_ttl_costs_and_earns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, prices = trace(tmp_path / "t.jsonl"), tmp_path / "prices.toml"
    prices.write_text(
        "gpu_hour = 2\nprefill_tokens_per_gpu_second = 0.01\nssd_gib_bought = 1\ninput_token_million = 1000\n"
    )
    command = ["plan", str(path), "--ttl", "60s,inf", "--jobs", "1", "--prices", str(prices)]
    assert run(command) == 2
    assert "--bytes-per-token is needed" in capsys.readouterr().err
    assert run([*command, "--bytes-per-token", "1048576", "--json"]) == 0
    short, endless = (point["bill"] for point in json.loads(capsys.readouterr().out)["points"])
    assert short["gpu_hours"] == pytest.approx(32 / 0.01 / 3600)
    assert endless["gpu_hours_saved"] == pytest.approx(16 / 0.01 / 3600)
    assert endless["storage_bought"] == pytest.approx(6 * 4 * 2**20 / 2**30)
    assert endless["payback_seconds"] == pytest.approx(
        endless["storage_bought"] / (2 * endless["gpu_hours_saved"]) * 700
    )
    assert run([*command, "--bytes-per-token", "1048576"]) == 0
    assert "storage pays back in" in capsys.readouterr().out


def test_policies_are_compared_with_the_best_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path / "t.jsonl")
    command = ["plan", str(path), "--policies", "--capacity-blocks", "2,4", "--jobs", "1"]
    assert run([*command, "--json"]) == 0
    for point in json.loads(capsys.readouterr().out)["points"]:
        assert set(point["token_hit_rates"]) == {"lru", "s3fifo", "density"}
        assert point["optimum_token_hit_rate"] == 0.4 >= max(point["token_hit_rates"].values())
    assert run(command) == 0
    assert "best possible" in capsys.readouterr().out
    assert run(["plan", str(path), "--policies", "--jobs", "1"]) == 2
    assert "--policies needs --capacity-blocks" in capsys.readouterr().err


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


def test_an_order_that_learns_learns_of_each_class_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = turns(tmp_path / "turns.jsonl")
    command = ["plan", str(path), "--policies", "--capacity-blocks", "48", "--jobs", "1", "--json"]
    rates = []
    for more in ([], ["--class-rule", "chat: stop=end_turn"]):
        assert run([*command, *more]) == 0
        (point,) = json.loads(capsys.readouterr().out)["points"]
        rates.append(point["token_hit_rates"])
    alike, apart = rates
    assert apart["lru"] == alike["lru"]
    assert apart["density"] > alike["density"] + 0.02
    assert run(["plan", str(path), "--class-rule", "chat: stop=end_turn"]) == 2
    assert "add --policies" in capsys.readouterr().err


def turns(path: Path) -> Path:
    """Sessions side by side, each at another point of a turn of any length; after its end none comes back."""
    lines: list[dict[str, Any]] = []
    rng = random.Random(1)
    for session in range(100):
        ids = [1000 * session + block for block in range(1, 9)]
        steps = rng.randint(1, 9)
        for step in range(steps):
            line = {"timestamp": 1000 * (3 * session + 7 * step), "hash_ids": ids, "output_length": 1}
            stop = "end_turn" if step == steps - 1 else "tool_use"
            lines.append(line | {"input_length": 512 * len(ids), "stop": stop})
    lines.sort(key=lambda line: line["timestamp"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
