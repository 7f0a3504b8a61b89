"""The keys of tenants: parsed from a key file or a command's output, and kept in a ring that can be reloaded.

The document is TOML or JSON, the same shape in both: `tenants` maps a tenant to its keys, newest first, and
`default` holds the keys of tenants that are not listed. A key is `{id, key}` with 64 hex digits; a shredded
one is `{id, shredded = true}`: its id stays, so that it is never given twice and its frames are known dead.
"""

from __future__ import annotations

import hmac
import json
import os
import stat
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from kvstore.errors import SettingsError

KEY_BYTES = 32
KEY_ID_MAX = (1 << 32) - 1
COMMAND_SECONDS_MAX = 30.0
_CHECK_CONTEXT = b"kvstore ssd key check v1"


@dataclass(frozen=True, slots=True)
class TenantKey:
    """A key by its id; a shredded one has no secret. `check` tells another secret under the same id."""

    key_id: int
    secret: bytes = field(default=b"", repr=False)
    check: int = field(default=0, repr=False)

    @property
    def is_shredded(self) -> bool:
        """Whether the secret is gone for good."""
        return not self.secret


def tenant_key(key_id: int, secret: bytes) -> TenantKey:
    """Return a key with its check value."""
    return TenantKey(
        key_id, secret, int.from_bytes(hmac.digest(secret, _CHECK_CONTEXT, "sha256")[:4], "little")
    )


@dataclass(frozen=True, slots=True)
class KeyTable:
    """What a key document says: the keys of every listed tenant and of all others, newest first."""

    tenants: Mapping[str, tuple[TenantKey, ...]]
    default: tuple[TenantKey, ...] = ()

    def owners(self) -> Iterator[tuple[str | None, tuple[TenantKey, ...]]]:
        """Yield (tenant, keys); None stands for all tenants that are not listed."""
        yield from self.tenants.items()
        if self.default:
            yield None, self.default

    def keys_of(self, owner: str | None) -> tuple[TenantKey, ...]:
        """Return the keys of a tenant, or with None the default keys."""
        return self.default if owner is None else self.tenants.get(owner, ())

    def with_keys(self, owner: str | None, keys: tuple[TenantKey, ...]) -> KeyTable:
        """Return the table with other keys for one owner."""
        if owner is None:
            return replace(self, default=keys)
        return replace(self, tenants={**self.tenants, owner: keys})

    def next_id(self) -> int:
        """Return an id that was never given."""
        return max((key.key_id for _, keys in self.owners() for key in keys), default=0) + 1


def parse_keys(text: str, *, source: str) -> KeyTable:
    """Return what a key document says.

    Errors: SettingsError naming the source and the entry, never a key.
    """
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except ValueError as error:
        # The parsers quote what they stumbled over, and that may be a key.
        raise SettingsError(f"{source}: neither TOML nor JSON") from error
    if not isinstance(document, dict) or set(document) - {"tenants", "default"}:
        raise SettingsError(f"{source}: expected the tables 'tenants' and 'default' and nothing else")
    tenants = document.get("tenants", {})
    if not isinstance(tenants, dict):
        raise SettingsError(f"{source}: 'tenants' must map a tenant to a list of keys")
    table = KeyTable(
        {name: _parse_list(keys, f"{source}: tenant {name!r}") for name, keys in tenants.items()},
        _parse_list(document.get("default", []), f"{source}: default"),
    )
    seen: set[int] = set()
    for owner, keys in table.owners():
        for key in keys:
            if key.key_id in seen:
                name = "default" if owner is None else f"tenant {owner!r}"
                raise SettingsError(f"{source}: {name}: key id {key.key_id} is given twice; ids are unique")
            seen.add(key.key_id)
    return table


def _parse_list(entries: object, where: str) -> tuple[TenantKey, ...]:
    if not isinstance(entries, list):
        raise SettingsError(f"{where}: expected a list of keys, newest first")
    return tuple(_parse_key(entry, f"{where}, key {number}") for number, entry in enumerate(entries, 1))


def _parse_key(entry: object, where: str) -> TenantKey:
    if not isinstance(entry, dict) or set(entry) - {"id", "key", "shredded"}:
        raise SettingsError(f"{where}: expected id and key, or id and shredded")
    key_id = entry.get("id")
    if not isinstance(key_id, int) or isinstance(key_id, bool) or not 1 <= key_id <= KEY_ID_MAX:
        raise SettingsError(f"{where}: id must be a number from 1 to {KEY_ID_MAX}")
    if entry.get("shredded") is True and "key" not in entry:
        return TenantKey(key_id)
    try:
        secret = bytes.fromhex(entry["key"])
    except (KeyError, TypeError, ValueError):
        secret = b""
    if len(secret) != KEY_BYTES or "shredded" in entry:
        raise SettingsError(f"{where} (id {key_id}): key must be {2 * KEY_BYTES} hex digits")
    return tenant_key(key_id, secret)


def format_keys(table: KeyTable, *, as_toml: bool) -> str:
    """Return the key document of a table."""
    if not as_toml:
        plain: dict[str, Any] = {"tenants": {name: _plain(keys) for name, keys in table.tenants.items()}}
        if table.default:
            plain["default"] = _plain(table.default)
        return json.dumps(plain, indent=2) + "\n"
    lines: list[str] = []
    for owner, keys in table.owners():
        head = "[[default]]" if owner is None else f"[[tenants.{json.dumps(owner, ensure_ascii=False)}]]"
        for entry in _plain(keys):
            lines += [head, *(f"{name} = {json.dumps(value)}" for name, value in entry.items()), ""]
    return "\n".join(lines)


