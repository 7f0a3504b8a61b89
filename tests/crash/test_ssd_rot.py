"""Bits flip anywhere on the disk: nothing wrong is served, nothing crashes, and every loss is told."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ssd_rot import RotStore, flip, judge, positions

DEATHS_MAX = 2
"""LMDB has no checksums: so many starts may end at a damaged index before it is rebuilt."""


@pytest.fixture
def store(scratch: Path) -> RotStore:
    return RotStore.build(scratch / "store")


def flip_all(store: RotStore, scratch: Path, *, share: int, bits: tuple[int, ...]) -> Counter[str]:
    """Flip bytes one at a time, start on each, and count what came of it."""
    seen: Counter[str] = Counter()
    for name, path, offset in positions(store, share=share):
        for turn, bit in enumerate(bits):
            target = scratch / "copy"
            store.copy(target, with_index=(turn + offset) % 2 == 0)
            flip(target / path, offset, bits=bit)
            try:
                verdict = judge(store, target)
                assert verdict.whole == len(store.frames) or verdict.told, "a loss was not told"
                assert not verdict.refused or name == "STORE", verdict.refused
            except BaseException as error:
                error.add_note(f"{name}: byte {offset} of {path}, bits {bit:#x}")
                raise
            shutil.rmtree(target)
            seen["flips"] += 1
            seen["lost"] += verdict.whole < len(store.frames)
            seen["refused"] += bool(verdict.refused)
    return seen


def test_a_sample_of_all_kinds_of_bytes(
    store: RotStore, scratch: Path, figure: Callable[[str], None]
) -> None:
    seen = flip_all(store, scratch, share=24, bits=(0x40,))
    figure(f"flipped bytes: {dict(seen)}")
    assert seen["flips"] > 100
    assert seen["lost"] > 20


@pytest.mark.long
@pytest.mark.usefixtures("quiet_log")
@pytest.mark.timeout(1200)
def test_every_byte_of_all_kinds(store: RotStore, scratch: Path, figure: Callable[[str], None]) -> None:
    seen = flip_all(store, scratch, share=1, bits=(0x01,))
    figure(f"flipped bytes: {dict(seen)}")


def start_on(store: RotStore, directory: Path) -> None:
    """Be a start of its own, that a damaged index may end."""
    verdict = judge(store, directory)
    intact = len(store.frames)
    os._exit(0 if verdict.whole == intact else 3)


def rot_the_index(store: RotStore, scratch: Path, *, seeds: range) -> Counter[str]:
    """Change one to four bytes of the index and start until a start comes to its end."""
    context = multiprocessing.get_context("fork")
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        target = scratch / "copy"
        store.copy(target, with_index=True)
        file = target / "index" / "data.mdb"
        for _ in range(rng.randint(1, 4)):
            flip(file, rng.randrange(file.stat().st_size), bits=1 << rng.randrange(8))
        deaths = 0
        while True:
            process = context.Process(target=start_on, args=(store, target))
            process.start()
            process.join()
            if process.exitcode == 0:
                break
            deaths += 1
            assert process.exitcode is not None
            assert process.exitcode < 0, f"seed {seed}: the start failed with {process.exitcode}"
            assert deaths <= DEATHS_MAX, f"seed {seed}: the index ended {deaths} starts"
        shutil.rmtree(target)
        seen["indexes"] += 1
        seen["deaths"] += deaths
    return seen


def test_a_rotten_index_costs_a_rebuild_at_most(
    store: RotStore, scratch: Path, figure: Callable[[str], None]
) -> None:
    figure(f"rotten indexes: {dict(rot_the_index(store, scratch, seeds=range(12)))}")


@pytest.mark.long
@pytest.mark.usefixtures("quiet_log")
@pytest.mark.timeout(1200)
def test_many_rotten_indexes(store: RotStore, scratch: Path, figure: Callable[[str], None]) -> None:
    figure(f"rotten indexes: {dict(rot_the_index(store, scratch, seeds=range(1000, 1300)))}")
