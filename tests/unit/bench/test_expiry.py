"""The expiry group on a store of a few runs: everything ends, and both rows are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.bench import expiry, rows
from kvstore.bench.harness import Bench


def test_everything_ends_and_both_rows_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "RUNS_QUICK", 30)
    monkeypatch.setattr(expiry, "REST_SECONDS", 0.0)
    monkeypatch.setattr(expiry, "SEGMENT_BYTES", 2 << 20)
    bench = Bench(
        rounds=2, is_quick=True, directory=tmp_path, shared_memory=Path("/dev/shm"), tell=lambda _: None
    )
    found = list(expiry.run(bench))
    assert [row.spec for row in found] == [rows.EXPIRY_P999, rows.EXPIRY_MAX]
    assert all(row.value is not None and row.value > 0 for row in found)
    assert "30 runs in 6 segments" in found[0].detail
    assert not list(tmp_path.iterdir()), "the store is removed"
