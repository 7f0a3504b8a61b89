"""A tenant that pries learns nothing; `python -m tests.fuzz.marathon --probes N` is the long form."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.probes import pry


def test_a_tenant_that_pries_learns_nothing(tmp_path: Path) -> None:
    made, counts = pry(tmp_path, probes=2000, seed=1)
    assert made == 2000
    verbs = {"Match", "Match own", "Touch", "Prefetch", "List", "Delete", "numbers", "Fetch", "Put", "Open"}
    assert verbs | {"Reserve", "Commit", "Abort"} <= set(counts)
