"""`kvstore serve`: run the daemon in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.errors import SettingsError
from kvstore.settings import Loaded, load

if TYPE_CHECKING:
    from kvstore.told_clock import ToldClock

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="TOML file; also $KVSTORE_CONFIG.", show_default=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any setting; see `kvstore config`."),
]


def _flag(flag: str, key: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(flag, help=f"Sets {key}.", show_default=False)
    return option


AddressOption = Annotated[str | None, _flag("--address", "server.address")]
DataOption = Annotated[str | None, _flag("--data", "ssd.path")]
ArenaOption = Annotated[str | None, _flag("--arena", "host.arena_bytes")]
CapacityOption = Annotated[str | None, _flag("--capacity", "ssd.capacity_bytes")]
TcpOption = Annotated[str | None, _flag("--tcp", "server.tcp_address")]
MetricsOption = Annotated[str | None, _flag("--metrics", "server.metrics_address")]
LevelOption = Annotated[str | None, _flag("--log-level", "log.level")]


def load_settings(config: Path | None, assignments: list[str] | None, named: dict[str, str | None]) -> Loaded:
    """Merge defaults, file, environment and flags; `named` maps a setting to what its own flag says.

    Errors: SettingsError.
    """
    flags: list[tuple[str, str, object]] = []
    names = {
        "server.address": "--address",
        "ssd.path": "--data",
        "host.arena_bytes": "--arena",
        "ssd.capacity_bytes": "--capacity",
        "server.tcp_address": "--tcp",
        "server.metrics_address": "--metrics",
        "log.level": "--log-level",
    }
    flags += [(names[key], key, value) for key, value in named.items() if value is not None]
    for assignment in assignments or ():
        key, equals, value = assignment.partition("=")
        if not equals:
            raise SettingsError(
                f"flag --set {assignment}: expected KEY=VALUE, such as ssd.capacity_bytes=64GiB"
            )
        flags.append((f"--set {key.strip()}", key.strip(), value.strip()))
    return load(environ=os.environ, config=config, flags=flags)


def serve(
    config: ConfigOption = None,
    address: AddressOption = None,
    data: DataOption = None,
    arena: ArenaOption = None,
    capacity: CapacityOption = None,
    tcp: TcpOption = None,
    metrics: MetricsOption = None,
    log_level: LevelOption = None,
    assignments: SetOption = None,
) -> None:
    """Run the daemon until SIGTERM. No configuration is needed: sizes come from the machine and are printed.

    SIGTERM or Ctrl-C writes what is queued and ends; a second one ends at once.

    Examples:

      kvstore serve

      kvstore serve --data /mnt/nvme/kvstore --arena 64GiB --capacity 2TiB

      kvstore serve --set classes.agent.ttl_seconds=4d
    """
    named = {
        "server.address": address,
        "ssd.path": data,
        "host.arena_bytes": arena,
        "ssd.capacity_bytes": capacity,
        "server.tcp_address": tcp,
        "server.metrics_address": metrics,
        "log.level": log_level,
    }
    loaded = load_settings(config, assignments, named)
    # Help and bad settings answer without loading the daemon.
    from kvstore.log import configure
    from kvstore.service.daemon import Daemon

    configure(level=loaded.settings.log.level, line_format=loaded.settings.log.format)
    clock = _told_clock()
    raise typer.Exit(Daemon(loaded, say=typer.echo, clock=clock).run())


def _told_clock() -> ToldClock | None:
    """Return the clock of a test in which time passes as it says; said aloud, for it ruins a real store."""
    from kvstore.told_clock import TEST_CLOCK_VARIABLE, ToldClock

    path = os.environ.get(TEST_CLOCK_VARIABLE)
    if not path:
        return None
    typer.echo(f"TEST CLOCK: time is what {path} says (${TEST_CLOCK_VARIABLE}); not for a store that is used")
    return ToldClock(Path(path))
