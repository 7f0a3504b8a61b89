"""The same histories over the real SSD tier, on a file system that loses what was not synced."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvstore.tiers.base import FrameLocation, Tier
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyTable, tenant_key
from tests.crash.test_ssd_crash import SEGMENT_BYTES, abandon
from tests.property.history import play, some_steps
from tests.property.world import Setting, World
from tests.support.crash_fs import CrashFileSystem
from tests.support.ssd import open_ssd

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
WAIT_SECONDS = 60.0
LEFT_OUT = {"faults", "status"}
KEYS = KeyTable({"": (tenant_key(3, b"\x33" * 32),)})


class SsdWorld(World):
    """Waits after each step until the disk has done what it was asked to."""

    notes_may_be_lost = True

    def __init__(self, setting: Setting, *, seed: int, directory: Path, encrypted: bool) -> None:
        self.directory, self.boots = directory, 0
        self.keys = KeyRing(lambda: KEYS) if encrypted else None
        self.fs = CrashFileSystem(seed=seed)
        self.deletions: list[Future[int]] = []
        self.crashes = 0
        super().__init__(setting, seed=seed)

    def make_tier(self) -> Tier:
        self.boots += 1
        self.ssd: SsdTier = open_ssd(
            self.directory,
            fs=self.fs,
            segment_bytes_max=SEGMENT_BYTES,
            seed=self.boots,
            keys=self.keys,
        )
        delete = self.ssd.delete

        def noted(frames: Sequence[FrameLocation]) -> Future[int]:
            self.deletions.append(delete(frames))
            return self.deletions[-1]

        self.ssd.delete = noted  # type: ignore[method-assign]
        return self.ssd

    def settle(self) -> None:
        until, pause = time.monotonic() + WAIT_SECONDS, threading.Event()
        while not self._is_idle():
            assert time.monotonic() < until, "the disk does not answer"
            pause.wait(0.001)
        deletions, self.deletions = self.deletions, []
        for deletion in deletions:
            deletion.result(WAIT_SECONDS)

    def _is_idle(self) -> bool:
        ladder = self.ladder
        with ladder._lock:
            loads = ladder._loads
            is_quiet = ladder._writeback.idle and not loads.in_flight and not loads.queued
            return is_quiet and not ladder._catalog.graves._purges

    def run_io(self, count: int = 1 << 30) -> None:
        self.settle()

    def close(self) -> None:
        self.settle()
        self.ladder.close(deadline_seconds=WAIT_SECONDS)
        self.follow()

    def crash(self) -> None:
        self.crashes += 1
        self.fs.crash()
        abandon(self.ssd)
        self.fs = self.fs.reboot()
        self.deletions = []
        self.follow()


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def run_over_ssd(directory: Path, *, seed: int, steps: int) -> SsdWorld:
    """Every other seed is of an encrypted store."""
    rng = random.Random(seed)
    setting = Setting(
        pages=rng.choice([60, 4096]),
        parts=rng.choice([1, 2]),
        side=rng.choice(["", "checkpoint"]),
        flat=rng.random() < 0.3,
        policy=rng.choice(["lru", "lru", "s3fifo", "density"]),
        faults=False,
    )
    world = SsdWorld(setting, seed=seed, directory=directory, encrypted=seed % 2 == 1)
    wanted = [(name, number) for name, number in some_steps(rng, steps) if name not in LEFT_OUT]
    for at in range(0, len(wanted), 40):
        play(world, wanted[at : at + 40], first=at)
        play(world, [("crash", at)], first=at)
    world.close()
    return world


@pytest.mark.parametrize("seed", range(3))
def test_what_the_oracle_says_holds_over_a_disk_that_crashes(scratch: Path, seed: int) -> None:
    assert run_over_ssd(scratch, seed=seed, steps=120).crashes >= 3


@pytest.mark.parametrize("side", ["", "checkpoint"])
def test_encryption_changes_no_answer(scratch: Path, side: str) -> None:
    said = []
    for encrypted in (False, True):
        directory = scratch / str(encrypted)
        setting = Setting(faults=False, longest_pause=31.0, side=side, flat=bool(side))
        world = SsdWorld(setting, seed=21, directory=directory, encrypted=encrypted)
        steps = some_steps(random.Random(21), 120)
        play(world, [step for step in steps if step[0] not in LEFT_OUT | {"crash"}], check_every=30)
        world.close()
        said.append(world.log)
    assert len(said[0]) > 50
    assert said[0] == said[1]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_what_the_oracle_says_holds_over_many_crashes(scratch: Path, seed: int) -> None:
    assert run_over_ssd(scratch, seed=seed, steps=1000).crashes >= 20
