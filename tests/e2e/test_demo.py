"""The demo shows what it claims, in numbers that a program can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstore.cli.demo_ideal import ModelSizes
from kvstore.cli.demo_report import sheet
from kvstore.cli.demo_story import ACTS, Outcome, Residency, Turn
from kvstore.cli.demo_text import conversation

SMOLLM2 = ModelSizes(
    layers=30, heads=9, head_dim=64, layer_parameters=106_202_880, head_parameters=28_311_552
)


@pytest.mark.parametrize(("tokens", "speed_up"), [(1024, 22), (2048, 20), (4096, 18)])
def test_the_ideal_counts_attention_to_the_prefix(tokens: int, speed_up: int) -> None:
    assert round(SMOLLM2.speed_up(tokens=tokens, known=int(0.96 * tokens))) == speed_up


def test_nothing_known_is_no_gain() -> None:
    assert SMOLLM2.speed_up(tokens=1000, known=0) == 1.0


def turn(number: int, *, ids: list[int], tiers: dict[str, int]) -> Turn:
    stored = {
        "ids": ids,
        "text": "so it says",
        "tiers": tiers,
        "reason": None,
        "unsaved_reason": None,
        "first_token_seconds": 0.5,
        "hit_tokens": 96 if tiers else 0,
        "prompt_tokens": 100,
    }
    plain = {"ids": [1, 2], "text": "so it must", "first_token_seconds": 5.0}
    return Turn(act=ACTS[number - 1], plain=plain, stored=stored, ideal_speed_up=20.0)


GOOD = [
    turn(1, ids=[1, 2], tiers={}),
    turn(2, ids=[1, 2], tiers={"host": 3}),
    turn(3, ids=[1, 2], tiers={"ssd": 3}),
]
NOT_FROM_SSD = [*GOOD[:2], turn(3, ids=[1, 2], tiers={})]
OTHER_ANSWER = [*GOOD[:2], turn(3, ids=[1, 9], tiers={"ssd": 3})]


def printed(outcome: Outcome, *, dtype: str = "float32") -> str:
    screen = Console(width=80, file=StringIO())
    with screen.capture() as captured:
        screen.print(sheet(outcome, dtype=dtype).drawn())
    return " ".join(captured.get().split())  # wherever a line was folded


def test_a_demo_without_its_hits_or_with_other_answers_is_not_fine() -> None:
    assert Outcome(turns=GOOD).is_fine
    assert GOOD[1].speed_up == 10.0
    assert not Outcome(turns=NOT_FROM_SSD).is_fine
    assert not Outcome(turns=OTHER_ANSWER).is_fine
    assert not Outcome(turns=GOOD[:2]).is_fine


def test_the_report_fits_a_narrow_screen_and_says_what_matters() -> None:
    outcome = Outcome(turns=GOOD)
    outcome.residencies.append(
        Residency(
            moment="after turn 1",
            blocks=3,
            host_blocks=3,
            ssd_blocks=3,
            bytes=3 << 20,
            retention_class="agent",
            expires_in_seconds=3 * 86400.0 - 2,
        )
    )
    text = printed(outcome)
    for expected in (
        "host: 3",
        "ssd: 3",
        "96.0 %",
        "10.0x",
        "20.0x",
        "3.0 MiB",
        "agent",
        "3 d",
        "identical: yes",
    ):
        assert expected in text
    assert "without the store:" not in text


def test_the_report_says_what_went_wrong() -> None:
    missing = printed(Outcome(turns=NOT_FROM_SSD))
    assert "turn 3: expected blocks from ssd, got none" in missing
    assert "hits are missing" in missing
    other = printed(Outcome(turns=OTHER_ANSWER), dtype="bfloat16")
    assert "identical: no" in other
    assert "turn 3 answered otherwise" in other
    assert "so it must" in other
    assert "bfloat16 rounds differently" in other


def test_the_report_admits_that_times_of_a_busy_machine_say_little() -> None:
    assert "times say little" in printed(Outcome(turns=GOOD, load_average=1000.0))
    assert "times say little" not in printed(Outcome(turns=GOOD, load_average=0.5))


def test_the_conversation_is_the_same_every_time_and_grows_by_its_answers() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    chat = conversation(encode, tokens=4000)
    assert chat == conversation(encode, tokens=4000)
    following = chat.next_prompt(chat.opening, (7, 8), turn=1)
    assert following[: len(chat.opening) + 3] == (*chat.opening, 7, 8, chat.end)
    assert following == chat.next_prompt(chat.opening, (7, 8, chat.end), turn=1)


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
    done = run_demo(tmp_path, "--tokens", "256", "--json", "-")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["identical"] is True
    assert [t["identical"] for t in report["turns"]] == [True] * 3
    cold, host, ssd = report["turns"]
    assert cold["hit_tokens"] == 0
    assert list(host["tiers"]) == ["host"]
    assert "ssd" in ssd["tiers"]
    assert min(host["hit_share"], ssd["hit_share"]) > 0.7
    assert [at["moment"] for at in report["residency"]] == [
        "after turn 1",
        "after turn 2",
        "after the restart",
        "after turn 3",
    ]
    assert report["residency"][2]["host_blocks"] == 0
    assert report["residency"][2]["ssd_blocks"] == report["residency"][2]["blocks"] > 0


def test_a_length_that_the_model_cannot_read_is_misuse(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--tokens", "90000")
    assert done.returncode == 2
    assert "256..7000" in done.stderr
