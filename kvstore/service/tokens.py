"""Bearer tokens: whose they are and what they allow. Only their hashes are kept in memory.

A tokens file is TOML:

    [[tokens]]
    tenant = "acme"           # opens and uses the namespaces of this tenant, nothing else
    sha256 = "9f86d0..."      # of the token; or token = "..." in the clear

    [[tokens]]
    role = "admin"            # every tenant and the administration service
    token = "..."
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
import threading
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvstore.errors import SettingsError
from kvstore.rpc.channel import AUTHORIZATION
from kvstore.settings import ServerSettings

_log = logging.getLogger(__name__)
TOKEN_CHARACTERS_MIN = 16
TENANT_CHARACTERS_MAX = 128
TOKENS_MAX = 4096
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCHEME = b"Bearer "


class Role(StrEnum):
    """TENANT uses the namespaces of one tenant; ADMIN those of all, and the administration service."""

    TENANT = "tenant"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Grant:
    """What one token allows. An administrator's has no tenant."""

    digest: bytes
    role: Role
    tenant: str = ""


class Tokens:
    """All tokens of a daemon; read again by `reload`.

    Threads: any.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._grants = _read_all(settings)
        self.version = 1

    def reload(self) -> bool:
        """Read the files again and say whether they were taken; a fault is logged and changes nothing."""
        try:
            grants = _read_all(self._settings)
        except SettingsError as error:
            _log.error("tokens are as they were", extra={"error": str(error)})
            return False
        with self._lock:
            self._grants = grants
            self.version += 1
        _log.info("tokens read again", extra={"tokens": len(grants)})
        return True

    def of(self, metadata: Iterable[Any]) -> Grant | None:
        """Return what the bearer token in a call's metadata allows, None without a valid one."""
        for key, value in metadata:
            if key == AUTHORIZATION:
                given = value if isinstance(value, bytes) else str(value).encode(errors="replace")
                return self.find(digest_of(given[len(_SCHEME) :])) if given.startswith(_SCHEME) else None
        return None

    def find(self, digest: bytes) -> Grant | None:
        """Return the grant with a digest; takes as long for every digest."""
        found = None
        for grant in self._grants:
            if hmac.compare_digest(grant.digest, digest):
                found = grant
        return found

    def __len__(self) -> int:
        return len(self._grants)


def digest_of(token: bytes) -> bytes:
    """Return what is kept of a token."""
    return hashlib.sha256(token).digest()


def token_of(settings: ServerSettings) -> str:
    """Return the one token of `server.token` or `server.token_file`; empty if neither is set.

    Errors: SettingsError when the file is missing, open to others, or the token too short to be secret.
    """
    token, key = settings.token.get_secret_value(), "server.token"
    if settings.token_file is not None:
        key = f"server.token_file {settings.token_file}"
        token = _read_secret("server.token_file", settings.token_file).strip()
    elif not token:
        return ""
    return _checked(key, token)


def _read_all(settings: ServerSettings) -> Sequence[Grant]:
    grants: list[Grant] = []
    if token := token_of(settings):
        grants.append(Grant(digest_of(token.encode()), Role.ADMIN))
    if settings.tokens_file is not None:
        text = _read_secret("server.tokens_file", settings.tokens_file)
        grants += _parse(f"server.tokens_file {settings.tokens_file}", text)
    if len({grant.digest for grant in grants}) != len(grants):
        raise SettingsError("server.tokens_file: the same token occurs twice")
    return tuple(grants)


def _read_secret(key: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):
                raise SettingsError(f"{key} {path}: is no file")
            if mode & 0o077:
                raise SettingsError(f"{key} {path}: others may read it; chmod 600 {path}")
            return file.read().decode(errors="replace")
    except OSError as error:
        raise SettingsError(f"{key} {path}: {error.strerror}") from error


def _parse(key: str, text: str) -> list[Grant]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The parser's message quotes no more than a position.
        raise SettingsError(f"{key}: not TOML: {error}") from error
    entries = document.pop("tokens", None)
    if document or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError(f"{key}: expected [[tokens]] tables and nothing else")
    if not 1 <= len(entries) <= TOKENS_MAX:
        raise SettingsError(f"{key}: 1..{TOKENS_MAX} tokens, got {len(entries)}")
    return [_grant(f"{key}: token {number}", entry) for number, entry in enumerate(entries, start=1)]


def _grant(key: str, entry: dict[str, Any]) -> Grant:
    unknown = sorted(entry.keys() - {"tenant", "role", "token", "sha256"})
    if unknown:
        raise SettingsError(f"{key}: unknown key {unknown[0]!r}; known are tenant, role, token, sha256")
    if not all(isinstance(value, str) for value in entry.values()):
        raise SettingsError(f"{key}: tenant, role, token and sha256 are texts")
    role, tenant = entry.get("role", Role.TENANT), entry.get("tenant", "")
    if role not in tuple(Role):
        raise SettingsError(f"{key}: a role is one of {', '.join(Role)}, got {role!r}")
    if role == Role.ADMIN and tenant:
        raise SettingsError(f"{key}: an administrator's token is of no tenant, got {tenant!r}")
    if role == Role.TENANT and not (1 <= len(tenant) <= TENANT_CHARACTERS_MAX and tenant.isprintable()):
        raise SettingsError(f"{key}: a tenant has 1..{TENANT_CHARACTERS_MAX} printable characters")
    if ("token" in entry) == ("sha256" in entry):
        raise SettingsError(f"{key}: give one of token and sha256")
    if "token" in entry:
        return Grant(digest_of(_checked(key, entry["token"]).encode()), Role(role), tenant)
    if not _SHA256.fullmatch(entry["sha256"]):
        raise SettingsError(f"{key}: sha256 has 64 hexadecimal digits in lower case")
    return Grant(bytes.fromhex(entry["sha256"]), Role(role), tenant)


def _checked(key: str, token: str) -> str:
    if len(token) < TOKEN_CHARACTERS_MIN or not token.isascii() or not token.isprintable():
        raise SettingsError(f"{key}: a token has at least {TOKEN_CHARACTERS_MIN} printable ASCII characters")
    return token
