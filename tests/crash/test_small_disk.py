"""A real disk of a few megabytes, full to the last page: host memory goes on, and the disk comes back."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.tiers.base import SliceTouch, TouchNote
from kvstore.tiers.ssd import DirectoryLock
from kvstore.types import PAGE_BYTES, PutOutcome
from tests.crash.test_ladder_disk import BLOCKS, WAIT_SECONDS, Node, until
from tests.support.ssd_directory import allocated

DISK_BYTES = 48 << 20
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mkfs.ext4") is None, reason="mounting a disk needs root and mkfs.ext4"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Lend a small ext4 file system."""
    image, place = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True, timeout=60)
    mounted = subprocess.run(
        ["mount", "-o", "loop", image, place], check=False, capture_output=True, text=True, timeout=60
    )
    if mounted.returncode:
        pytest.skip(f"no loopback mounts here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=60)


def fill(path: Path) -> None:
    """Take every byte that is left."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 512):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def test_segments_and_index_on_a_full_disk(disk: Path) -> None:
    node = Node(disk / "store")
    stored = [node.put_durably(seed) for seed in range(4)]
    fill(disk / "filler")
    since = node.clock.wall()
    kept: list[bytes] = []
    for seed in range(4, 16):
        keys = node.put(seed)
        until(lambda count=seed: len(node.acks) > count)  # type: ignore[misc]
        if node.acks[-1].outcomes[-1].outcome is PutOutcome.STORED_SSD:
            stored.append(keys)
        else:
            kept.append(keys)
    assert kept, "the disk took it all"
    node.later(6.0)
    until(lambda: not node.ladder.gauges()["kvstore_write_queue_bytes"])
    row = node.row()
    assert (row["state"], row["since"]) == ("read-only", since)
    assert "no room: " in row["detail"]
    for keys in (*stored, *kept):
        assert node.fetched(keys) == (BLOCKS, None)
    until(lambda: node.tier.usage().used_bytes == allocated(disk / "store"))
    (disk / "filler").unlink()
    node.later(6.0)
    until(lambda: node.row()["blocks"] == 16 * BLOCKS)
    # The index catches up with its next commit.
    until(lambda: (node.row()["state"], node.row()["detail"]) == ("ok", ""))
    node = node.reopened()
    assert node.tier.usage().used_bytes == allocated(disk / "store")
    for keys in (*stored, *kept):
        assert node.fetched(keys) == (BLOCKS, None)
    node.close()


def test_a_start_on_a_full_disk_serves_what_is_there(disk: Path) -> None:
    node = Node(disk / "store")
    stored = [node.put_durably(seed) for seed in range(4)]
    node.ladder.close(deadline_seconds=WAIT_SECONDS)
    fill(disk / "filler")
    with DirectoryLock(disk / "store"):
        node = Node(disk / "store", node.fs)
        for keys in stored:
            assert node.fetched(keys) == (BLOCKS, None)
        assert node.tier.report().frames == 4
        node.close()


def test_an_index_that_finds_no_room_lags_and_catches_up(disk: Path) -> None:
    node = Node(disk / "store")
    keys = node.put_durably(1)
    node.tier.sync_index().result(WAIT_SECONDS)
    fill(disk / "filler")
    (place,) = node.places()
    touches = (SliceTouch.whole("chat", 1.0),)
    notes = [
        TouchNote(replace(place, offset=place.offset + i * PAGE_BYTES), touches) for i in range(1, 20_000)
    ]
    node.tier.annotate(notes)
    node.tier.sync_index().result(WAIT_SECONDS)
    assert "the index lags: " in node.tier.healthy().detail
    assert "No space left on device" in node.tier.healthy().detail
    assert node.events.total("kvstore_ssd_errors_total", operation="index") >= 1
    assert node.fetched(keys) == (BLOCKS, None)
    (disk / "filler").unlink()
    node.put_durably(2)
    node.tier.sync_index().result(WAIT_SECONDS)
    assert node.tier.healthy().detail == ""
    node = node.reopened()
    assert node.tier.report().frames == 2
    assert not node.tier.report().rebuilt
    node.close()
