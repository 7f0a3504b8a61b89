"""`kvstore keys`: the keys that encrypt what lies on SSD."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.connection import JsonOption
from kvstore.cli.offline import KeyUse, key_uses
from kvstore.cli.output import Sheet, bytes_text, count_text, emit_json, plain, styled
from kvstore.cli.serve import ConfigOption, SetOption, load_settings
from kvstore.errors import InvalidArgument
from kvstore.settings import EncryptionSettings, Settings, has_keys
from kvstore.tiers.ssd.crypto_keys import (
    KEY_BYTES,
    KeyRing,
    KeyTable,
    TenantKey,
    read_table,
    tenant_key,
    write_key_file,
)
from kvstore.tiers.ssd.directory import LOCK_NAME, SEGMENTS_NAME

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Keys of encrypted tenants. The settings say where they are: encryption.key_file or key_command.",
)
DEFAULT_OWNER = "(default)"

TenantArgument = Annotated[
    str | None, typer.Argument(metavar="[TENANT]", help="A tenant by its name.", show_default=False)
]
DefaultOption = Annotated[bool, typer.Option("--default", help="The key of tenants that are not listed.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@dataclass(frozen=True, slots=True)
class KeyView:
    """One key as it is shown; a secret never is."""

    owner: str
    key_id: int
    state: str
    use: KeyUse

    def to_plain(self) -> dict[str, object]:
        """Return the key as JSON-ready values."""
        return {
            "tenant": self.owner,
            "id": self.key_id,
            "state": self.state,
            "segments": self.use.segments,
            "frames": self.use.frames,
            "bytes": self.use.bytes,
        }


def ring_at_hand(key_file: Path | None) -> KeyRing | None:
    """Return the keys of a file, else those of this place's settings; None where there are none.

    Errors: SettingsError.
    """
    if key_file is not None:
        return KeyRing(lambda: read_table(key_file=key_file, key_command=()))
    settings = load_settings(None, None, {}).settings.encryption
    return KeyRing(lambda: _read(settings)) if has_keys(settings) else None


@app.command("list")
def list_keys(
    config: ConfigOption = None, assignments: SetOption = None, as_json: JsonOption = False
) -> None:
    """Show every key, what it is used for, and how much lies on SSD under it; never a secret.

    Examples:

      kvstore keys list --config kvstore.toml
    """
    settings = load_settings(config, assignments, {}).settings
    table = _read(settings.encryption) if has_keys(settings.encryption) else KeyTable({})
    views = list(_views(table, _uses(settings)))
    if as_json:
        emit_json([view.to_plain() for view in views])
        return
    page = Sheet()
    rows = [
        (plain(view.owner), str(view.key_id), styled(view.state, _COLOURS.get(view.state, "default")),
         count_text(view.use.segments), count_text(view.use.frames), bytes_text(view.use.bytes))
        for view in views
    ]  # fmt: skip
    page.table("Keys", ("tenant", "key>", "state", "segments>", "frames>", "bytes>"), rows)
    page.show()


_COLOURS = {"writes": "green", "missing": "bold red", "another secret": "bold red", "shredded": "yellow"}


@app.command()
def rotate(
    tenant: TenantArgument = None,
    default: DefaultOption = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Give a tenant a new key for what is written from now on; the first time, its first one.

    Older frames stay readable while their key is in the file. A running
    daemon is told.

    Examples:

      kvstore keys rotate acme --config kvstore.toml

      kvstore keys rotate --default --set encryption.key_file=/etc/kvstore/keys.toml
    """
    settings = load_settings(config, assignments, {}).settings
    path = _writable_file(settings.encryption)
    owner = _owner(tenant, default)
    table = _read(settings.encryption) if path.exists() else KeyTable({})
    key = tenant_key(table.next_id(), secrets.token_bytes(KEY_BYTES))
    write_key_file(path, table.with_keys(owner, (key, *table.keys_of(owner))))
    page = Sheet()
    page.line(f"{_shown(owner)} writes with key {key.key_id} from now on")
    page.line(_told(settings))
    page.show()


