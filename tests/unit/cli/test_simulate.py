"""`kvstore simulate`: the machine form, the table, and what is told of bad traces."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import run
from kvstore.trace.streams import standard_input


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


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What a run of the command says to programs."""
    assert run(["simulate", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Chat that comes back after 100 s, and files that come back after 50 s."""
    path = tmp_path / "mixed.jsonl"
    shared = {"parent_chat_id": -1, "output_length": 1, "input_length": 32, "turn": 1}
    lines = [
        shared | {"chat_id": i, "timestamp": t, "type": kind, "hash_ids": ids}
        for i, (t, kind, ids) in enumerate(
            [(0.0, "text", [1, 2]), (1.5, "file", [8, 9]), (51.5, "file", [8, 9]), (100.0, "text", [1, 2])]
        )
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_classes_have_their_own_lives(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = ["--class-rule", "batch: type=file", "--class-rule", "chat: type=text"]
    found = document(capsys, str(mixed), *rules, "--ttl", "batch=49s", "--ttl", "100s")
    rows = {row["class"]: row for row in found["classes"]}
    assert (rows["chat"]["hit_tokens"], rows["batch"]["hit_tokens"]) == (32, 0)
    assert rows["agent"]["requests"] == 0
    found = document(capsys, str(mixed), *rules, "--ttl", "batch=50s", "--ttl", "chat=1s")
    rows = {row["class"]: row for row in found["classes"]}
    assert (rows["chat"]["hit_tokens"], rows["batch"]["hit_tokens"]) == (0, 32)
    # What no option says is what the daemon ships.
    assert rows["agent"]["ttl_seconds"] == 3 * 86400


def test_a_warm_up_is_left_out_of_the_counts(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for warm_up in ("50%", "50s"):
        found = document(capsys, str(mixed), "--warm-up", warm_up)
        assert (found["warm_up_requests"], found["requests"]) == (2, 2)
        assert (found["input_tokens"], found["hit_tokens"], found["duration_seconds"]) == (64, 64, 48.5)
    assert run(["simulate", str(mixed), "--warm-up", "100%"]) == 2
    assert "--warm-up 100%" in capsys.readouterr().err


def test_tiers_are_told_apart(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--bytes-per-token", "2048", "--segment-bytes", "4MiB"]
    found = document(capsys, str(mixed), *sizes, "--host-capacity", "3", "--ssd-capacity", "64MiB")
    # Host memory holds three of four blocks: the oldest tail is read back from SSD, and what that evicts too.
    assert found["token_hit_rate"] == 0.5
    assert found["hit_tokens_by_tier"]["ssd"] > 0
    assert sum(found["hit_tokens_by_tier"].values()) == found["hit_tokens"] == 64
    assert found["written_bytes"] == 2 * (4096 + 2 * 36864)
    assert found["ssd_bytes_peak"] == found["written_bytes"]


def test_money(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        "gpu_hour = 3.6\nprefill_tokens_per_gpu_second = 2\ninput_token_million = 1e6\n"
        "input_token_cached_million = 1e5\nhost_gib_month = 2592000\n"
    )
    found = document(capsys, str(mixed), "--prices", str(prices), "--bytes-per-token", str(1 << 20))
    bill = found["bill"]
    assert bill["gpu_hours_saved"] == pytest.approx(32 / 3600)
    assert bill["gpu_cost_saved"] == pytest.approx(3.6 * 32 / 3600)
    assert bill["revenue"] == pytest.approx(64 + 0.1 * 64)
    assert bill["storage_cost"] == pytest.approx(4 * 16 / 1024 * 100)
    assert run(["simulate", str(mixed), "--prices", str(prices)]) == 2
    assert "--bytes-per-token" in capsys.readouterr().err


def test_standard_input(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    standard_input.cache_clear()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(trace.read_bytes())))
    assert document(capsys, "-", "--ttl", "3s")["hit_tokens"] == 8
    standard_input.cache_clear()


def test_a_trace_without_times_has_no_ttl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    line = {"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128}
    path.write_text(2 * (json.dumps(line) + "\n"))
    assert document(capsys, str(path))["token_hit_rate"] == 0.5
    assert run(["simulate", str(path), "--ttl", "1h"]) == 2
    assert "no timestamps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacity-blocks", "4", "--host-capacity", "4"], "one of the two"),
        (["--host-capacity", "4GiB"], "--bytes-per-token"),
        (["--host-capacity", "some"], "expected blocks"),
        (["--ssd-capacity", "4TiB", "--bytes-per-token", "9"], "--host-capacity is needed"),
        (["--ssd-capacity", "1MiB", "--bytes-per-token", "9", "--host-capacity", "4"], "four segments"),
        (["--class-rule", "mine: type=text"], "--ttl mine="),
        (["--class-rule", "mine"], "class rule 'mine'"),
        (["--format", "csv"], "--format"),
    ],
)
def test_misuse_is_one_clear_line(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run(["simulate", str(trace), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("ttl", ["soon", "0s", "-1s"])
def test_a_bad_ttl_is_one_clear_line(trace: Path, ttl: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(trace), f"--ttl={ttl}"]) == 2
    assert f"--ttl {ttl}" in capsys.readouterr().err
