"""`kvstore demo`: a real model's prefix goes in, survives a restart, and comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvstore.cli.output import EXIT_FINE, EXIT_PROBLEM, console, emit_json
from kvstore.errors import TierUnavailable

TOKENS_DEFAULT, TOKENS_QUICK = 4_000, 1_200
SOCKET_PATH_BYTES_MAX = 100
"""Longer unix socket paths are refused by the kernel (108 with the terminator)."""
SECONDS_WORTH_A_LINE = 2.0


class Dtype(StrEnum):
    """What the model computes in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


TokensOption = Annotated[
    int | None,
    typer.Option("--tokens", "-n", metavar="N", help=f"Length of the text; {TOKENS_DEFAULT} without it."),
]
QuickOption = Annotated[bool, typer.Option("--quick", help=f"A shorter text: {TOKENS_QUICK} tokens.")]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="bfloat16 is faster, but rounds by row count: ids may differ.")
]
KeepOption = Annotated[bool, typer.Option("--keep", help="Keep the demo's directory, to look into it.")]
JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Also write the results as JSON; - is stdout, alone.",
        show_default=False,
    ),
]


def demo(
    tokens: TokensOption = None,
    quick: QuickOption = False,
    dtype: DtypeOption = Dtype.FLOAT32,
    keep: KeepOption = False,
    json_file: JsonOption = None,
) -> None:
    """Hold one conversation about a long text across three worker processes and a daemon restart.

    A small real model (SmolLM2-135M-Instruct) answers three questions, each in
    another state of the store: empty, in host memory, and on SSD after the daemon
    was stopped and started again. Every answer is compared with that of the
    library alone. The daemon is the demo's own; yours is not touched.
    Exit code 1 when an answer differs or a hit is missing.

    Examples:

      kvstore demo

      kvstore demo --quick --json -

      kvstore demo --tokens 2000 --keep
    """
    for package in ("torch", "transformers", "gguf"):
        if find_spec(package) is None:
            raise TierUnavailable(
                f"the demo needs {package}: pip install 'tiered-kvstore[daemon,transformers]'"
            )
    from kvstore.cli.demo_report import document, sheet
    from kvstore.cli.demo_story import Story
    from kvstore.cli.demo_text import checked_length

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends daemon and workers too, as Ctrl-C does
    length = checked_length(tokens if tokens is not None else TOKENS_QUICK if quick else TOKENS_DEFAULT)
    with _own_directory(keep) as directory:
        screen = console(stderr=True)
        screen.print(escape(f"kvstore demo in {directory}"), style="bold", soft_wrap=True)
        story = Story(directory, tokens=length, dtype=str(dtype), step=lambda text: _step(screen, text))
        outcome = story.play()
    if json_file != "-":
        sheet(outcome, dtype=str(dtype)).show()
    if json_file is not None:
        _write_json(json_file, document(outcome, tokens=length, dtype=str(dtype)))
    if keep:
        _say_how_to_look(screen, directory)
    raise typer.Exit(EXIT_FINE if outcome.is_fine else EXIT_PROBLEM)


@contextmanager
def _own_directory(keep: bool) -> Iterator[Path]:
    """Make a directory on the disk that holds the user's cache; gone at the end unless kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"
    parent = (
        cache
        if len(os.fsencode(cache)) + len("/demo-12345678/kvstore.sock") < SOCKET_PATH_BYTES_MAX
        else None
    )
    if parent:
        parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="demo-", dir=parent))
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _step(screen: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show a step with a spinner while it lasts; leave a line with its outcome, or if it took long."""
    began = time.monotonic()
    outcome = [text]
    with screen.status(escape(text)) as status:

        def said(news: str) -> None:
            outcome.append(news)
            status.update(escape(news))

        yield said
    seconds = time.monotonic() - began
    if len(outcome) == 1 and seconds < SECONDS_WORTH_A_LINE:
        return
    screen.print(f"[dim]{seconds:6.1f} s[/]  {escape(outcome[-1])}", soft_wrap=True)


def _write_json(target: str, value: dict[str, object]) -> None:
    if target == "-":
        emit_json(value)
        return
    Path(target).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _say_how_to_look(screen: Console, directory: Path) -> None:
    for line in (
        f"kept {directory}",
        f"  kvstore inspect namespaces --offline {directory / 'data'}",
        f"  kvstore serve --data {directory / 'data'}    (then `kvstore status`)",
    ):
        screen.print(escape(line), soft_wrap=True)
