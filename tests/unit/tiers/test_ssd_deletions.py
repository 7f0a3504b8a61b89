"""Deletions last: whatever the disk refused in between, and however old the index is that a start finds."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import TierUnavailable
from kvstore.testing.tier_suite import found_frames, registered, written
from kvstore.tiers.base import SliceTouch, TouchNote
from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.ssd.index import Change, Index
from tests.support.fault_fs import FaultFileSystem
from tests.support.ssd import open_ssd, recovered_ssd

WAIT_SECONDS = 30.0


@pytest.mark.parametrize("has_file", [True, False])
def test_an_index_that_is_older_than_a_deletion_is_checked_against_the_frames(
    tmp_path: Path, has_file: bool
) -> None:
    store = tmp_path / "store"
    tier = recovered_ssd(store)
    builder = registered(tier)
    places = written(tier, [builder.frame(2) for _ in range(4)])
    tier.annotate([TouchNote(places[3], (SliceTouch.whole("chat", 1_700_000_500.0),))])
    tier.delete(places[2:3]).result(WAIT_SECONDS)
    if has_file:
        shutil.copytree(store / "index", tmp_path / "older")
    tier.delete(places[:1]).result(WAIT_SECONDS)
    tier.close(deadline_seconds=WAIT_SECONDS)
    if has_file:
        shutil.rmtree(store / "index")
        (tmp_path / "older").rename(store / "index")
    else:
        (store / "deletions").unlink()
    for _ in range(2):
        again = open_ssd(store)
        found = found_frames(again)
        assert [frame.location for frame in found] == [places[1], places[3]]
        assert [touch.retention_class for touch in found[1].touches] == ["chat"], "touches are kept"
        assert again.report().frames == 2
        again.close(deadline_seconds=WAIT_SECONDS)
    assert recovered_ssd(store)._recovery._must_check_rows is False


def test_a_refused_deletion_says_so_and_is_done_when_it_is_asked_again(tmp_path: Path) -> None:
    fs = FaultFileSystem()
    tier = recovered_ssd(tmp_path, fs=fs)
    builder = registered(tier)
    places = written(tier, [builder.frame(2) for _ in range(2)])
    for calls in ("open", "preadv", "pwritev", "fdatasync"):
        fs.fail(calls, code=errno.EIO)
        with pytest.raises(TierUnavailable, match="may bring it back"):
            tier.delete(places[:1]).result(WAIT_SECONDS)
        fs.heal()
    tier.delete(places[:1]).result(WAIT_SECONDS)
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = open_ssd(tmp_path)
    assert [frame.location for frame in found_frames(again)] == places[1:]
    again.close(deadline_seconds=WAIT_SECONDS)


def test_what_was_refused_after_it_was_written_does_not_return_once_it_is_deleted(tmp_path: Path) -> None:
    fs = FaultFileSystem()
    tier = recovered_ssd(tmp_path, fs=fs)
    builder = registered(tier)
    places = written(tier, [builder.frame(2)])
    fs.fail("fdatasync truncate", code=errno.EIO)
    (refused,) = tier.write([builder.frame(2).write])
    assert refused.result(WAIT_SECONDS).location is None
    with pytest.raises(TierUnavailable):
        tier.delete([]).result(WAIT_SECONDS)
    fs.heal()
    assert tier.delete([]).result(WAIT_SECONDS) == 0
    tier.close(deadline_seconds=WAIT_SECONDS)
    again = open_ssd(tmp_path)
    assert [frame.location for frame in found_frames(again)] == places
    again.close(deadline_seconds=WAIT_SECONDS)


def test_after_the_end_nothing_is_promised(tmp_path: Path) -> None:
    tier = recovered_ssd(tmp_path)
    places = written(tier, [registered(tier).frame(2)])
    tier.close(deadline_seconds=WAIT_SECONDS)
    for late in (tier.delete(places), tier.unlink([places[0].segment])):
        with pytest.raises(TierUnavailable, match="ended"):
            late.result(WAIT_SECONDS)


def test_unlinks_that_are_not_urgent_share_a_sync_and_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = recovered_ssd(tmp_path)
    builder = registered(tier)
    places = written(tier, [builder.frame(1, bucket=bucket) for bucket in "abcd"])
    tier.sync_index().result(WAIT_SECONDS)
    commit, gone = Index.commit, list[int]()
    sync, syncs = OsFileSystem.fsync_directory, list[Path]()

    def count(index: Index, change: Change, **how: Any) -> Any:
        gone.append(len(change.segments_gone))
        return commit(index, change, **how)

    def note(fs: OsFileSystem, path: Path) -> None:
        syncs.append(path)
        sync(fs, path)

    monkeypatch.setattr(Index, "commit", count)
    monkeypatch.setattr(OsFileSystem, "fsync_directory", note)
    unlinks = [tier.unlink([place.segment], is_urgent=False) for place in places]
    for unlink in unlinks:
        unlink.result(WAIT_SECONDS)
    # The regular commit may come in between.
    assert len(syncs) == len(gone) <= 2
    assert sum(gone) == 4
    tier.close(deadline_seconds=WAIT_SECONDS)