def _plain(keys: Sequence[TenantKey]) -> list[dict[str, Any]]:
    return [
        {"id": key.key_id, "shredded": True}
        if key.is_shredded
        else {"id": key.key_id, "key": key.secret.hex()}
        for key in keys
    ]


def read_key_file(path: Path) -> str:
    """Return the content of a key file.

    Errors: SettingsError when it cannot be read, or others than its owner may.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                mode = stat.S_IMODE(found.st_mode)
                raise SettingsError(f"key file {path}: mode {mode:04o} lets others in; `chmod 0600 {path}`")
            return file.read().decode()
    except OSError as error:
        raise SettingsError(f"key file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"key file {path}: not text") from error


def run_key_command(command: Sequence[str]) -> str:
    """Return what a command prints.

    Errors: SettingsError when it fails or does not end in time.
    """
    name = command[0]
    try:
        ended = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False,
            timeout=COMMAND_SECONDS_MAX,
        )  # fmt: skip
        if ended.returncode:
            raise SettingsError(f"key command {name}: exit code {ended.returncode}")
        return ended.stdout.decode()
    except subprocess.TimeoutExpired as error:
        raise SettingsError(f"key command {name}: no answer within {COMMAND_SECONDS_MAX:.0f} s") from error
    except OSError as error:
        raise SettingsError(f"key command {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"key command {name}: it prints no text") from error


def read_table(*, key_file: Path | None, key_command: Sequence[str]) -> KeyTable:
    """Return the keys from a file, else from a command.

    Errors: SettingsError.
    """
    if key_file is not None:
        return parse_keys(read_key_file(key_file), source=f"key file {key_file}")
    return parse_keys(run_key_command(key_command), source=f"key command {key_command[0]}")


def write_key_file(path: Path, table: KeyTable) -> None:
    """Replace a key file as a whole, or create it; what the old one held is overwritten where it lay.

    Errors: SettingsError.
    """
    content = format_keys(table, as_toml=path.suffix == ".toml").encode()
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.unlink(missing_ok=True)
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            if path.exists():
                # Whoever rotates the keys need not be who reads them.
                owner = path.stat()
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        old = path.open("r+b") if path.exists() else None
        os.replace(fresh, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        if old is not None:
            with old:
                old.write(bytes(os.fstat(old.fileno()).st_size))
                old.flush()
                os.fsync(old.fileno())
    except OSError as error:
        raise SettingsError(f"key file {path}: {error.strerror}") from error


class KeyState(Enum):
    """Why a record cannot be decrypted here."""

    MISSING = "missing"
    WRONG = "wrong"
    SHREDDED = "shredded"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload changed. `shredded` are owners some key of whom is gone for good: None is the default."""

    added: tuple[int, ...]
    gone: tuple[int, ...]
    shredded: tuple[str | None, ...]


class KeyRing:
    """The keys at hand.

    `encrypts` says whether new frames are encrypted; without, keys only serve to read old ones.
    `shares_default` lets tenants that are not listed use the default key.

    Threads: thread-safe; a reload swaps everything at once.
    """

    def __init__(
        self, read: Callable[[], KeyTable], *, encrypts: bool = True, shares_default: bool = False
    ) -> None:
        """Read the keys.

        Errors: SettingsError, also when the package that encrypts is not installed.
        """
        _check_library()
        self.encrypts = encrypts
        self._read, self._shares_default = read, shares_default
        self._lock = threading.Lock()
        self._table = read()
        self._by_id = _by_id(self._table)

    def reload(self) -> Reloaded:
        """Read the keys again; on an error the old ones stay.

        Errors: SettingsError.
        """
        table = self._read()
        fresh = _by_id(table)
        with self._lock:
            old, self._table, self._by_id = self._by_id, table, fresh
        dead = {key_id for key_id, key in fresh.items() if key.is_shredded}
        dead -= {key_id for key_id, key in old.items() if key.is_shredded}
        owners = [owner for owner, keys in table.owners() if any(key.key_id in dead for key in keys)]
        return Reloaded(
            tuple(sorted(fresh.keys() - old.keys())), tuple(sorted(old.keys() - fresh.keys())), tuple(owners)
        )

    def writing_key(self, tenant: str) -> tuple[TenantKey | None, str]:
        """Return the key for new frames of a tenant, None for plain ones; or why nothing may be stored."""
        if not self.encrypts:
            return None, ""
        with self._lock:
            table = self._table
        owner = tenant if tenant in table.tenants else None
        if owner is None and not self._shares_default:
            return None, f"encryption: tenant {tenant!r} has no key"
        keys = table.keys_of(owner)
        if not keys or keys[0].is_shredded:
            whose = "there is no default key" if owner is None else f"tenant {tenant!r} has no living key"
            return None, f"encryption: {whose}"
        return keys[0], ""

    def owner_of(self, tenant: str) -> str | None:
        """Return whose keys a tenant uses: its own, or with None the default ones."""
        with self._lock:
            return tenant if tenant in self._table.tenants else None

    def find(self, key_id: int, check: int) -> TenantKey | KeyState:
        """Return the key that a frame names, or why it cannot be used."""
        with self._lock:
            key = self._by_id.get(key_id)
        if key is None:
            return KeyState.MISSING
        if key.is_shredded:
            return KeyState.SHREDDED
        return key if key.check == check else KeyState.WRONG


def find_key(ring: KeyRing | None, key_id: int, check: int) -> TenantKey | KeyState:
    """Return the key that a frame names; without a ring every key is missing."""
    return KeyState.MISSING if ring is None else ring.find(key_id, check)


def _by_id(table: KeyTable) -> dict[int, TenantKey]:
    return {key.key_id: key for _, keys in table.owners() for key in keys}


def _check_library() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            "encryption needs the package cryptography: pip install 'tiered-kvstore[encryption]'"
        ) from error
