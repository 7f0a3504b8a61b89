"""`kvstore simulate`: the machine form, the table, and what is told of bad traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.main import run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 12, "output_length": 1, "hash_ids": [1, 2, 3], "block_size": 4},
        {"timestamp": 2000, "input_length": 13, "output_length": 1, "hash_ids": [1, 2, 9]},
        {"timestamp": 9000, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_machine_form(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(trace), "--ttl", "3s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["requests"], document["input_tokens"], document["hit_tokens"]) == (3, 33, 8)
    assert document["block_hit_rate"] == pytest.approx(2 / 8)
    assert document["resident_blocks_peak"] == 4
    assert document["ttl_seconds"] == 3.0


def test_the_table_says_what_the_trace_cannot_show(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(trace), "--ttl", "3d"]) == 0
    shown = capsys.readouterr().out
    assert "48.485%" in shown
    assert "cannot show reuse beyond" in shown


def test_bad_lines_are_told_and_end_a_strict_run(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text() + "{broken\n")
    assert run(["simulate", str(trace)]) == 0
    assert "trace.jsonl:4: skipped" in capsys.readouterr().err
    assert run(["simulate", str(trace), "--strict"]) == 1


@pytest.mark.parametrize("ttl", ["soon", "0s", "-1s"])
def test_a_bad_ttl_is_one_clear_line(trace: Path, ttl: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(trace), f"--ttl={ttl}"]) == 2
    assert f"--ttl {ttl}" in capsys.readouterr().err
