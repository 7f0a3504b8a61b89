"""Data directories of SSD tiers, written, damaged and opened anew."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.testing.frames import BuiltFrame
from kvstore.testing.tier_suite import found_frames, registered, written
from kvstore.tiers.base import FrameLocation, RecoveredFrame
from kvstore.tiers.ssd import SsdTier
from tests.support.ssd import open_ssd, recovered_ssd

WAIT_SECONDS = 30.0


def stored(directory: Path, *sizes: int, **options: object) -> tuple[list[BuiltFrame], list[FrameLocation]]:
    """Write frames and close."""
    tier = recovered_ssd(directory, **options)
    builder = registered(tier)
    frames = [builder.frame(n) for n in sizes]
    places = written(tier, frames)
    tier.close(deadline_seconds=WAIT_SECONDS)
    return frames, places


def reopened(directory: Path) -> tuple[SsdTier, list[RecoveredFrame]]:
    tier = open_ssd(directory)
    return tier, found_frames(tier)


def segment_file(directory: Path, number: int) -> Path:
    return directory / "segments" / f"{number:016x}.seg"


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def allocated(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (directory / "segments").iterdir())
