"""The storm group on a real daemon: its row is measured, and what it hits stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.bench import rows, storm
from kvstore.bench.harness import Bench


@pytest.mark.slow
def test_hits_go_on_in_a_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "HITS_QUICK", 2)
    bench = Bench(
        rounds=1, is_quick=True, directory=tmp_path, shared_memory=Path("/dev/shm"), tell=lambda _: None
    )
    (found,) = storm.run(bench)
    assert found.spec is rows.STORM_P99
    assert found.value is not None and found.value > 0
    assert "6 hits each" in found.detail
    assert not list(tmp_path.iterdir()), "the store is removed"
