"""The SSD tier passes the conformance suite."""

from __future__ import annotations

from pathlib import Path

from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers.base import Tier
from tests.support.ssd import open_ssd


class TestSsdTier(TierSuite):
    def open_tier(self, directory: Path) -> Tier:
        return open_ssd(directory)
