"""Starts that went well, and power that is lost later."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.test_ssd_crash import abandon, small_ssd
from tests.support.crash_fs import CrashFileSystem


@pytest.mark.parametrize("seed", range(4))
def test_power_lost_after_good_starts_does_not_cost_the_index(scratch: Path, seed: int) -> None:
    """A start counts as one that died in the index only until it has read it; three times in a row here."""
    fs = CrashFileSystem(seed=seed)
    for boot in range(6):
        tier = small_ssd(scratch, fs, seed=boot)
        list(tier.recover())
        assert not tier.report().rebuilt
        fs.crash()
        abandon(tier)
        fs = fs.reboot()
