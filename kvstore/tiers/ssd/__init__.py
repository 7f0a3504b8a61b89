"""The SSD tier: frames in append-only segments, found again after any crash. FORMAT.md has the bytes."""

from kvstore.tiers.ssd.directory import DirectoryLock
from kvstore.tiers.ssd.tier import SsdTier

__all__ = ["DirectoryLock", "SsdTier"]
