"""Keys of a running store: they are read again on request, and a shredded tenant is forgotten at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import numpy as np
import pytest

from kvstore import hashing
from kvstore.api import CommitAnswer, MatchRequest
from kvstore.clock import ManualClock
from kvstore.core.purging import Target
from kvstore.errors import SettingsError
from kvstore.events import Events
from kvstore.retention import DEFAULT_CLASS
from kvstore.service.store import Store
from kvstore.tiers.ssd.crypto_keys import KeyTable, TenantKey, format_keys, tenant_key
from kvstore.types import HASH_BYTES, AckTier, MissReason, PutOutcome
from tests.support.driver import check_extents, namespace, put
from tests.unit.service.test_store import settings

ACME, OTHER = tenant_key(1, b"\x11" * 32), tenant_key(2, b"\x22" * 32)
WAIT_SECONDS = 30.0


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


def put_keys(path: Path, *keys: TenantKey, other: TenantKey | None = None) -> None:
    path.touch(mode=0o600)
    tenants = {"acme": keys} | ({"other": (other,)} if other is not None else {})
    path.write_text(format_keys(KeyTable(tenants), as_toml=True))


def encrypted(place: Path) -> Store:
    more = {"encryption__enabled": "true", "encryption__key_file": str(place / "keys.toml")}
    store = Store.open(settings(place, **more), clock=ManualClock(), events=Events())
    store.recover()
    return store


def test_without_keys_nothing_is_imported() -> None:
    code = "import sys, kvstore.service.daemon; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_key_file_that_cannot_be_read_keeps_the_store_from_opening(place: Path) -> None:
    with pytest.raises(SettingsError, match="key file"):
        encrypted(place)
    assert not list(place.glob("*.sock*"))


def test_a_reload_that_fails_keeps_the_old_keys(place: Path) -> None:
    put_keys(place / "keys.toml", ACME)
    store = encrypted(place)
    (place / "keys.toml").write_text("[")
    store.reload_keys()
    assert store.keys is not None
    assert store.keys.writing_key("acme") == (ACME, "")
    assert store.events.counters()["kvstore_key_reload_failures_total", ()] == 1
    store.close(deadline_seconds=5)


class Tenant:
    """A tenant with one chain of blocks that is acknowledged on SSD."""

    def __init__(self, store: Store, name: str) -> None:
        self.space = replace(namespace(parts=2), tenant=name)
        self.root = root = hashing.chain_root(self.space.fingerprint)
        self.keys = hashing.block_hashes(root, np.arange(32), block_tokens=4)
        store.ladder.open(self.space, root=root)
        self._put(store, self.keys)

    def _put(self, store: Store, keys: bytes) -> None:
        answers, came = Answers(), Event()
        answers.came = came
        put(store.ladder, self.space, self.root, keys, ack=AckTier.SSD, acks=answers)
        assert came.wait(WAIT_SECONDS)
        assert answers[0].outcomes[-1].outcome is PutOutcome.STORED_SSD

    def goes_on(self, store: Store) -> None:
        """Append to the chain: a frame that follows the first one."""
        self._put(store, hashing.block_hashes(self.root, np.arange(64), block_tokens=4))

    def match(self, store: Store) -> tuple[int, MissReason | None]:
        """Match the chain and wait until what there is of it is resident and checked."""
        loaded = Event()
        store.ladder.open(self.space, root=self.root)
        request = MatchRequest(namespace=self.space.fingerprint, keys=self.keys)
        answer = store.ladder.match(request, lambda progress: loaded.set() if progress.done else None)
        blocks, reason, extents = answer.blocks, answer.reason, answer.extents
        if answer.lease and not answer.ready:
            assert loaded.wait(WAIT_SECONDS)
            progress = store.ladder.watch(answer.lease)
            blocks, reason, extents = progress.blocks, progress.reason, progress.extents
        assert check_extents(store.ladder, self.space, self.keys, extents) == 2 * blocks
        if answer.lease:
            store.ladder.release(answer.lease, used=blocks)
        return blocks, reason


class Answers(list[CommitAnswer]):
    """A list that says when something came."""

    came: Event

    def append(self, answer: CommitAnswer) -> None:
        super().append(answer)
        self.came.set()


def reopened(place: Path, store: Store) -> Store:
    """Start again: nothing is in host memory."""
    store.close(deadline_seconds=5)
    return encrypted(place)


def test_a_shredded_tenant_is_forgotten_at_once(place: Path) -> None:
    put_keys(place / "keys.toml", ACME, other=OTHER)
    store = encrypted(place)
    acme, other = Tenant(store, "acme"), Tenant(store, "other")
    put_keys(place / "keys.toml", tenant_key(3, b"\x33" * 32), ACME, other=OTHER)
    store.reload_keys()
    assert acme.match(store) == (8, None)
    put_keys(place / "keys.toml", tenant_key(3, b"\x33" * 32), TenantKey(1), other=OTHER)
    store.reload_keys()
    assert acme.match(store) == (0, MissReason.DELETED)
    assert other.match(store) == (8, None)
    store = reopened(place, store)
    assert acme.match(store)[0] == 0
    assert other.match(store) == (8, None)
    store.close(deadline_seconds=5)


def test_what_a_reload_missed_is_forgotten_when_it_is_read(place: Path) -> None:
    put_keys(place / "keys.toml", ACME)
    store = encrypted(place)
    acme = Tenant(store, "acme")
    store = reopened(place, store)
    put_keys(place / "keys.toml", TenantKey(1))
    assert store.keys is not None
    store.keys.reload()
    assert acme.match(store) == (0, MissReason.DELETED)
    assert store.ladder.match(MatchRequest(namespace=acme.space.fingerprint, keys=acme.keys)).blocks == 0
    store.close(deadline_seconds=5)


def test_a_key_that_is_gone_for_a_while_loses_nothing(place: Path) -> None:
    """Not even to verify: what cannot be read now is reported, and left where it is."""
    put_keys(place / "keys.toml", ACME)
    store = encrypted(place)
    acme = Tenant(store, "acme")
    store = reopened(place, store)
    put_keys(place / "keys.toml", OTHER)
    store.reload_keys()
    assert acme.match(store) == (0, MissReason.TIER_DOWN)
    faults = [fault for step in store.ladder.verify(None) for fault in step.faults]
    assert "encrypted with key 1, which is missing" in faults[0].detail
    put_keys(place / "keys.toml", ACME)
    store.reload_keys()
    assert acme.match(store) == (8, None)
    store.close(deadline_seconds=5)


@pytest.mark.parametrize("by", ["namespace", "tenant", "class", "blocks"])
def test_a_purge_reaches_what_this_start_cannot_read(place: Path, by: str) -> None:
    put_keys(place / "keys.toml", ACME, other=OTHER)
    store = encrypted(place)
    acme, other = Tenant(store, "acme"), Tenant(store, "other")
    acme.goes_on(store)
    store.close(deadline_seconds=5)
    put_keys(place / "keys.toml", tenant_key(3, b"\x33" * 32), other=OTHER)
    store = encrypted(place)
    assert acme.match(store)[0] == 0
    purge = store.ladder.purge(
        {
            "namespace": Target(namespace=acme.space.fingerprint),
            "tenant": Target(tenant="acme"),
            "class": Target(retention_class=DEFAULT_CLASS),
            "blocks": Target(namespace=acme.space.fingerprint, keys=acme.keys[:HASH_BYTES]),
        }[by]
    )
    end = time.monotonic() + WAIT_SECONDS
    while not purge.is_durable and time.monotonic() < end:
        store.ladder.look_after(purge)
        time.sleep(0.01)
    assert purge.is_durable
    assert purge.ssd_bytes > 2 * 8 * 4096
    store.close(deadline_seconds=5)
    put_keys(place / "keys.toml", ACME, other=OTHER)
    store = encrypted(place)
    assert acme.match(store)[0] == 0
    assert other.match(store)[0] == (0 if by == "class" else 8)
    store.close(deadline_seconds=5)
