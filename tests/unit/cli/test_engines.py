"""`doctor --engine`: what it makes of an interpreter that lacks kvstore, breaks, or knows no such engine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import typer

from kvstore.cli.engines import examine_engine
from kvstore.finding import Finding, Level

NOBODY = "unix:/nonexistent/kvstore.sock"


def python_that(directory: Path, script: str) -> Path:
    """Return an executable in the place of an engine's interpreter."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def examined(python: Path) -> Finding:
    (finding,) = examine_engine("vllm", python=python, address=NOBODY)
    assert finding.level is Level.PROBLEM
    assert finding.advice
    return finding


def test_an_interpreter_without_kvstore(tmp_path: Path) -> None:
    python = python_that(tmp_path, "echo \"No module named 'engine_adapters'\" >&2; exit 1")
    assert f"{python} -m pip install tiered-kvstore" in examined(python).advice


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    assert "--python" in examined(tmp_path / "gone").advice


def test_an_engine_that_crashes_takes_nothing_down(tmp_path: Path) -> None:
    finding = examined(python_that(tmp_path, "echo '{half' ; echo 'illegal instruction' >&2; kill -9 $$"))
    assert "ended with -9: illegal instruction" in finding.found


def test_an_unknown_engine_is_misuse(tmp_path: Path) -> None:
    python = python_that(tmp_path, "echo 'usage: x' >&2; echo \"x: error: engine 'y' has none\" >&2; exit 2")
    with pytest.raises(typer.BadParameter, match=r"^engine 'y' has none$"):
        examine_engine("y", python=python, address=NOBODY)


def test_a_token_does_not_show_in_the_list_of_processes(tmp_path: Path) -> None:
    python = python_that(
        tmp_path,
        'case "$*" in *secret*) exit 1;; esac; '
        'echo "{\\"findings\\": [{\\"check\\": \\"c\\", \\"level\\": \\"note\\", '
        '\\"found\\": \\"$KVSTORE_TOKEN\\", \\"advice\\": \\"\\"}]}"',
    )
    (finding,) = examine_engine("vllm", python=python, address=NOBODY, token="secret")
    assert finding.found == "secret"
    assert "KVSTORE_TOKEN" not in os.environ
