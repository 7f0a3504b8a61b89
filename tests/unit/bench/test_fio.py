"""fio as a baseline: what it is asked, what its answer means, and what a machine without it gets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import pytest

from kvstore.bench import fio, ssd
from kvstore.bench.harness import Bench
from kvstore.bench.local_tier import LocalTier
from kvstore.errors import TierUnavailable


def install(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program named fio first on the path."""
    program = directory / "fio"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


def test_it_reads_the_files_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"jobs": [{"read": {"bw_bytes": 2.5e9}}]})
    install(tmp_path, f"echo \"$@\" > {tmp_path}/asked\necho note: hello\necho '{answer}'", monkeypatch)
    speed = fio.read_bytes_per_second([Path("/a"), Path("/b")], window_seconds=0.5)
    assert speed == 2.5e9
    asked = (tmp_path / "asked").read_text().split()
    assert {"--filename=/a:/b", "--readonly", "--rw=read", "--direct=1", "--runtime=500ms"} <= set(asked)
    assert {"--ioengine=libaio", "--bs=1M", "--iodepth=16"} <= set(asked)


@pytest.mark.parametrize(
    "script", ["echo no json", "echo '{}'", 'echo \'{"jobs": [{"read": {"bw_bytes": 0}}]}\'; exit 1']
)
def test_a_fio_that_fails_is_told(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, script, monkeypatch)
    with pytest.raises(TierUnavailable, match="fio"):
        fio.read_bytes_per_second([Path("/a")], window_seconds=0.5)


def test_without_fio_the_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bench = Bench(rounds=1, is_quick=True, directory=tmp_path, shared_memory=tmp_path, tell=lambda _: None)
    row = ssd._read(bench, cast(LocalTier, None))
    assert row.value is None
    assert "fio is not installed" in row.detail
