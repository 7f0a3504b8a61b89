"""Tokens: where they come from, what is refused, whom they name, and how they change."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pydantic import SecretStr

from kvstore.errors import SettingsError
from kvstore.service.tokens import Grant, Role, Tokens, digest_of, token_of
from kvstore.settings import ServerSettings

TOKEN = "correct-horse-battery"
ACME = "acme-token-of-20-chars"
BOLT_HASH = hashlib.sha256(b"bolt-token-of-20-chars").hexdigest()
FILE = f"""
[[tokens]]
tenant = "acme"
token = "{ACME}"

[[tokens]]
tenant = "bolt"
role = "tenant"
sha256 = "{BOLT_HASH}"

[[tokens]]
role = "admin"
token = "{TOKEN}"
"""


def settings(**more: object) -> ServerSettings:
    return ServerSettings.model_validate({"address": "unix:/tmp/s", **more})


def secret_file(path: Path, text: str, *, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def tokens_of(path: Path, text: str) -> Tokens:
    return Tokens(settings(tokens_file=secret_file(path / "tokens.toml", text)))


def bearing(token: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {token}")]


def test_the_one_token_comes_from_its_file_and_is_an_administrators(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "token", f"{TOKEN}\n")
    assert token_of(settings(token_file=file)) == TOKEN
    assert token_of(settings(token=SecretStr(TOKEN))) == TOKEN
    assert token_of(settings()) == ""
    grant = Tokens(settings(token_file=file)).of(bearing(TOKEN))
    assert grant == Grant(digest_of(TOKEN.encode()), Role.ADMIN)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (TOKEN, 0o640, "chmod 600"),
        (TOKEN, 0o604, "chmod 600"),
        ("short", 0o600, "at least 16"),
        (TOKEN + "\u00e9", 0o600, "ASCII"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_token_that_is_none(text: str | None, mode: int, words: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if text is not None:
        secret_file(file, text, mode=mode)
    with pytest.raises(SettingsError, match=words) as caught:
        token_of(settings(token_file=file))
    assert text is None or text not in str(caught.value)


def test_a_file_names_tenants_and_administrators(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, FILE)
    assert len(tokens) == 3
    acme, bolt, admin = (tokens.of(bearing(t)) for t in (ACME, "bolt-token-of-20-chars", TOKEN))
    assert acme is not None and (acme.role, acme.tenant) == (Role.TENANT, "acme")
    assert bolt is not None and (bolt.role, bolt.tenant) == (Role.TENANT, "bolt")
    assert admin is not None and (admin.role, admin.tenant) == (Role.ADMIN, "")
    assert tokens.of(bearing(BOLT_HASH)) is None


@pytest.mark.parametrize(
    ("metadata", "passes"),
    [
        (bearing(TOKEN), True),
        ([("other", "x"), ("authorization", f"Bearer {TOKEN}".encode())], True),
        ([("authorization", f"bearer {TOKEN}")], False),
        ([("authorization", TOKEN)], False),
        (bearing(TOKEN + "\u00e9"), False),
        (bearing(TOKEN[:-1]), False),
        (bearing(""), False),
        ([("authorization", b"\xff\x00")], False),
        ([], False),
    ],
)
def test_who_passes(metadata: list[tuple[str, str | bytes]], passes: bool) -> None:
    assert (Tokens(settings(token=SecretStr(TOKEN))).of(metadata) is not None) is passes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[tokens]", "not TOML"),
        ("", "expected"),
        ("tokens = 3", "expected"),
        ("tokens = [3]", "expected"),
        ("tokens = []", "1..4096 tokens, got 0"),
        (f"other = 1\n{FILE}", "nothing else"),
        (f'[[tokens]]\ntoken = "{TOKEN}"', "a tenant has 1..128"),
        (f'[[tokens]]\ntenant = "a"\nrole = "root"\ntoken = "{TOKEN}"', "one of tenant, admin, got 'root'"),
        (f'[[tokens]]\ntenant = "a"\nrole = "admin"\ntoken = "{TOKEN}"', "of no tenant, got 'a'"),
        ('[[tokens]]\ntenant = "a"', "one of token and sha256"),
        (f'[[tokens]]\ntenant = "a"\ntoken = "{TOKEN}"\nsha256 = "{BOLT_HASH}"', "one of token and sha256"),
        ('[[tokens]]\ntenant = "a"\nsha256 = "abc"', "64 hexadecimal digits"),
        ('[[tokens]]\ntenant = "a"\ntoken = "short"', "token 1: a token has at least 16"),
        ('[[tokens]]\ntenant = "a"\ntoken = 7', "are texts"),
        (f'[[tokens]]\ntenant = "a"\nname = "{TOKEN}"', "unknown key 'name'"),
        (f"{FILE}{FILE}", "the same token occurs twice"),
    ],
)
def test_a_file_that_is_none(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        tokens_of(tmp_path, text)
    assert TOKEN not in str(caught.value)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "tokens.toml", FILE, mode=0o644)
    with pytest.raises(SettingsError, match=f"chmod 600 {file}"):
        Tokens(settings(tokens_file=file))
    with pytest.raises(SettingsError, match=r"is no file|Is a directory"):
        Tokens(settings(tokens_file=tmp_path))


def test_a_reload_takes_a_good_file_and_leaves_a_bad_one(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    tokens = tokens_of(tmp_path, FILE)
    secret_file(file, FILE.replace(ACME, "another-token-of-20-chars"))
    assert tokens.reload()
    assert tokens.of(bearing(ACME)) is None
    assert tokens.of(bearing("another-token-of-20-chars")) is not None
    version = tokens.version
    for text, mode in (("[[", 0o600), (FILE, 0o644)):
        secret_file(file, text, mode=mode)
        assert not tokens.reload()
    assert tokens.version == version
    assert tokens.of(bearing("another-token-of-20-chars")) is not None
