"""`kvstore config`: every setting, its value and where it came from."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.output import Sheet, bytes_text, duration_text, emit_json, plain, styled
from kvstore.cli.serve import ConfigOption, SetOption, load_settings
from kvstore.settings import Loaded
from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.ssd.directory import RETENTION_NAME

OriginOption = Annotated[bool, typer.Option("--origin", help="Also show where each value came from.")]
ChangedOption = Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def config(
    config: ConfigOption = None,
    assignments: SetOption = None,
    origin: OriginOption = False,
    changed: ChangedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the settings that `kvstore serve` would run with here. Exit code 2 when one is wrong.

    Weakest first: defaults, the TOML file, variables such as KVSTORE_SSD__PATH, flags; then what
    `kvstore retention set` decided about classes, until they are configured anew.

    Examples:

      kvstore config --origin

      KVSTORE_CLASSES__AGENT__TTL_SECONDS=4d kvstore config --changed --origin

      kvstore config --config kvstore.toml --json
    """
    loaded = _as_decided(load_settings(config, assignments, {}))
    rows = [row for row in loaded.rows() if not changed or row[2] != "default"]
    if as_json:
        emit_json({key: {"value": value, "origin": source} for key, value, source in rows})
        return
    page = Sheet()
    columns = ("key", "value", "origin") if origin else ("key", "value")
    cells = [
        (plain(key), plain(_spoken(key, value)), styled(source, "dim" if source == "default" else "bold"))
        for key, value, source in rows
    ]
    page.table("Settings", columns, cells if origin else [cell[:2] for cell in cells])
    page.show()


def _as_decided(loaded: Loaded) -> Loaded:
    """Return the settings with what was decided on a running daemon of this data directory."""
    ssd = loaded.settings.ssd
    if not (ssd.enabled and (ssd.path / RETENTION_NAME).is_file()):
        return loaded
    from kvstore.service.class_changes import merge, read_decisions

    merged = merge(loaded.settings, read_decisions(OsFileSystem(), ssd.path))
    return Loaded(merged.settings, {**loaded.origins, **merged.origins})


def _spoken(key: str, value: object) -> str:
    if value is None or value == "":
        return "-"
    if key.endswith(("_bytes", "_bytes_max")):
        return bytes_text(value) if isinstance(value, int) and value else str(value)
    if key.endswith("_seconds") and isinstance(value, int | float):
        return duration_text(value)
    return str(value)
