"""The crash tests again with encryption on: the same promises, and a start without the keys keeps them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.testing.tier_suite import assert_reads_back, found_frames
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyTable, tenant_key
from tests.crash import test_ssd_crash, test_ssd_random
from tests.crash.test_ssd_crash import SEGMENT_BYTES, WAIT_SECONDS, History, check_restart, each_crash, noted
from tests.crash.test_ssd_random import RandomRun
from tests.support.crash_fs import CrashFileSystem
from tests.support.ssd import open_ssd

STRIDE = int(os.environ.get("KVSTORE_CRYPTO_STRIDE", "9"))
"""Every so many crash points are tried; 1 tries all."""
SEEDS = int(os.environ.get("KVSTORE_RANDOM_SEEDS", "20")) // 4
TABLE = KeyTable({"": (tenant_key(7, b"\x77" * 32),)})


def encrypted_ssd(directory: Path, fs: CrashFileSystem, *, seed: int) -> SsdTier:
    ring = KeyRing(lambda: TABLE)
    return open_ssd(directory, fs=fs, segment_bytes_max=SEGMENT_BYTES, seed=seed, keys=ring)


@pytest.fixture(autouse=True)
def _encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_ssd_crash, "small_ssd", encrypted_ssd)
    monkeypatch.setattr(test_ssd_random, "small_ssd", encrypted_ssd)


@pytest.mark.parametrize("fate", ["kept", "lost"])
def test_the_plug_is_pulled(scratch: Path, fate: str) -> None:
    for at, directory, history, left in each_crash(scratch, fate, seed=0, stride=STRIDE):
        with noted(at, fate):
            check_restart(directory, history, left)


@pytest.mark.parametrize("fate", ["kept", "lost"])
def test_a_start_without_the_keys_loses_nothing(scratch: Path, fate: str) -> None:
    for at, directory, history, left in each_crash(scratch, fate, seed=2000, stride=STRIDE):
        with noted(at, fate):
            check_blind_start(directory, history, left)


def check_blind_start(directory: Path, history: History, left: CrashFileSystem) -> None:
    """Recover without the keys, then with them: what was acknowledged is found and reads back."""
    blind = open_ssd(directory, fs=left, segment_bytes_max=SEGMENT_BYTES, seed=2)
    assert list(blind.recover()) == []
    blind.close(deadline_seconds=WAIT_SECONDS)
    tier = encrypted_ssd(directory, left, seed=3)
    found = {frame.header.keys: frame.location for frame in found_frames(tier)}
    assert set(history.places) - history.doomed <= set(found), "an acknowledged frame is lost"
    assert not history.gone & set(found), "a deleted frame came back"
    for keys in set(history.places) & set(found):
        assert_reads_back(tier, history.submitted[keys], found[keys])
    tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.mark.parametrize("seed", range(5000, 5000 + SEEDS))
def test_no_promise_is_broken(scratch: Path, seed: int) -> None:
    RandomRun(scratch, seed).run()
