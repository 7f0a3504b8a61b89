"""Random histories over a file system with faults and crashes: the tier against what it promised."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.testing.frames import BuiltFrame, FrameBuilder
from kvstore.testing.tier_suite import assert_reads_back, found_frames
from kvstore.tiers.base import FrameLocation, SliceTouch, TouchNote
from kvstore.tiers.ssd import SsdTier
from tests.crash.test_ssd_crash import WAIT_SECONDS, abandon, small_ssd
from tests.support.crash_fs import CrashFileSystem

STEPS = 60


@dataclass(slots=True)
class Oracle:
    """What must be there, what may be there, and what was ever submitted."""

    submitted: dict[bytes, BuiltFrame] = field(default_factory=dict)
    promised: dict[bytes, FrameLocation] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)


class RandomRun:
    """One history from one seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.fs = CrashFileSystem(seed=seed)
        self.builder = FrameBuilder(seed=seed)
        self.oracle = Oracle()
        self.boots = 0
        self.faults = 0
        self.is_faulty = False
        self.tier = self.boot()

    def run(self) -> None:
        """Take random steps; whatever happens, no promise is broken."""
        steps = {self.write: 10, self.delete: 3, self.unlink: 1, self.touch: 2, self.reopen: 1, self.crash: 1}
        for _ in range(STEPS):
            (step,) = self.random.choices(list(steps), list(steps.values()))
            self.arm()
            step()
            self.disarm()
            self.read_some()
        self.reopen()
        self.tier.close(deadline_seconds=WAIT_SECONDS)

    def arm(self) -> None:
        """Let a share of the steps meet failing calls, whichever come then, and a share of a minute pass."""
        self.tier._clock.advance(20.0)  # type: ignore[attr-defined]
        self.is_faulty = self.random.random() < 0.2
        if not self.is_faulty:
            return
        first = self.fs.calls + self.random.randint(1, 12)
        fails_at = range(first, first + self.random.randint(1, 4))
        code = self.random.choice((errno.EIO, errno.EIO, errno.ENOSPC, errno.EROFS))

        def before(name: str) -> None:
            if self.fs.calls in fails_at:
                self.faults += 1
                raise OSError(code, os.strerror(code))

        self.fs.before = before

    def disarm(self) -> None:
        self.fs.before = lambda name: None

    def boot(self) -> SsdTier:
        """Start, and compare what is found with what was promised."""
        self.boots += 1
        tier = small_ssd(self.directory, self.fs, seed=self.boots)
        found = {frame.header.keys: frame for frame in found_frames(tier)}
        assert set(self.oracle.promised) <= set(found), "an acknowledged frame is lost"
        assert not self.oracle.gone & set(found), "a deleted frame came back"
        for keys, frame in found.items():
            assert frame.header == self.oracle.submitted[keys].write.header
            assert_reads_back(tier, self.oracle.submitted[keys], frame.location)
            self.oracle.promised[keys] = frame.location
        assert tier.usage().used_bytes == sum(info.bytes for info in tier.segments())
        tier.register(self.builder.namespace)
        return tier

    def write(self) -> None:
        frames = [
            self.builder.frame(self.random.randint(1, 6), bucket=self.random.choice("abc"))
            for _ in range(self.random.randint(1, 4))
        ]
        self.oracle.submitted |= {built.keys: built for built in frames}
        futures = self.tier.write([built.write for built in frames])
        places = [future.result(WAIT_SECONDS).location for future in futures]
        kept = [place for place in places if place is not None]
        assert places[: len(kept)] == kept
        assert self.is_faulty or self.tier.healthy().detail or len(kept) == len(places)
        self.oracle.promised |= {built.keys: place for built, place in zip(frames, kept, strict=False)}

    def _forget(self, chosen: list[bytes], answer: Future[int]) -> None:
        """They are no longer promised; they may return only if the tier says so."""
        for keys in chosen:
            del self.oracle.promised[keys]
        try:
            answer.result(WAIT_SECONDS)
            self.oracle.gone.update(chosen)
        except TierUnavailable:
            assert self.is_faulty or self.tier.healthy().detail

    def delete(self) -> None:
        chosen = self.random.sample(sorted(self.oracle.promised), k=min(3, len(self.oracle.promised)))
        self._forget(chosen, self.tier.delete([self.oracle.promised[keys] for keys in chosen]))

    def unlink(self) -> None:
        infos = self.tier.segments()
        if not infos:
            return
        segment = self.random.choice(infos).segment
        inside = [keys for keys, place in self.oracle.promised.items() if place.segment == segment]
        self._forget(inside, self.tier.unlink([segment]))

    def touch(self) -> None:
        self.tier.annotate(
            [TouchNote(place, (SliceTouch.whole("chat", 1.0),)) for place in self.oracle.promised.values()]
        )
        self.tier.sync_index().result(WAIT_SECONDS)

    def reopen(self) -> None:
        self.tier.close(deadline_seconds=WAIT_SECONDS)
        self.disarm()
        self.tier = self.boot()

    def crash(self) -> None:
        self.fs.crash()
        abandon(self.tier)
        self.fs = self.fs.reboot()
        self.tier = self.boot()

    def read_some(self) -> None:
        for keys in self.random.sample(sorted(self.oracle.promised), k=min(2, len(self.oracle.promised))):
            assert_reads_back(self.tier, self.oracle.submitted[keys], self.oracle.promised[keys])


SEEDS = int(os.environ.get("KVSTORE_RANDOM_SEEDS", "20"))
"""More of them search longer."""
MANY = int(os.environ.get("KVSTORE_RANDOM_HISTORIES", "300"))
FIRST_SEED = int(os.environ.get("KVSTORE_CRASH_SEED", "1000"))


@pytest.mark.long
@pytest.mark.usefixtures("quiet_log")
@pytest.mark.timeout(3600)
def test_no_promise_is_broken_in_many_histories(scratch: Path, figure: Callable[[str], None]) -> None:
    faults = boots = 0
    for seed in range(FIRST_SEED, FIRST_SEED + MANY):
        directory = scratch / str(seed)
        directory.mkdir()
        run = RandomRun(directory, seed)
        try:
            run.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        faults, boots = faults + run.faults, boots + run.boots
        shutil.rmtree(directory)
        del run
        gc.collect()
    figure(f"random histories from seed {FIRST_SEED}: {MANY}, faults injected {faults}, restarts {boots}")


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed % 2 else ()) for seed in range(SEEDS)]
)
def test_no_promise_is_broken(scratch: Path, seed: int) -> None:
    RandomRun(scratch, seed).run()


def test_a_namespace_whose_name_was_never_synced_is_synced_by_the_next_start(scratch: Path) -> None:
    """Found by a random history: the folder's sync failed, the daemon started again, the power went."""
    run = RandomRun(scratch, 1)
    failing = True

    def before(name: str) -> None:
        if failing and name == "fsync_directory":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    run.fs.before = before
    run.is_faulty = True
    run.write()
    failing = False
    run.reopen()
    run.is_faulty = False
    run.write()
    for _ in range(8):
        run.crash()
