"""How every command speaks: tables for people, JSON for programs, one line an error, bars on what takes time.

Results go to stdout, everything else to stderr, so that `kvstore ... --json | jq` always works. Colours and
control characters appear on a terminal only, colours never with NO_COLOR.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

EXIT_FINE, EXIT_PROBLEM, EXIT_MISUSE = 0, 1, 2
PIPE_WIDTH = 200
"""Columns of a table that goes to a pipe or a file, where nothing says how wide the reader is."""


def console(*, stderr: bool = False) -> Console:
    """Return a console for the present stdout or stderr."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream, highlight=False, soft_wrap=False, width=None if stream.isatty() else PIPE_WIDTH
    )


def emit_json(value: Any) -> None:
    """Write one JSON document to stdout; infinite times become null, which JSON can carry."""
    sys.stdout.write(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def say(message: str) -> None:
    """Write one line of plain text to stdout."""
    console().print(escape(message), soft_wrap=True)


def complain(message: str) -> None:
    """Write an error to stderr: one line per fault."""
    screen = console(stderr=True)
    for line in message.splitlines() or [""]:
        screen.print(f"[bold red]kvstore:[/] {escape(line)}", soft_wrap=True)


class Sheet:
    """Lines and tables in order, drawn at once or shown again and again."""

    def __init__(self) -> None:
        self._parts: list[RenderableType] = []

    def line(self, text: Text | str) -> None:
        """Add a line; a plain string is taken literally."""
        self._parts.append(text if isinstance(text, Text) else Text(text))

    def markup(self, text: str) -> None:
        """Add a line of markup."""
        self._parts.append(Text.from_markup(text))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table; columns whose name ends in `>` are right-aligned. No rows, no table.

        The first column and the right-aligned ones are never folded.

        Cells are markup: what comes from elsewhere goes through `plain` or `styled`.
        """
        drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(columns):
            right = column.endswith(">")
            justify: JustifyMethod = "right" if right else "left"
            drawn.add_column(column.rstrip(">"), justify=justify, overflow="fold", no_wrap=right or not index)
        for row in rows:
            drawn.add_row(*row)
        if drawn.row_count:
            # A table's own title would be folded to the width of its columns.
            self._parts += [Text(title, style="bold"), drawn]

    def drawn(self) -> Group:
        """Return everything as one renderable."""
        return Group(*self._parts)

    def show(self) -> None:
        """Print everything to stdout; into a pipe without the blanks that fill up lines."""
        screen = console()
        if screen.is_terminal:
            screen.print(self.drawn())
            return
        with screen.capture() as captured:
            screen.print(self.drawn())
        lines = (line.rstrip() for line in captured.get().splitlines())
        sys.stdout.write("\n".join(lines) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print one table."""
    page = Sheet()
    page.table(title, columns, rows)
    page.show()


def plain(text: str) -> str:
    """Return `text` for a table cell, taken literally."""
    return escape(text)


def styled(text: str, style: str) -> str:
    """Return `text` marked up in a style, safe to put into a table."""
    return f"[{style}]{escape(text)}[/]"


class Bar:
    """One progress bar; `to` moves it. Silent where stderr is no terminal."""

    def __init__(self, progress: Progress, label: str, total: float | None) -> None:
        self._progress = progress
        self._task = progress.add_task(escape(label), total=total)

    def to(self, done: float, *, total: float | None = None, label: str | None = None) -> None:
        """Show `done` of `total`, under a new label if one is given."""
        self._progress.update(self._task, completed=done)
        if total is not None:
            self._progress.update(self._task, total=total)
        if label is not None:
            self._progress.update(self._task, description=escape(label))


@contextmanager
def progress(label: str, *, total: float | None = None, unit: str = "") -> Iterator[Bar]:
    """Show a bar on stderr while the body runs; `unit` is bytes, or empty for counts."""
    screen = console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn()]
    columns += [DownloadColumn() if unit == "bytes" else MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True) as drawn:
        yield Bar(drawn, label, total)


def bytes_text(count: float) -> str:
    """Return a byte count in the largest binary unit that keeps it readable."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration_text(seconds: float | None) -> str:
    """Return a duration in its two largest units; infinity and None are `never`."""
    if seconds is None or not math.isfinite(seconds):
        return "never"
    if seconds < 0:
        return "-" + duration_text(-seconds)
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    left = int(seconds)
    parts = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size} {name}")
            left %= size
    return " ".join(parts[:2])


def time_text(wall: float | None) -> str:
    """Return a wall time as local-free UTC text."""
    if wall is None or not math.isfinite(wall):
        return "never"
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def count_text(count: float) -> str:
    """Return a count with thousands separated."""
    return f"{count:,.0f}"


def percent_text(part: float, whole: float) -> str:
    """Return a share in per cent, or a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def hash_text(name: bytes) -> str:
    """Return the first 12 digits of a hash: enough to tell, and to inspect by."""
    return name[:6].hex()
