"""Random histories, each with the plug pulled at every one of its calls: thousands of crash points."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.testing.frames import FrameBuilder
from kvstore.tiers.base import SliceTouch, TouchNote
from tests.crash.test_ssd_crash import (
    WAIT_SECONDS,
    Script,
    abandon,
    check_restart,
    noted,
    prepare_index,
    small_ssd,
)
from tests.support.crash_fs import Crashed, CrashFileSystem

STEPS = 14
FATES = ("kept", "lost", "cut", "older")
POINTS = int(os.environ.get("KVSTORE_CRASH_POINTS", "2000"))
FIRST_SEED = int(os.environ.get("KVSTORE_CRASH_SEED", "1"))


class RandomScript(Script):
    """A history that its seed decides."""

    def __init__(self, directory: Path, fs: CrashFileSystem, seed: int) -> None:
        super().__init__(directory, fs)
        self.random = random.Random(seed)
        self.builder = FrameBuilder(seed=seed)
        self.boots = 0

    def run(self, *, snapshot: bool) -> None:
        """Take random steps to the end, or to the crash."""
        self._open()
        steps = {
            self._some_writes: 8,
            self._some_deletion: 3,
            self._some_unlink: 1,
            self._some_touches: 1,
            self._commit_rows: 2,
            self._reopen: 1,
        }
        for step in range(STEPS):
            if snapshot and step == STEPS // 2:
                self._commit_rows()
                shutil.copytree(self.directory / "index", self.directory.with_name("index-copy"))
            (take,) = self.random.choices(list(steps), list(steps.values()))
            take()
        assert self.tier is not None
        self.tier.close(deadline_seconds=WAIT_SECONDS)
        self._check_power()

    def _open(self) -> None:
        self.boots += 1
        self.tier = small_ssd(self.directory, self.fs, seed=self.boots)
        list(self.tier.recover())
        self.tier.register(self.builder.namespace)

    def _reopen(self) -> None:
        assert self.tier is not None
        self.tier.close(deadline_seconds=WAIT_SECONDS)
        self._check_power()
        self._open()

    def _some_writes(self) -> None:
        bucket = self.random.choice("abc")
        counts = [self.random.randint(1, 6) for _ in range(self.random.randint(1, 3))]
        self._write(*(self.builder.frame(count, bucket=bucket) for count in counts))

    def _some_deletion(self) -> None:
        living = sorted(set(self.history.places) - self.history.doomed)
        chosen = self.random.sample(living, k=min(2, len(living)))
        self._delete(*(self.history.submitted[keys] for keys in chosen))

    def _some_unlink(self) -> None:
        assert self.tier is not None
        infos = self.tier.segments()
        if infos:
            segment = self.random.choice(infos).segment
            keys = {keys for keys, place in self.history.places.items() if place.segment == segment}
            self.history.doomed |= keys
            self._wait(self.tier.unlink([segment]))
            self.history.gone |= keys

    def _some_touches(self) -> None:
        assert self.tier is not None
        self.tier.annotate(
            [TouchNote(place, (SliceTouch.whole("chat", 1.0),)) for place in self.history.places.values()]
        )

    def _commit_rows(self) -> None:
        assert self.tier is not None
        self._wait(self.tier.sync_index())


def run_point(directory: Path, *, seed: int, at: int, fate: str) -> str:
    """Crash a history before call `at`, now and then its restart too, and check what is found.

    Returns what it was: "point", "point again" with a second crash, or "end" when it makes fewer calls.
    """
    fs = CrashFileSystem(seed=seed * 100_003 + at)
    fs.crash_at(at)
    script = RandomScript(directory, fs, seed)
    try:
        script.run(snapshot=fate == "older")
    except Crashed:
        pass
    else:
        return "end"
    if script.tier is not None:
        abandon(script.tier)
    left = fs.reboot()
    prepare_index(directory, fate, seed=at)
    twice = (seed + at) % 3 == 0
    if twice:
        left = crash_the_restart(directory, left, at=1 + at % 61)
    check_restart(directory, script.history, left)
    return "point again" if twice else "point"


def crash_the_restart(directory: Path, left: CrashFileSystem, *, at: int) -> CrashFileSystem:
    """Pull the plug during the start that follows a crash."""
    left.crash_at(at)
    tier = None
    try:
        tier = small_ssd(directory, left, seed=4)
        list(tier.recover())
    except Crashed:
        pass
    if tier is not None:
        abandon(tier)
    return left.reboot()


def run_points(scratch: Path, *, points: int, first_seed: int, stride: int) -> Counter[str]:
    """Run so many points: of each history every `stride`-th call, with the fates of the index in turn."""
    seen: Counter[str] = Counter()
    for seed in itertools.count(first_seed):
        seen["histories"] += 1
        for at in itertools.count(1 + seed % stride, stride):
            fate = FATES[(seed + at // stride) % len(FATES)]
            directory = scratch / f"{seed}-{at}" / "store"
            directory.mkdir(parents=True)
            with noted(at, f"{fate}, history {seed}"):
                what = run_point(directory, seed=seed, at=at, fate=fate)
            shutil.rmtree(directory.parent)
            if what == "end" and fate != "older":
                break
            if what == "end":
                continue
            seen["points"] += 1
            seen[fate] += 1
            seen["crashed again while starting"] += what == "point again"
            if seen["points"] >= points:
                return seen
    raise AssertionError("histories never end")


def test_random_histories_at_some_of_their_calls(scratch: Path, figure: Callable[[str], None]) -> None:
    seen = run_points(scratch, points=60, first_seed=500, stride=34)
    figure(f"crash points of random histories from seed 500: {dict(seen)}")


@pytest.mark.long
@pytest.mark.usefixtures("quiet_log")
@pytest.mark.timeout(3600)
def test_random_histories_at_every_call(scratch: Path, figure: Callable[[str], None]) -> None:
    """Set KVSTORE_CRASH_POINTS and KVSTORE_CRASH_SEED for more, and for others."""
    started = time.monotonic()
    seen = run_points(scratch, points=POINTS, first_seed=FIRST_SEED, stride=1)
    seconds = time.monotonic() - started
    figure(f"crash points of random histories from seed {FIRST_SEED}: {dict(seen)} in {seconds:.0f} s")
