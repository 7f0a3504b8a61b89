"""The command table: help is light, misuse and trouble are one line and the right exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.cli.main import COMMANDS, run
from kvstore.errors import SettingsError

HEAVY = ("torch", "transformers", "lmdb", "grpc", "numpy", "pydantic")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_no_arguments_mean_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "Usage: kvstore" in capsys.readouterr().out


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kvstore.cli.main import run; run(['--help']); "
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "command", ["status", "inspect", "verify", "doctor", "bench", "simulate", "plan", "serve", "config"]
)
def test_each_command_has_help_and_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: kvstore {command}" in shown
    if command == "inspect":
        assert run(["inspect", "blocks", "--help"]) == 0
        shown = capsys.readouterr().out
    assert "Examples:" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["inspect"],
        ["inspect", "blocks"],
        ["inspect", "blocks", "--hash", "xyz", "--tokens", "-"],
        ["bench", "nonsense"],
        ["bench", "--rounds", "0"],
        ["bench", "host", "--directory", "/nonexistent"],
    ],
)
def test_misuse_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvstore: ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["status"], ["inspect", "namespaces"], ["inspect", "segments"], ["verify"]]
)
def test_no_daemon_says_how_to_start_one(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments, "--address", "unix:/nonexistent/kvstore.sock"]) == 1
    shown = capsys.readouterr()
    assert "unix:/nonexistent/kvstore.sock" in shown.err
    assert "`kvstore serve`" in shown.err
    assert shown.err.count("\n") == 1


def test_each_fault_has_its_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> int:
        raise SettingsError("one\ntwo")

    monkeypatch.setattr("kvstore.cli.main.app", refuse)
    assert run(["status"]) == 2
    assert capsys.readouterr().err == "kvstore: one\nkvstore: two\n"


def test_an_interrupt_has_its_own_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvstore.cli.main.app", interrupt)
    assert run(["status"]) == 130
    assert capsys.readouterr().err == "kvstore: interrupted\n"
