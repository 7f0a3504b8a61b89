"""Ten days of agent traffic at a TTL of three, with crashes: the books are right, nothing expired is served,
and what is kept for time's sake is written less than 1.2 times.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.retention import HOUR
from tests.crash.ten_days import TenDays

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
FIRST_SEED = int(os.environ.get("KVSTORE_CRASH_SEED", "1"))


def test_ten_short_days(scratch: Path, figure: Callable[[str], None]) -> None:
    figures = TenDays(scratch, seed=5, sessions=16, turns=4, crashes=3, tick_seconds=4 * HOUR).run()
    figure(f"ten short days: {figures.text()}")
    assert figures.crashes == 3
    assert figures.expired_bytes > 0
    assert figures.amplification("time") < 1.2
    assert figures.kept_missing == 0


@pytest.mark.long
@pytest.mark.usefixtures("quiet_log")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capacity_share", [0.0, 0.6])
def test_ten_days(scratch: Path, figure: Callable[[str], None], capacity_share: float) -> None:
    """KVSTORE_CRASH_SEED=N for another ten days."""
    peak = 0
    if capacity_share:
        peak = TenDays(scratch / "free", seed=FIRST_SEED, sessions=120, turns=12, crashes=0).run().disk_peak
    figures = TenDays(
        scratch / "store",
        seed=FIRST_SEED,
        sessions=120,
        turns=12,
        crashes=20,
        capacity_bytes=int(capacity_share * peak),
    ).run()
    figure(
        f"ten days from seed {FIRST_SEED}, capacity {int(capacity_share * peak) >> 20} MiB: {figures.text()}"
    )
    assert figures.crashes >= 12, "some fall together"
    assert figures.amplification("time") < 1.2
    assert figures.kept_missing <= 0.001 * figures.kept_checked