@app.command()
def shred(
    tenant: TenantArgument = None,
    default: DefaultOption = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Destroy every key of a tenant: nothing of it on SSD can ever be read again. Prints a receipt.

    The ids stay in the file, marked as shredded, so that a daemon deletes the
    frames. Copies of the key file, in backups too, have to be destroyed by
    whoever made them.

    Examples:

      kvstore keys shred acme --config kvstore.toml
    """
    settings = load_settings(config, assignments, {}).settings
    path = _writable_file(settings.encryption)
    owner = _owner(tenant, default)
    table = _read(settings.encryption)
    dying = [key for key in table.keys_of(owner) if not key.is_shredded]
    if not dying:
        raise InvalidArgument(f"keys: {_shown(owner)} has no key of its own that could be shredded")
    named = {(key.key_id, key.check) for key in dying}
    uses = [use for use in _uses(settings) if (use.key_id, use.key_check) in named]
    frames, size = sum(use.frames for use in uses), sum(use.bytes for use in uses)
    ids = sorted(key.key_id for key in dying)
    words = (
        f"{_shown(owner)}: keys {', '.join(map(str, ids))}; {count_text(frames)} frames, {bytes_text(size)}"
    )
    if not yes:
        typer.confirm(f"Make unreadable for ever: {words}?", abort=True, err=True)
    write_key_file(path, table.with_keys(owner, tuple(TenantKey(key.key_id) for key in table.keys_of(owner))))
    told = _told(settings)
    if as_json:
        name = DEFAULT_OWNER if owner is None else owner
        emit_json({"tenant": name, "keys": ids, "frames": frames, "bytes": size, "daemon": told})
        return
    page = Sheet()
    page.line(f"shredded {words} can never be read again")
    page.line(told)
    page.line(
        "what else holds a copy of the key file has to be destroyed as well: backups, snapshots, old disks"
    )
    page.show()


def _read(encryption: EncryptionSettings) -> KeyTable:
    return read_table(key_file=encryption.key_file, key_command=encryption.key_command or ())


def _uses(settings: Settings) -> list[KeyUse]:
    root = settings.ssd.path
    return key_uses(root) if (root / SEGMENTS_NAME).is_dir() else []


def _views(table: KeyTable, uses: list[KeyUse]) -> list[KeyView]:
    """Join what the file says with what the disk says."""
    by_name = {(use.key_id, use.key_check): use for use in uses}
    views: list[KeyView] = []
    for owner, keys in table.owners():
        for position, key in enumerate(keys):
            name = DEFAULT_OWNER if owner is None else owner
            state = "shredded" if key.is_shredded else "reads" if position else "writes"
            if key.is_shredded:
                dead = [by_name.pop(named) for named in list(by_name) if named[0] == key.key_id]
                use = KeyUse(key.key_id, 0, *(sum(getattr(u, f) for u in dead) for f in _COUNTS))
            else:
                use = by_name.pop((key.key_id, key.check), KeyUse(key.key_id, key.check))
            views.append(KeyView(name, key.key_id, state, use))
    known = {view.key_id for view in views}
    for use in by_name.values():
        state = "another secret" if use.key_id in known else "missing" if use.key_id else "not encrypted"
        views.append(KeyView("-", use.key_id, state, use))
    return views


_COUNTS = ("segments", "frames", "bytes")


def _writable_file(encryption: EncryptionSettings) -> Path:
    if encryption.key_file is None:
        raise InvalidArgument(
            "keys: encryption.key_file is not set; keys that come from a command are changed where it takes "
            'them from (a shredded one is {"id": N, "shredded": true}), then `kill -HUP` the daemon'
        )
    return encryption.key_file


def _owner(tenant: str | None, default: bool) -> str | None:
    if (tenant is None) != default:
        raise InvalidArgument('keys: name a tenant ("" is one too), or say --default')
    return tenant


def _shown(owner: str | None) -> str:
    return "the default key" if owner is None else f"tenant {owner!r}"


def _told(settings: Settings) -> str:
    """Tell the daemon of the data directory to read its keys again; returns what came of it."""
    path = settings.ssd.path / LOCK_NAME
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _signal(path.read_text().strip())
        finally:
            os.close(handle)
    return "no daemon runs; the next start reads the keys"


def _signal(pid: str) -> str:
    try:
        os.kill(int(pid), signal.SIGHUP)
    except (ValueError, OSError) as error:
        return f"the daemon with pid {pid or 'unknown'} could not be told ({error}); `kill -HUP` it"
    return f"the daemon with pid {pid} was told to read its keys again"
