"""A directory filled without payload is what a store would be; the groups measure all their rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvstore.bench import rows, scale, start
from kvstore.bench.filling import AGENT, CHAT, Filled, Shape, fill
from kvstore.bench.harness import Bench
from kvstore.clock import SystemClock
from kvstore.events import Events
from kvstore.testing.tier_suite import found_frames
from kvstore.tiers.base import FrameHeader, RecoveryReport
from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.ssd import SsdTier


def recovered(path: Path) -> tuple[list[FrameHeader], RecoveryReport]:
    tier = SsdTier(
        path,
        fs=OsFileSystem(),
        clock=SystemClock(),
        events=Events(),
        capacity_bytes=1 << 46,
        min_free_bytes=0,
        queue_bytes_max=64 << 20,
    )
    headers = [frame.header for frame in found_frames(tier)]
    tier.close(deadline_seconds=1.0)
    return headers, tier.report()


@pytest.mark.parametrize("shape", [AGENT, CHAT], ids=lambda shape: shape.name)
def test_what_was_filled_is_found_with_and_without_the_index(tmp_path: Path, shape: Shape) -> None:
    filled = fill(tmp_path / "data", blocks=6000, shape=shape)
    by_index, report = recovered(tmp_path / "data")
    assert (report.rebuilt, report.frames, report.blocks) == (False, filled.runs, filled.blocks)
    assert (report.segments, report.unknown_files) == (filled.segments, ())
    assert filled.segments > 1
    assert by_index[0].keys == filled.sample
    shutil.rmtree(tmp_path / "data" / "index")
    by_scan, report = recovered(tmp_path / "data")
    assert by_scan == by_index
    assert report.blocks == filled.blocks


def test_runs_have_the_shapes_that_they_are_named_for(tmp_path: Path) -> None:
    def mean(shape: Shape, blocks: int) -> float:
        filled: Filled = fill(tmp_path / shape.name, blocks=blocks, shape=shape)
        return filled.blocks / filled.runs

    assert 45 < mean(AGENT, 200_000) < 85
    assert 11 < mean(CHAT, 20_000) < 19


@pytest.mark.slow
def test_both_groups_measure_all_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((scale, "BLOCKS_QUICK"), (start, "BLOCKS_QUICK"), (scale, "CHAT_BLOCKS_QUICK")):
        monkeypatch.setattr(module, name, 12_000)
    bench = Bench(
        rounds=1, is_quick=True, directory=tmp_path, shared_memory=Path("/dev/shm"), tell=lambda _: None
    )
    found = [*scale.run(bench), *start.run(bench)]
    assert [row.spec for row in found] == [
        rows.MATCH_SCALE,
        rows.INDEX_BYTES,
        rows.START_CLEAN,
        rows.START_KILLED,
        rows.START_REBUILD,
    ]
    assert all(row.value is not None for row in found)
    assert "12,000 blocks in" in found[0].detail
    assert not list(tmp_path.iterdir()), "the stores are removed"
