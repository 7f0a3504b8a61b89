"""The ladder over a disk that hangs, fails, fills or rots: misses with a reason, never a wait without end."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvstore import hashing
from kvstore.api import CommitAnswer, MatchAnswer, MatchRequest, Progress
from kvstore.clock import ManualClock
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.events import Events
from kvstore.tiers.base import FrameLocation
from kvstore.types import AckTier, MissReason, PutOutcome, ReleaseOutcome
from tests.support.driver import check_extents, namespace, put
from tests.support.fault_fs import FaultFileSystem
from tests.support.memory import PrivateMemory
from tests.support.ssd import open_ssd

WAIT_SECONDS = 30.0
BLOCKS = 8


class Node:
    """A ladder over a fault file system, driven by hand."""

    def __init__(self, directory: Path, fs: FaultFileSystem | None = None) -> None:
        self.directory = directory
        self.fs = fs or FaultFileSystem()
        self.clock, self.events = ManualClock(), Events()
        self.tier = open_ssd(directory, fs=self.fs, clock=self.clock, events=self.events)
        numbers = count(1)
        self.ladder = Ladder(
            host=PrivateMemory(2048),
            ssd=self.tier,
            clock=self.clock,
            events=self.events,
            new_number=lambda: next(numbers),
            limits=Limits(load_bytes=8192),
        )
        self.ladder.recover()
        self.space = namespace()
        self.root = hashing.chain_root(self.space.fingerprint)
        self.ladder.open(self.space, root=self.root)
        self.acks: list[CommitAnswer] = []

    def keys(self, seed: int) -> bytes:
        return hashing.block_hashes(self.root, [seed] * (4 * BLOCKS), block_tokens=4)

    def put(self, seed: int) -> bytes:
        """Put a chain that waits for SSD; its answer goes to `acks`."""
        keys = self.keys(seed)
        answer = put(self.ladder, self.space, self.root, keys, ack=AckTier.SSD, acks=self.acks)
        if answer is not None:
            self.acks.append(answer)
        return keys

    def put_durably(self, seed: int) -> bytes:
        before = len(self.acks)
        keys = self.put(seed)
        until(lambda: len(self.acks) > before)
        assert self.acks[-1].outcomes[-1].outcome is PutOutcome.STORED_SSD
        return keys

    def reopened(self) -> Node:
        """Start anew: all that is left is on SSD."""
        self.ladder.close(deadline_seconds=WAIT_SECONDS)
        return Node(self.directory, self.fs)

    def get(self, keys: bytes) -> tuple[MatchAnswer, list[Progress]]:
        news: list[Progress] = []
        request = MatchRequest(namespace=self.space.fingerprint, keys=keys)
        return self.ladder.match(request, news.append), news

    def fetched(self, keys: bytes) -> tuple[int, MissReason | None]:
        """Fetch a chain and compare every byte that came; returns how many blocks came and why no more."""
        answer, news = self.get(keys)
        if not answer.blocks:
            return 0, answer.reason
        until(lambda: answer.ready or bool(news and news[-1].done))
        progress = self.ladder.watch(answer.lease)
        wanted = [extent for extent in progress.extents if extent.first < progress.blocks]
        check_extents(self.ladder, self.space, keys, tuple(wanted))
        self.ladder.release(answer.lease, used=progress.blocks, outcome=ReleaseOutcome.USED)
        return progress.blocks, progress.reason

    def later(self, seconds: float) -> None:
        self.ladder.tick()
        self.clock.advance(seconds)
        self.ladder.tick()

    def row(self) -> dict[str, Any]:
        return dict(self.ladder.status().tiers[1])

    def places(self) -> list[FrameLocation]:
        catalog = self.ladder._catalog
        awake = [f.location for s in catalog.segments for f in s.frames if f.location is not None]
        asleep = map(catalog.sleepers.location, catalog.sleepers.of_spaces(catalog.namespaces.keys()))
        return sorted([*awake, *asleep], key=lambda place: (place.segment, place.offset))

    def close(self) -> None:
        self.fs.heal()
        self.ladder.close(deadline_seconds=WAIT_SECONDS)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def test_a_read_that_hangs_ends_as_tier_down_and_its_slots_wait_for_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    keys = node.put_durably(1)
    node = node.reopened()
    rule = node.fs.hang("preadv", path="*.seg")
    answer, news = node.get(keys)
    assert (answer.blocks, answer.ready) == (BLOCKS, False)
    assert rule.arrived.wait(WAIT_SECONDS)
    assert not news
    node.later(6.0)
    assert (news[-1].done, news[-1].blocks, news[-1].reason) == (True, 0, MissReason.TIER_DOWN)
    node.ladder.release(answer.lease, used=0, outcome=ReleaseOutcome.UNUSED)
    held = node.ladder.gauges()["kvstore_host_used_bytes"]
    assert held > 0, "the disk may still write there"
    again, later_news = node.get(keys)
    assert again.blocks == BLOCKS, "matches keep answering"
    node.later(0.1)
    assert later_news[-1].reason is MissReason.TIER_DOWN
    node.ladder.release(again.lease, used=0, outcome=ReleaseOutcome.UNUSED)
    other = node.keys(2)
    assert put(node.ladder, node.space, node.root, other) is not None
    assert node.fetched(other) == (BLOCKS, None), "host memory needs no disk"
    node.fs.heal()
    until(lambda: node.ladder.gauges()["kvstore_loads_in_flight"] == 0)
    assert node.fetched(keys) == (BLOCKS, None)
    node.close()


def test_what_is_queued_behind_reads_that_hang_ends_too(tmp_path: Path) -> None:
    node = Node(tmp_path)
    chains = [node.put_durably(seed) for seed in range(24)]
    node = node.reopened()
    node.fs.hang("preadv", path="*.seg")
    news = [node.get(keys)[1] for keys in chains]
    until(lambda: node.fs.faults >= 4)
    for _ in range(3):
        node.later(6.0)
    assert {told[-1].reason for told in news} == {MissReason.TIER_DOWN}
    assert node.ladder.gauges()["kvstore_loads_queued"] == 0
    node.close()


def test_an_acknowledgement_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    node = Node(tmp_path)
    rule = node.fs.hang("pwritev fdatasync", path="*.seg")
    node.put(1)
    assert rule.arrived.wait(WAIT_SECONDS)
    node.later(29.0)
    assert not node.acks
    node.later(2.0)
    assert node.acks[0].outcomes[-1].outcome is PutOutcome.STORED_HOST
    node.put(2)
    node.later(0.1)
    assert node.acks[1].outcomes[-1].outcome is PutOutcome.STORED_HOST
    node.fs.heal()
    until(lambda: node.row()["blocks"] == 2 * BLOCKS)
    node.close()


def test_a_full_disk_degrades_to_host_says_so_and_recovers(tmp_path: Path) -> None:
    node = Node(tmp_path)
    since = node.clock.wall()
    node.fs.fail("pwritev fdatasync", path="*/segments/*", code=errno.ENOSPC)
    keys = node.put(1)
    until(lambda: bool(node.acks))
    assert node.acks[0].outcomes[-1].outcome is PutOutcome.STORED_HOST
    for _ in range(10):
        node.later(6.0)
        until(lambda: not node.ladder.gauges()["kvstore_write_queue_bytes"])
    row = node.row()
    assert (row["state"], row["since"], row["blocks"]) == ("read-only", since, 0)
    assert "no room: " in row["detail"]
    assert "No space left on device" in row["detail"]
    assert node.fetched(keys) == (BLOCKS, None)
    node.fs.heal()
    node.later(6.0)
    until(lambda: node.row()["blocks"] == BLOCKS)
    assert (node.row()["state"], node.row()["detail"]) == ("ok", "")
    node.close()


def test_read_errors_shorten_the_prefix_and_a_segment_in_quarantine_leaves(tmp_path: Path) -> None:
    node = Node(tmp_path)
    keys = node.put_durably(1)
    node = node.reopened()
    (place,) = node.places()
    path = tmp_path / "segments" / f"{place.segment:016x}.seg"
    node.fs.fail("preadv", path=str(path))
    for _ in range(3):
        assert node.fetched(keys) == (0, MissReason.TIER_DOWN)
    node.fs.heal()
    node.later(1.1)
    assert node.fetched(keys) == (0, MissReason.CORRUPT)
    assert node.events.total("kvstore_ssd_errors_total", operation="read") >= 3
    until(lambda: not path.exists())
    assert node.tier.usage().used_bytes == 0
    node.clock.advance(61.0)
    node.put_durably(1)
    assert node.fetched(keys) == (BLOCKS, None)
    node.close()


def test_rot_shortens_the_prefix_where_it_is_and_is_counted(tmp_path: Path) -> None:
    node = Node(tmp_path)
    keys = node.put_durably(1)
    node = node.reopened()
    (place,) = node.places()
    stride = node.space.layout.parts[0].stride_bytes
    path = tmp_path / "segments" / f"{place.segment:016x}.seg"
    node.fs.flip(path, place.offset + place.header_bytes + 5 * stride + 17)
    assert node.fetched(keys) == (5, MissReason.CORRUPT)
    assert node.fetched(keys) == (5, MissReason.CORRUPT)
    assert node.events.total("kvstore_corrupt_total", tier="ssd") == 1
    node.close()


def test_what_a_scrub_finds_bad_leaves_or_is_written_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    first, second = node.put_durably(1), node.put_durably(2)
    node = node.reopened()
    assert node.fetched(second) == (BLOCKS, None)
    places = node.places()
    stride = node.space.layout.parts[0].stride_bytes
    for place in places:
        path = tmp_path / "segments" / f"{place.segment:016x}.seg"
        node.fs.flip(path, place.offset + place.header_bytes + 3 * stride + 17)
    assert node.tier._running is not None
    assert node.tier._running.scrubber.scrub_pass() == 1

    def is_done() -> bool:
        node.later(1.1)  # a frame asleep has to wake first
        return node.places() != places

    until(is_done)
    until(lambda: not node.ladder.gauges()["kvstore_write_queue_bytes"])
    assert node.fetched(first) == (3, MissReason.CORRUPT)
    node = node.reopened()
    assert node.fetched(second) == (BLOCKS, None), "written again from host memory"
    node.close()


def test_verify_does_not_wait_for_ever_and_its_slots_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.core.verifying.READ_SECONDS_MAX", 0.05)
    node = Node(tmp_path)
    keys = node.put_durably(1)
    node = node.reopened()
    node.fs.hang("preadv", path="*.seg")
    faults = [fault for step in node.ladder.verify() for fault in step.faults]
    assert [fault.detail for fault in faults] == ["nothing came in 0 s"]
    assert node.ladder.gauges()["kvstore_host_used_bytes"] > 0, "the disk may still write there"
    node.fs.heal()
    until(lambda: node.ladder.gauges()["kvstore_host_used_bytes"] == 0)
    assert node.fetched(keys) == (BLOCKS, None)
    node.close()
