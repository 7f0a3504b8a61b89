"""The SSD tier passes the conformance suite, also with encryption."""

from __future__ import annotations

from pathlib import Path

from kvstore.testing.tier_suite import TierSuite
from kvstore.tiers.base import Tier
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyTable, tenant_key
from tests.support.ssd import open_ssd


class TestSsdTier(TierSuite):
    def open_tier(self, directory: Path) -> Tier:
        return open_ssd(directory)


class TestEncryptedSsdTier(TierSuite):
    def open_tier(self, directory: Path) -> Tier:
        table = KeyTable({"": (tenant_key(1, b"\x11" * 32),)})
        return open_ssd(directory, keys=KeyRing(lambda: table))
