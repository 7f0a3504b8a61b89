"""`kvstore bench`: runs groups of rows and shows what they came to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.bench.groups import DEFAULT, GROUPS, Group
from kvstore.bench.harness import ROUNDS, ROUNDS_QUICK, Bench
from kvstore.bench.machine import describe
from kvstore.bench.rows import Row
from kvstore.cli.output import (
    EXIT_FINE,
    EXIT_PROBLEM,
    Sheet,
    bytes_text,
    complain,
    emit_json,
    plain,
    progress,
    styled,
)
from kvstore.errors import InvalidArgument, KVStoreError

BUSY_SHARE = 0.5
"""A load average above this share of the processors is worth a warning."""

NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME...",
        help=f"Groups to run: {', '.join(GROUPS)}. Without one: {', '.join(DEFAULT)}.",
        show_default=False,
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the result there; - is stdout.", show_default=False),
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer rounds: under a minute, wider spread.")]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        "--rounds", metavar="N", min=1, max=1000, help=f"Rounds of each row; {ROUNDS} unless given."
    ),
]
DirectoryOption = Annotated[
    Path | None,
    typer.Option("--directory", metavar="DIR", help="On the disk to measure; else the temporary directory."),
]
MemoryOption = Annotated[Path, typer.Option("--shared-memory", metavar="DIR", help="Mount of the arena.")]


def bench(
    names: NamesArgument = None,
    json_file: FileOption = None,
    quick: QuickOption = False,
    rounds: RoundsOption = None,
    directory: DirectoryOption = None,
    shared_memory: MemoryOption = Path("/dev/shm"),
) -> None:
    """Measure the store against honest baselines on this machine.

    Every row is the ratio of two medians, over rounds that alternate the thing
    and its baseline. The bar is the floor (or ceiling) that the project sets
    itself; a row that misses it is marked. It starts a daemon of its own on
    temporary directories and leaves a running one alone. Exit code 1 when a
    row could not be measured, other than for want of a program to compare with.

    Examples:

      kvstore bench --quick

      kvstore bench host put --rounds 31 --json result.json
    """
    chosen = choose(names or DEFAULT)
    disk = (directory or Path(tempfile.gettempdir())).absolute()
    for path in (disk, shared_memory):
        if not path.is_dir():
            raise InvalidArgument(f"bench: {path} is no directory")
    machine = describe(disk, shared_memory)
    done = _run(chosen, rounds or (ROUNDS_QUICK if quick else ROUNDS), quick, disk, shared_memory)
    document = {"machine": machine, "rows": [row.to_plain() for row in done]}
    _deliver(document, done, json_file)
    failed = any(row.value is None and not row.lacks for row in done)
    raise typer.Exit(EXIT_PROBLEM if failed else EXIT_FINE)


def _run(chosen: Sequence[Group], rounds: int, quick: bool, disk: Path, memory: Path) -> list[Row]:
    done: list[Row] = []
    with progress("bench", total=sum(len(group.rows) for group in chosen)) as bar:
        context = Bench(
            rounds=rounds,
            is_quick=quick,
            directory=disk,
            shared_memory=memory,
            tell=lambda text: bar.to(len(done), label=text),
        )
        for group in chosen:
            measure(group, context, done.append)
    return done


def choose(names: Sequence[str]) -> list[Group]:
    """Return the groups of these names.

    Errors: InvalidArgument naming what is unknown and what there is.
    """
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise InvalidArgument(
            f"bench: no group {', '.join(map(repr, unknown))}; there is: {', '.join(GROUPS)}"
        )
    return [GROUPS[name] for name in dict.fromkeys(names)]


def measure(group: Group, context: Bench, take: Callable[[Row], None]) -> None:
    """Run one group; the rows that its failure left out say why."""
    taken: set[str] = set()
    try:
        for row in group.run(context):
            taken.add(row.spec.name)
            take(row)
        return
    except (KVStoreError, OSError) as error:
        reason = str(error)
    for spec in group.rows:
        if spec.name not in taken:
            take(Row(spec, None, f"not measured: {reason}"))


def _deliver(document: dict[str, Any], rows: Sequence[Row], json_file: Path | None) -> None:
    if json_file is not None and str(json_file) == "-":
        emit_json(document)
        return
    _sheet(document["machine"], rows).show()
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(document, indent=2) + "\n")
        except OSError as error:
            complain(f"--json {json_file}: {error.strerror}")
            raise typer.Exit(EXIT_PROBLEM) from error


def _sheet(machine: dict[str, Any], rows: Sequence[Row]) -> Sheet:
    page = Sheet()
    page.line(_machine_line(machine))
    if machine["load_average"] > BUSY_SHARE * machine["cpus"]:
        text = "something else computes on this machine: the ratios say less than they seem to"
        page.markup(styled(text, "yellow"))
    page.table("Rows", ("row", "value>", "bar>", "", "what was measured"), [_cells(row) for row in rows])
    missed = sum(row.reaches_bar is False for row in rows)
    unmeasured = sum(row.value is None for row in rows)
    page.line(f"{len(rows)} rows, {missed} missed their bar, {unmeasured} not measured")
    return page


def _machine_line(machine: dict[str, Any]) -> str:
    disk, memory = machine["disk"], machine["shared_memory"]
    words = (
        machine["cpu"],
        f"{machine['cpus']} CPUs",
        bytes_text(machine["memory_bytes"]),
        f"Linux {machine['kernel']}",
        f"Python {machine['python']}",
        f"disk {disk['file_system']} on {disk['mount']}",
        f"arena on {memory['mount']} (huge={memory['huge_pages']})",
        f"load {machine['load_average']}",
    )
    return ", ".join(words)


def _cells(row: Row) -> tuple[str, ...]:
    sign = {"higher": ">=", "lower": "<="}[row.spec.better]
    verdict = {True: styled("ok", "green"), False: styled("MISSED", "bold red"), None: ""}[row.reaches_bar]
    unit = "" if row.spec.unit == "ratio" else f" {row.spec.unit}"
    return (
        row.spec.name,
        "-" if row.value is None else f"{row.value:.2f}{unit}",
        "" if row.effective_bar is None else f"{sign} {row.effective_bar:g}",
        verdict,
        f"{plain(row.spec.what)}\n{styled('against ' + row.spec.baseline, 'dim')}\n{plain(row.detail)}",
    )
