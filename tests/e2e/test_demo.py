"""The demo shows what it claims, in numbers that a program can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.demo_ideal import ModelSizes
from kvstore.cli.demo_story import ACTS, Outcome, Turn

SMOLLM2 = ModelSizes(
    layers=30, heads=9, head_dim=64, layer_parameters=106_202_880, head_parameters=28_311_552
)


@pytest.mark.parametrize(("tokens", "speed_up"), [(1024, 22), (2048, 20), (4096, 18)])
def test_the_ideal_counts_attention_to_the_prefix(tokens: int, speed_up: int) -> None:
    assert round(SMOLLM2.speed_up(tokens=tokens, known=int(0.96 * tokens))) == speed_up


def test_nothing_known_is_no_gain() -> None:
    assert SMOLLM2.speed_up(tokens=1000, known=0) == 1.0


def turn(number: int, *, ids: list[int], tiers: dict[str, int]) -> Turn:
    stored = {"ids": ids, "tiers": tiers, "first_token_seconds": 0.5, "hit_tokens": 96, "prompt_tokens": 100}
    return Turn(
        act=ACTS[number - 1],
        plain={"ids": [1, 2], "first_token_seconds": 5.0},
        stored=stored,
        ideal_speed_up=20.0,
    )


def test_a_demo_without_its_hits_or_with_other_answers_is_not_fine() -> None:
    good = [
        turn(1, ids=[1, 2], tiers={}),
        turn(2, ids=[1, 2], tiers={"host": 3}),
        turn(3, ids=[1, 2], tiers={"ssd": 3}),
    ]
    assert Outcome(turns=good).is_fine
    assert good[1].speed_up == 10.0
    assert not Outcome(turns=[*good[:2], turn(3, ids=[1, 2], tiers={})]).is_fine
    assert not Outcome(turns=[*good[:2], turn(3, ids=[1, 9], tiers={"ssd": 3})]).is_fine
    assert not Outcome(turns=good[:2]).is_fine


def run_demo(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli.main", "demo", *options]
    environment = os.environ | {"KVSTORE_ADDRESS": "unix:/nonexistent/not-the-demo.sock"}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=cache, timeout=280
    )


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_as_a_program_reads_it(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--tokens", "600", "--json", "-")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["identical"] is True
    assert [t["identical"] for t in report["turns"]] == [True] * 3
    cold, host, ssd = report["turns"]
    assert cold["hit_tokens"] == 0
    assert list(host["tiers"]) == ["host"]
    assert "ssd" in ssd["tiers"]
    assert min(host["hit_share"], ssd["hit_share"]) > 0.85
    assert [at["moment"] for at in report["residency"]] == ["after turn 1", "after turn 2", "after the restart", "after turn 3"]
    assert report["residency"][2]["host_blocks"] == 0
    assert report["residency"][2]["ssd_blocks"] == report["residency"][2]["blocks"] > 0


def test_a_length_that_the_model_cannot_read_is_misuse(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--tokens", "90000")
    assert done.returncode == 2
    assert "256..7000" in done.stderr
