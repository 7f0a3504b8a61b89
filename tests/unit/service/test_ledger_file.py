"""The departed ledger across restarts of a store: kept, late, lost or damaged, and never a wrong reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore import hashing
from kvstore.api import MatchRequest
from kvstore.clock import ManualClock
from kvstore.core.ledger import LedgerImage
from kvstore.events import Events
from kvstore.retention import HOUR
from kvstore.service.ledger_file import decode, encode
from kvstore.service.store import Store
from kvstore.types import HASH_BYTES, MissReason
from tests.support.driver import namespace, put
from tests.unit.service.test_store import settings

SPACE = namespace()
ROOT = hashing.chain_root(SPACE.fingerprint)


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


def keys(salt: int) -> bytes:
    return hashing.block_hashes(ROOT, [salt, *range(1, 12)], block_tokens=4)


def opened(place: Path, clock: ManualClock) -> Store:
    store = Store.open(settings(place), clock=clock, events=Events())
    store.recover()
    store.ladder.open(SPACE, root=ROOT)
    return store


def reason(store: Store, salt: int) -> MissReason | None:
    return store.ladder.match(MatchRequest(namespace=SPACE.fingerprint, keys=keys(salt))).reason


def expire_some(store: Store, clock: ManualClock) -> None:
    put(store.ladder, SPACE, ROOT, keys(1), retention_class="handoff")
    clock.advance(HOUR)
    store.ladder.tick()
    put(store.ladder, SPACE, ROOT, keys(2))


def test_reasons_survive_an_orderly_restart(place: Path) -> None:
    clock = ManualClock()
    store = opened(place, clock)
    expire_some(store, clock)
    assert reason(store, 1) is MissReason.EXPIRED
    store.close(deadline_seconds=20)
    store = opened(place, clock)
    assert (reason(store, 1), reason(store, 2), reason(store, 3)) == (
        MissReason.EXPIRED,
        None,
        MissReason.NEVER_STORED,
    )
    store.close(deadline_seconds=5)


def test_what_lay_in_host_memory_alone_is_forgotten_by_a_restart(place: Path) -> None:
    clock = ManualClock()
    store = opened(place, clock)
    put(store.ladder, SPACE, ROOT, keys(1), retention_class="swa")
    store.close(deadline_seconds=20)
    store = opened(place, clock)
    assert reason(store, 1) is MissReason.FORGOTTEN
    store.close(deadline_seconds=5)


@pytest.mark.parametrize("fate", ["killed", "lost", "damaged", "other version"])
def test_a_ledger_that_may_lack_something_only_forgets(place: Path, fate: str) -> None:
    clock = ManualClock()
    store = opened(place, clock)
    expire_some(store, clock)
    assert store.ledger is not None
    store.ledger.save()
    path = place / "data" / "departed"
    content = path.read_bytes()
    store.close(deadline_seconds=20)
    match fate:
        case "killed":
            path.write_bytes(content)
        case "lost":
            path.unlink()
        case "damaged":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case _:
            path.write_bytes(content.replace(b'"version": 1', b'"version": 2'))
    store = opened(place, clock)
    kept = MissReason.EXPIRED if fate == "killed" else MissReason.FORGOTTEN
    assert (reason(store, 1), reason(store, 2), reason(store, 3)) == (kept, None, MissReason.FORGOTTEN)
    store.close(deadline_seconds=5)


def test_the_file_is_written_again_only_when_something_left(place: Path) -> None:
    clock = ManualClock()
    store = opened(place, clock)
    assert store.ledger is not None
    path = place / "data" / "departed"
    before = path.stat().st_ino
    store.ledger.save()
    assert path.stat().st_ino == before
    expire_some(store, clock)
    store.ledger.save()
    assert path.stat().st_ino != before
    store.close(deadline_seconds=20)


def test_the_file_says_what_it_was_given() -> None:
    image = LedgerImage(bytes(range(16)), bytes(36), b"\x01\x00", ("", "agent"), 1 << 40)
    assert decode(encode(image, is_complete=True)) == (image, True)
    assert len(keys(1)) == 3 * HASH_BYTES
