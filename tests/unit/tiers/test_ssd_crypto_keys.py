"""Key documents: what is taken, what is refused, and that no complaint ever shows a key."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import SettingsError
from kvstore.tiers.ssd import crypto_keys
from kvstore.tiers.ssd.crypto_keys import (
    KeyRing,
    KeyState,
    KeyTable,
    TenantKey,
    format_keys,
    parse_keys,
    read_key_file,
    read_table,
    run_key_command,
    tenant_key,
)

HEX = "5e" * 32
KEYS = st.lists(st.one_of(st.none(), st.binary(min_size=32, max_size=32)), max_size=3)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=8)


def numbered(secrets: list[list[bytes | None]]) -> list[tuple[TenantKey, ...]]:
    """Return keys with ids that are given once."""
    ids = iter(range(1, 1000))
    return [
        tuple(TenantKey(next(ids)) if one is None else tenant_key(next(ids), one) for one in some)
        for some in secrets
    ]


@given(st.dictionaries(NAMES, KEYS, max_size=3), KEYS, st.booleans())
def test_a_table_survives_its_document(
    tenants: dict[str, list[bytes | None]], default: list[bytes | None], as_toml: bool
) -> None:
    last, *rest = numbered([default, *tenants.values()])
    table = KeyTable(dict(zip(tenants, rest, strict=True)), last)
    found = parse_keys(format_keys(table, as_toml=as_toml), source="test")
    lost = {name: () for name, keys in table.tenants.items() if not keys and as_toml}
    assert KeyTable({**found.tenants, **lost}, found.default) == table


def test_both_forms() -> None:
    toml = f'[[tenants."acme"]]\nid = 2\nkey = "{HEX}"\n[[tenants.acme]]\nid = 1\nshredded = true\n'
    table = parse_keys(toml, source="test")
    assert table.keys_of("acme") == (tenant_key(2, b"\x5e" * 32), TenantKey(1))
    assert parse_keys(format_keys(table, as_toml=False), source="test") == table
    assert table.next_id() == 3
    assert HEX not in repr(table)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants", "neither TOML nor JSON"),
        ('{"keys": []}', "nothing else"),
        ('{"tenants": []}', "must map"),
        ('{"tenants": {"a": {}}}', "expected a list"),
        ('{"tenants": {"a": [1]}}', "expected id and key"),
        (f'{{"default": [{{"id": 0, "key": "{HEX}"}}]}}', "id must be a number from 1"),
        (f'{{"default": [{{"id": true, "key": "{HEX}"}}]}}', "id must be a number from 1"),
        (f'{{"default": [{{"id": 1, "key": "{HEX[:-2]}"}}]}}', "64 hex digits"),
        ('{"default": [{"id": 1}]}', "64 hex digits"),
        ('{"default": [{"id": 1, "shredded": false}]}', "64 hex digits"),
        (f'{{"default": [{{"id": 1, "key": "{HEX}", "shredded": true}}]}}', "64 hex digits"),
        (f'{{"default": [{{"id": 1, "key": "{HEX}"}}, {{"id": 1, "key": "{HEX}"}}]}}', "twice"),
    ],
)  # fmt: skip
def test_what_is_no_key_document(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        parse_keys(text, source="key file k")
    assert "key file k" in str(caught.value)
    assert HEX[:-2] not in str(caught.value)


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[default]]\nid = 1\nkey = "{HEX}"\n')
    path.chmod(0o640)
    with pytest.raises(SettingsError, match="mode 0640 lets others in"):
        read_key_file(path)
    path.chmod(0o600)
    assert read_table(key_file=path, key_command=()).default == (tenant_key(1, b"\x5e" * 32),)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not text"):
        read_key_file(path)
    with pytest.raises(SettingsError, match="No such file"):
        read_key_file(tmp_path / "none")


def test_keys_come_from_a_command() -> None:
    document = format_keys(KeyTable({"a": (tenant_key(1, b"\x5e" * 32),)}), as_toml=False)
    command = (sys.executable, "-c", f"print({document!r})")
    assert read_table(key_file=None, key_command=command).keys_of("a") == (tenant_key(1, b"\x5e" * 32),)


@pytest.mark.parametrize(
    ("code", "words"),
    [("import sys; sys.exit(3)", "exit code 3"), ("import sys; sys.stdout.buffer.write(b'\\xff')", "no text"),
     ("import time; time.sleep(9)", "no answer")],
)  # fmt: skip
def test_a_command_that_fails_is_told(code: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crypto_keys, "COMMAND_SECONDS_MAX", 0.5 if "sleep" in code else 30.0)
    with pytest.raises(SettingsError, match=words):
        run_key_command((sys.executable, "-c", code))
    with pytest.raises(SettingsError, match="No such file"):
        run_key_command(("/no/such/command",))


def test_a_reload_says_what_changed_and_an_error_keeps_the_old() -> None:
    one, two = tenant_key(1, b"1" * 32), tenant_key(2, b"2" * 32)
    tables = [KeyTable({"a": (one,)}), KeyTable({"a": (two, TenantKey(1)), "b": ()}, default=(TenantKey(9),))]
    ring = KeyRing(lambda: tables[0])
    tables.pop(0)
    found = ring.reload()
    assert (found.added, found.gone, found.shredded) == ((2, 9), (), ("a", None))
    again = ring.reload()
    assert (again.added, again.gone, again.shredded) == ((), (), ())
    tables.clear()
    with pytest.raises(IndexError):
        ring.reload()
    assert ring.find(2, two.check) == two
    assert ring.find(1, one.check) is KeyState.SHREDDED
    assert ring.find(2, two.check ^ 1) is KeyState.WRONG
    assert ring.find(3, 0) is KeyState.MISSING


def test_a_tenant_that_was_shredded_does_not_fall_back_to_the_default_key() -> None:
    table = KeyTable({"a": (TenantKey(1),)}, default=(tenant_key(2, b"2" * 32),))
    ring = KeyRing(lambda: table, shares_default=True)
    assert ring.writing_key("a") == (None, "encryption: tenant 'a' has no living key")
    assert ring.writing_key("b") == (tenant_key(2, b"2" * 32), "")
    lonely = KeyRing(lambda: KeyTable({}), shares_default=True)
    assert lonely.writing_key("b") == (None, "encryption: there is no default key")
    assert KeyRing(lambda: table, encrypts=False).writing_key("a") == (None, "")


def test_without_the_package_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(SettingsError, match=r"pip install 'tiered-kvstore\[encryption\]'"):
        KeyRing(lambda: KeyTable({}))
