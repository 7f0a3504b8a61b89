"""`kvstore drive`: a real daemon serves a trace as the simulator says, and keeps nothing of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.child import ChildDaemon
from kvstore.cli.connection import Daemon
from kvstore.cli.main import run
from kvstore.errors import InvalidArgument
from kvstore.told_clock import TEST_CLOCK_VARIABLE, ToldClock

ARENA_BYTES = 24 << 20


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Growing conversations that fork, some after days, in two classes."""
    rng, now = random.Random(5), 0.0
    sessions: list[list[int]] = []
    lines: list[dict[str, Any]] = []
    for _ in range(400):
        now += rng.choice([0, 0.1, 20, 100, 3600])
        if not sessions or rng.random() < 0.25:
            sessions.append([0, len(sessions) + 1])
        ids = rng.choice(sessions)
        ids += range(1000 * len(lines) + 1000, 1000 * len(lines) + 1000 + rng.randint(1, 12))
        if rng.random() < 0.2:
            sessions.append(ids[: rng.randint(1, len(ids))])
        lines.append({"timestamp": round(1000 * now), "input_length": 16 * len(ids), "hash_ids": list(ids)})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line | {"block_size": 16}) + "\n" for line in lines))
    return path


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ChildDaemon]:
    """A daemon with an SSD tier, as anybody runs it."""
    with ChildDaemon(tmp_path, arena_bytes=ARENA_BYTES) as child:
        yield child


def driven(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """The machine form of a run."""
    assert run(["drive", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "options",
    [
        ["--ttl", "1h", "--capacity-blocks", "1024"],
        pytest.param(["--ttl", "20s"], marks=pytest.mark.slow),
        pytest.param(["--ttl", "100s", "--ttl-mode", "fixed"], marks=pytest.mark.slow),
        pytest.param(
            ["--class-rule", "batch: input_length<600", "--ttl", "batch=1s", "--ttl", "2h"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_on_the_clock_of_the_trace_every_request_hits_as_simulated(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    found = driven(capsys, str(trace), "--exact", *options)
    assert found["requests_that_differ"] == 0
    assert found["measured"] == found["simulated"]
    assert 0.02 < found["measured"]["token_hit_rate"] < 0.98
    if "--capacity-blocks" in options:
        options = [*options[:-1], str(found["capacity_blocks"])]
        assert 1024 <= found["capacity_blocks"] < 2048 < found["stored_blocks"]
    assert run(["simulate", str(trace), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hit_tokens"] == found["measured"]["hit_tokens"]


@pytest.mark.parametrize("clients", [pytest.param(1, marks=pytest.mark.slow), pytest.param(6, id="six")])
def test_in_wall_time_a_daemon_does_as_simulated(
    trace: Path, daemon: ChildDaemon, capsys: pytest.CaptureFixture[str], clients: int
) -> None:
    options = ["--speed", "max", "--clients", str(clients)]
    found = driven(capsys, str(trace), "--address", daemon.address, *options)
    assert found["agrees"]
    assert found["stored_blocks"] > 500
    assert found["refused_blocks"] == 0
    with Daemon(daemon.address) as asked:
        (space,) = (row for row in asked.status()["namespaces"] if row["model"] == "kvstore drive")
    assert space["blocks"] == 0


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(trace: Path, daemon: ChildDaemon) -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "drive", str(trace), "-a", daemon.address]
    # A shell lets what it starts in the background ignore the signal, and so would the child of such a run.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen([*command, "--speed", "0.01x"], stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        with Daemon(daemon.address) as asked:
            while not any(row["blocks"] for row in asked.status()["namespaces"]):
                assert child.poll() is None
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=60)
            assert (child.returncode, said) == (130, "kvstore: interrupted\n")
            assert not any(row["blocks"] for row in asked.status()["namespaces"])
    finally:
        child.kill()
        child.communicate()


def test_nobody_gets_a_told_clock_by_accident(tmp_path: Path) -> None:
    (tmp_path / "clock").write_bytes(bytes(24))
    with pytest.raises(InvalidArgument, match="no clock"):
        ToldClock(tmp_path / "clock")
    command = [sys.executable, "-m", "kvstore.cli.main", "serve", "--address", f"unix:{tmp_path / 'socket'}"]
    environment = {**os.environ, TEST_CLOCK_VARIABLE: str(tmp_path / "none")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert str(tmp_path / "none") in done.stderr


def test_a_told_clock_tells_all_who_map_it(tmp_path: Path) -> None:
    teller = ToldClock.create(tmp_path / "clock")
    reader = ToldClock(tmp_path / "clock")
    before = (reader.wall(), reader.monotonic())
    teller.tell(3.5)
    assert (reader.wall(), reader.monotonic()) == (before[0] + 3.5, before[1] + 3.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speed", "fast"], "--speed fast"),
        (["--speed", "0x"], "must be positive"),
        (["--ttl", "1h"], "without --exact"),
        (["--exact", "--clients", "2"], "one client"),
    ],
)
def test_misuse_is_one_clear_line(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run(["drive", str(trace), *options]) == 2
    assert message in capsys.readouterr().err
