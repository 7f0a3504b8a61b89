"""Pull the plug at every call of a scripted run: what was acknowledged is found intact, nothing wrong is."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import TierUnavailable
from kvstore.testing.frames import BuiltFrame, FrameBuilder
from kvstore.testing.tier_suite import assert_reads_back, found_frames
from kvstore.tiers.base import FrameLocation, RecoveredFrame
from kvstore.tiers.ssd import SsdTier
from tests.support.crash_fs import Crashed, CrashFileSystem
from tests.support.ssd import open_ssd

WAIT_SECONDS = 30.0
SEGMENT_BYTES = 160 << 10
"""Small, so that the script fills and seals a few."""
STRIDES = [3, pytest.param(1, marks=pytest.mark.slow)]
"""Every so many calls of the script; what one fate of the index leaves out, another takes."""


@dataclass(slots=True)
class History:
    """What the script asked for and what it was promised."""

    submitted: dict[bytes, BuiltFrame] = field(default_factory=dict)
    places: dict[bytes, FrameLocation] = field(default_factory=dict)
    doomed: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)


class Script:
    """Writes, deletes and closes over a file system that may crash at any call."""

    def __init__(self, directory: Path, fs: CrashFileSystem) -> None:
        self.directory, self.fs = directory, fs
        self.history = History()
        self.tier: SsdTier | None = None

    def run(self, *, snapshot: bool) -> None:
        """Run to the end, or to the crash, with a snapshot of the index in the middle on request."""
        tier = self.tier = small_ssd(self.directory, self.fs, seed=1)
        list(tier.recover())
        builder = FrameBuilder()
        tier.register(builder.namespace)
        first, second, third = (builder.frame(n, bucket="a") for n in (2, 3, 1))
        self._write(first, second)
        self._write(third, builder.frame(2, bucket="b"))
        self._wait(tier.sync_index())
        if snapshot:
            shutil.copytree(self.directory / "index", self.directory.with_name("index-copy"))
        self._delete(second)
        self._write(*(builder.frame(3, bucket="a") for _ in range(4)))
        fifth = builder.frame(6, bucket="b")
        self._write(fifth, builder.frame(5, bucket="b"))
        self._wait(tier.sync_index())
        self._delete(fifth, third)
        self._write(builder.frame(1, bucket="c"))
        tier.close(deadline_seconds=WAIT_SECONDS)

    def _write(self, *frames: BuiltFrame) -> None:
        assert self.tier is not None
        for built in frames:
            self.history.submitted[built.keys] = built
        futures = self.tier.write([built.write for built in frames])
        places = [future.result(WAIT_SECONDS).location for future in futures]
        kept = [place for place in places if place is not None]
        assert places[: len(kept)] == kept, "a write lost its middle"
        self.history.places.update({built.keys: place for built, place in zip(frames, kept, strict=False)})
        self._check_power()

    def _delete(self, *frames: BuiltFrame) -> None:
        assert self.tier is not None
        keys = {built.keys for built in frames}
        self.history.doomed |= keys
        self._wait(self.tier.delete([self.history.places[key] for key in keys]))
        self.history.gone |= keys

    def _wait(self, future: Future[int]) -> None:
        with suppress(TierUnavailable):
            future.result(WAIT_SECONDS)
        self._check_power()

    def _check_power(self) -> None:
        if self.fs.is_down:
            raise Crashed


def small_ssd(directory: Path, fs: CrashFileSystem, *, seed: int) -> SsdTier:
    return open_ssd(directory, fs=fs, segment_bytes_max=SEGMENT_BYTES, seed=seed)


def abandon(tier: SsdTier) -> None:
    """Let go of what a dead process would not hold: threads and the index."""
    running: Any = tier._running
    tier._closing.set()
    tier._queue.close("crashed")
    tier._readers.close()
    if running is None:
        if tier._recovery.index is not None:
            tier._recovery.index.close()
        return
    running.keeper.close()
    running.looker.close()
    assert running.looker.join(WAIT_SECONDS)
    for thread in (running.writer_thread, running.keeper_thread):
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    running.index.close()


def crashed_run(
    directory: Path, *, at: int, seed: int, snapshot: bool
) -> tuple[Script, CrashFileSystem] | None:
    """Run the script with a crash before call `at`; None when it makes fewer calls."""
    fs = CrashFileSystem(seed=seed)
    fs.crash_at(at)
    script = Script(directory, fs)
    try:
        script.run(snapshot=snapshot)
    except Crashed:
        pass
    else:
        if not fs.is_down:
            return None
    if script.tier is not None:
        abandon(script.tier)
    return script, fs.reboot()


def check(history: History, tier: SsdTier, found: list[RecoveredFrame], fs: CrashFileSystem) -> None:
    """Compare what was recovered with what was promised, byte by byte."""
    by_key = {frame.header.keys: frame for frame in found}
    assert len(by_key) == len(found), "a frame was yielded twice"
    assert set(history.places) - history.doomed <= set(by_key), "an acknowledged frame is lost"
    assert not history.gone & set(by_key), "a deleted frame came back"
    segments = tier._directory.segments
    allocated = sum(fs.stat(segments / name).allocated_bytes for name in fs.listdir(segments))
    assert tier.usage().used_bytes == allocated, "the accounting differs from the disk"
    for keys, frame in by_key.items():
        built = history.submitted[keys]
        assert frame.header == built.write.header
        assert frame.location == history.places.get(keys, frame.location)
        assert_reads_back(tier, built, frame.location)
    assert tier.usage().used_bytes == sum(info.bytes for info in tier.segments())


def check_restart(directory: Path, history: History, left: CrashFileSystem) -> None:
    """Recover twice, with a write in between."""
    tier = small_ssd(directory, left, seed=2)
    found = found_frames(tier)
    check(history, tier, found, left)
    known = {frame.header.keys: frame.location for frame in found}
    builder = FrameBuilder(seed=99)
    tier.register(builder.namespace)
    assert len(tier.report().unknown_files) == 0
    late = builder.frame(2, bucket="late")
    (future,) = tier.write([late.write])
    location = future.result(WAIT_SECONDS).location
    assert location is not None
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = small_ssd(directory, left, seed=3)
    found = found_frames(again)
    assert {frame.header.keys: frame.location for frame in found} == known | {late.keys: location}
    assert again.report().frames_dropped == 0
    history.submitted[late.keys] = late
    check(history, again, found, left)
    again.close(deadline_seconds=WAIT_SECONDS)


def prepare_index(directory: Path, fate: str, *, seed: int) -> None:
    """Keep the index, lose it, cut it short, or put the one from the middle of the run in its place."""
    copy = directory.with_name("index-copy")
    data = directory / "index" / "data.mdb"
    if fate == "cut" and data.exists():
        os.truncate(data, random.Random(seed).randrange(data.stat().st_size + 1))
    if fate == "lost" or copy.exists():
        shutil.rmtree(directory / "index", ignore_errors=True)
    if copy.exists():
        copy.rename(directory / "index")


def each_crash(
    scratch: Path, fate: str, *, seed: int, stride: int = 1
) -> Iterator[tuple[int, Path, History, CrashFileSystem]]:
    """Yield what every `stride`-th crash of the script leaves, until the script comes to its end."""
    for at in itertools.count(1 + len(fate) % stride, stride):
        directory = scratch / str(at) / "store"
        directory.mkdir(parents=True)
        run = crashed_run(directory, at=at, seed=seed + at, snapshot=fate == "older")
        if run is None:
            assert at > 100
            return
        script, left = run
        prepare_index(directory, fate, seed=seed + at)
        yield at, directory, script.history, left
        shutil.rmtree(directory.parent)


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("fate", ["kept", "lost", "older", "cut"])
def test_the_plug_is_pulled(scratch: Path, fate: str, stride: int, figure: Callable[[str], None]) -> None:
    points = 0
    for at, directory, history, left in each_crash(scratch, fate, seed=0, stride=stride):
        points += 1
        with noted(at, fate):
            check_restart(directory, history, left)
    figure(f"crash points of the script, index {fate}: {points}")


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("fate", ["kept", "lost"])
def test_the_plug_is_pulled_again_during_the_start(
    scratch: Path, fate: str, stride: int, figure: Callable[[str], None]
) -> None:
    points = 0
    for at, directory, history, left in each_crash(scratch, fate, seed=1000, stride=stride):
        points += 1
        left.crash_at(1 + at % 45)
        tier = None
        try:
            tier = small_ssd(directory, left, seed=4)
            list(tier.recover())
        except Crashed:
            pass
        if tier is not None:
            abandon(tier)
        with noted(at, fate):
            check_restart(directory, history, left.reboot())
    figure(f"crash points of the script and of the start after it, index {fate}: {points}")


@contextmanager
def noted(at: int, fate: str) -> Iterator[None]:
    """Tell in which run a check failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"crashed before call {at}, index {fate}")
        raise
