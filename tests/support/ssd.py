"""Opens small SSD tiers for tests."""

from __future__ import annotations

import random
from pathlib import Path

from kvstore.clock import Clock, ManualClock
from kvstore.events import Events
from kvstore.tiers.fs import FileSystem, OsFileSystem
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.crypto_keys import KeyRing

MIB = 1 << 20


def open_ssd(
    directory: Path,
    *,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    events: Events | None = None,
    capacity_bytes: int = 256 * MIB,
    min_free_bytes: int = 0,
    queue_bytes_max: int = 64 * MIB,
    segment_bytes_max: int = 8 * MIB,
    index_bytes_max: int = 64 * MIB,
    seed: int = 0,
    scrub_bytes_per_second: int = 0,
    keys: KeyRing | None = None,
) -> SsdTier:
    """Return a tier that is not yet recovered; random ids come from the seed and from what is on disk."""
    source = random.Random(f"{seed} {len(list(directory.rglob('*')))}")
    return SsdTier(
        directory,
        fs=fs or OsFileSystem(),
        clock=clock or ManualClock(),
        events=events or Events(),
        capacity_bytes=capacity_bytes,
        min_free_bytes=min_free_bytes,
        queue_bytes_max=queue_bytes_max,
        segment_bytes_max=segment_bytes_max,
        entropy=source.randbytes,
        index_bytes_max=index_bytes_max,
        scrub_bytes_per_second=scrub_bytes_per_second,
        keys=keys,
    )


def recovered_ssd(directory: Path, **options: object) -> SsdTier:
    """Return a recovered tier whose recovered frames nobody needs."""
    tier = open_ssd(directory, **options)  # type: ignore[arg-type]
    for _ in tier.recover():
        pass
    return tier
