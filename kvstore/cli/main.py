"""`kvstore`: the command table. A command's module is imported when that command runs, so help stays fast."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvstore import __version__
from kvstore.cli.output import EXIT_MISUSE, EXIT_PROBLEM, complain
from kvstore.errors import InvalidArgument, KVStoreError, SettingsError

# The root of every usage error. Typer carries its own click, so it is reached through what typer exports.
CLICK_ERROR: type[Exception] = typer.BadParameter.__bases__[0].__bases__[0]

TRACEBACK_VARIABLE = "KVSTORE_TRACEBACK"
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives: `attribute` of `module` is its function, or a typer app with sub-commands."""

    module: str
    attribute: str
    summary: str
    panel: str


RUN, LOOK, JUDGE = "Run", "Look", "Judge"
COMMANDS: dict[str, Entry] = {
    "serve": Entry("serve", "serve", "Run the daemon: no configuration needed.", RUN),
    "demo": Entry("demo", "demo", "A real model's prefix goes in, survives a restart, and comes back.", RUN),
    "config": Entry("config", "config", "Show every setting, its value and where it came from.", RUN),
    "retention": Entry(
        "retention", "app", "Classes of a running daemon: list, set, undo, forecast, advice.", LOOK
    ),
    "hit-rate": Entry("hit_rate", "hit_rate", "Hit rates of the recent past, and why the rest missed.", LOOK),
    "why": Entry("why", "why", "What stopped a request, and what would have saved it.", LOOK),
    "purge": Entry("purge", "purge", "Remove a namespace, tenant, class or prefix for good.", RUN),
    "status": Entry("status", "status", "Tiers, classes, hit rates by tier, queues, health.", LOOK),
    "inspect": Entry("inspect", "app", "Namespaces, blocks and segments; also of a stopped store.", LOOK),
    "verify": Entry("verify", "verify", "Read everything again and check every digest.", JUDGE),
    "doctor": Entry(
        "doctor", "doctor", "Is this machine fit, does the daemon work, and what to do if not.", JUDGE
    ),
    "simulate": Entry("simulate", "simulate", "A request trace: its hit rate at a TTL and capacity.", JUDGE),
    "keys": Entry("keys", "app", "Keys of encrypted tenants: list, rotate, shred.", JUDGE),
    "drive": Entry("drive", "drive", "A trace against a daemon: measured and simulated hit rate.", JUDGE),
    "plan": Entry("plan", "plan", "What a longer TTL or more room would buy, and the knee.", JUDGE),
    "engine": Entry("engine", "app", "The bundled engine: generate, chat, serve a worker.", RUN),
    "bench": Entry("bench", "bench", "Measure against honest baselines, with the bars to reach.", JUDGE),
}


class LazyCommand(TyperCommand):
    """A line of help until it is called; then the real command takes over."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.summary, rich_help_panel=entry.panel)
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and let it parse; the context it returns is the real command's own."""
        return load(self.name or "", self._entry).make_context(info_name, args, parent=parent, **extra)


def load(name: str, entry: Entry) -> Any:
    """Return the real command behind an entry."""
    found = getattr(import_module(f"kvstore.cli.{entry.module}"), entry.attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    single = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    single.command(name)(found)
    return typer.main.get_command(single)


class LazyGroup(TyperGroup):
    """The top command: knows the names and summaries of all others without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the stand-in of a command, or None."""
        entry = COMMANDS.get(cmd_name)
        return LazyCommand(cmd_name, entry) if entry else None


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 found a problem, 2 misuse. `kvstore COMMAND --help` shows examples.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstore {__version__}")
        raise typer.Exit


@app.callback()
def top(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A tiered, persistent KV cache for LLM serving: host memory and SSD behind one daemon."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; never returns. Errors are one line on stderr, without a traceback."""
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(run(given))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = app(args=arguments or ["--help"], prog_name="kvstore", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:
            complain("interrupted")
        return code if isinstance(code, int) else 0
    except CLICK_ERROR as error:
        return _misuse(error)
    except (InvalidArgument, SettingsError) as error:
        complain(str(error))
        return EXIT_MISUSE
    except KVStoreError as error:
        complain(str(error))
        return EXIT_PROBLEM
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`| head`); keep the interpreter's own flush at exit from complaining.
        sys.stdout = None
        return EXIT_PROBLEM
    except OSError as error:
        complain(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
        return EXIT_PROBLEM
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        complain(f"a bug: {type(error).__name__}: {error}; {TRACEBACK_VARIABLE}=1 shows where")
        return EXIT_PROBLEM


def _misuse(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "kvstore"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    complain(f"{message} (see {path} --help)")
    return EXIT_MISUSE


if __name__ == "__main__":
    main()
