"""The steps group on a real daemon: every step of a hit and of a put is measured, and they are the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.bench import steps
from kvstore.bench.groups import GROUPS
from kvstore.bench.harness import Bench


@pytest.mark.slow
def test_every_step_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "BLOCKS", 40)
    bench = Bench(
        rounds=2, is_quick=True, directory=tmp_path, shared_memory=Path("/dev/shm"), tell=lambda _: None
    )
    found = list(steps.run(bench))
    assert tuple(row.spec for row in found) == GROUPS["steps"].rows
    assert all(row.value is not None and row.value > 0 for row in found)
    assert all("2 rounds" in row.detail for row in found)
