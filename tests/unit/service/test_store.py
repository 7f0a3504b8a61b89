"""Opening the store: what is taken, what is refused, and that a failure leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.clock import ManualClock
from kvstore.core.eviction import ExactLru, S3Fifo
from kvstore.core.eviction_density import HitDensity
from kvstore.errors import InvalidArgument, KVStoreError, TierUnavailable
from kvstore.events import Events
from kvstore.quantities import MIB
from kvstore.service.store import Store
from kvstore.settings import Settings, load


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


def settings(place: Path, **more: object) -> Settings:
    flags = {
        "server.address": f"unix:{place}/k.sock",
        "host.arena_bytes": "16MiB",
        "host.directory": str(place),
        "ssd.path": str(place / "data"),
        "ssd.min_free_bytes": "1MiB",
        "ssd.segment_bytes": "4MiB",
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return load(environ={}, flags=[(f"--set {key}", key, value) for key, value in flags.items()]).settings


def opened(place: Path, **more: object) -> Store:
    return Store.open(settings(place, **more), clock=ManualClock(), events=Events())


def test_a_store_opens_and_leaves_only_its_data(place: Path) -> None:
    store = opened(place)
    assert store.recover() is not None
    assert store.arena.wait_prefault(30)
    assert store.queued_bytes() == 0
    assert "16.0 MiB" in store.arena_text()
    assert str(place / "data") in store.ssd_text()
    assert store.boot_id
    store.close(deadline_seconds=5)
    assert sorted(path.name for path in place.iterdir()) == ["data"]


def test_the_limit_of_the_disk_is_judged_at_start(place: Path) -> None:
    store = opened(place)
    assert store.ssd is not None
    usage = store.ssd.usage()
    assert 0 < usage.capacity_bytes < usage.free_bytes
    store.close(deadline_seconds=1)
    with pytest.raises(TierUnavailable, match=r"4 segments of 4\.0 MiB must fit"):
        opened(place, ssd__min_free_bytes=1 << 60)
    fixed = opened(place, ssd__capacity_bytes=64 * MIB)
    assert fixed.ssd is not None
    assert fixed.ssd.usage().capacity_bytes == 64 * MIB
    fixed.close(deadline_seconds=1)
    large = opened(place, ssd__capacity_bytes=1 << 60)
    assert any("the disk has room for" in note for note in large.notes())
    large.close(deadline_seconds=1)


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"host__arena_bytes": 1 << 50}, InvalidArgument, r"host\.arena_bytes"),
        ({"host__arena_bytes": 10 << 40}, InvalidArgument, "Choose a smaller arena"),
        ({"host__directory": "/nowhere/at/all"}, KVStoreError, "/nowhere/at/all"),
        ({"host__group": "nobody-has-this"}, InvalidArgument, "nobody-has-this"),
        ({"ssd__path": "/proc/kvstore"}, TierUnavailable, "/proc/kvstore"),
    ],
)
def test_what_cannot_be_is_refused_and_undone(
    more: dict[str, object], error: type[Exception], words: str, place: Path
) -> None:
    with pytest.raises(error, match=words):
        opened(place, **more)
    opened(place).close(deadline_seconds=1)
    assert sorted(path.name for path in place.iterdir()) == ["data"]


def test_one_store_per_directory(place: Path) -> None:
    store = opened(place)
    with pytest.raises(TierUnavailable, match="pid"):
        opened(place, server__address=f"unix:{place}/other.sock")
    store.close(deadline_seconds=1)


def test_without_an_ssd_nothing_is_written(place: Path) -> None:
    store = opened(place, ssd__enabled=False)
    assert store.recover() is None
    assert store.ssd_text().startswith("off")
    store.close(deadline_seconds=1)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(("name", "kind"), [("lru", ExactLru), ("s3fifo", S3Fifo), ("density", HitDensity)])
def test_the_eviction_order_is_a_setting(place: Path, name: str, kind: type) -> None:
    store = opened(place, host__eviction=name)
    assert type(store.ladder.catalog.policy) is kind
    store.close(deadline_seconds=1)


def test_an_abandoned_store_leaves_no_shared_memory(place: Path) -> None:
    store = opened(place)
    assert store.arena.path.exists()
    store.abandon()
    store.abandon()
    assert not store.arena.path.exists()
    assert not store.locks.path.exists()
    store.close(deadline_seconds=1)
