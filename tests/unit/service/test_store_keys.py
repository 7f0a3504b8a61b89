"""Keys of a running store: they are read again on request, and a shredded tenant is forgotten at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import SettingsError
from kvstore.events import Events
from kvstore.service.store import Store
from kvstore.testing.frames import two_part_namespace
from kvstore.tiers.ssd.crypto_keys import KeyTable, TenantKey, format_keys, tenant_key
from tests.unit.service.test_store import settings

ACME = tenant_key(1, b"\x11" * 32)


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


def put_keys(path: Path, *keys: TenantKey) -> None:
    path.touch(mode=0o600)
    path.write_text(format_keys(KeyTable({"acme": keys}), as_toml=True))


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


def test_a_shredded_tenant_is_forgotten_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_keys(place / "keys.toml", ACME)
    store = encrypted(place)
    acme, other = (replace(two_part_namespace(), tenant=tenant) for tenant in ("acme", "other"))
    for namespace in (acme, other):
        store.ladder.open(namespace)
    deleted: list[bytes] = []

    def delete(namespace: bytes, keys: bytes | None) -> int:
        deleted.append(namespace)
        return 0

    monkeypatch.setattr(store.ladder, "delete", delete)
    put_keys(place / "keys.toml", tenant_key(2, b"\x22" * 32), ACME)
    store.reload_keys()
    assert deleted == []
    put_keys(place / "keys.toml", tenant_key(2, b"\x22" * 32), TenantKey(1))
    store.reload_keys()
    assert deleted == [acme.fingerprint]
    store.close(deadline_seconds=5)
