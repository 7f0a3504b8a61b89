"""What the commands that read a trace share: its options, reading it, and the classes it is judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.output import EXIT_PROBLEM, complain, progress
from kvstore.core.eviction import POLICIES
from kvstore.errors import InvalidArgument
from kvstore.quantities import parse_bytes, parse_seconds
from kvstore.retention import DEFAULT_CLASS, SHIPPED_CLASSES, RetentionClass
from kvstore.trace.classing import ClassRules, parse_rules
from kvstore.trace.requests import SESSION_GAP_SECONDS, TraceFile, TraceFormat, TraceRequest
from kvstore.types import Tier, TtlMode

if TYPE_CHECKING:
    Policy = StrEnum
else:
    Policy = StrEnum("Policy", {name.upper(): name for name in POLICIES})

FAULTS_SHOWN = 5
TraceArgument = Annotated[
    Path,
    typer.Argument(
        help="A trace: JSONL or a folder of sessions, plain, gzip or zstd; - is standard input.",
        metavar="TRACE",
        show_default=False,
    ),
]
FormatOption = Annotated[
    TraceFormat | None,
    typer.Option("--format", help="What it is; without it, told by its content.", show_default=False),
]
TtlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ttl",
        metavar="[CLASS=]TTL",
        help="How long a block stays: 180s, 30m, 3d, inf; or of one class, chat=7d.",
        show_default=False,
    ),
]
ModeOption = Annotated[
    TtlMode | None,
    typer.Option(
        "--ttl-mode", help="sliding: from the last touch; fixed: from the write.", show_default=False
    ),
]
RuleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--class-rule",
        metavar="CLASS: FIELD=VALUE,..",
        help="Which requests are of a class, by fields of their lines (= != > >= < <=); or a .toml file.",
        show_default=False,
    ),
]
CapacityOption = Annotated[
    int,
    typer.Option("--capacity-blocks", min=0, help="Blocks that fit into host memory, exactly; 0: no limit."),
]
PolicyOption = Annotated[
    Policy, typer.Option("--policy", help="What leaves host memory first when its room is used up.")
]
BlockOption = Annotated[
    int, typer.Option("--block-size", min=0, help="Tokens of a block; 0: what the trace says, or implies.")
]
TokenBytesOption = Annotated[
    int, typer.Option("--bytes-per-token", min=0, help="KV bytes of one token of your model.")
]
GapOption = Annotated[
    str,
    typer.Option("--session-gap", help="How far apart sessions start that have no common clock."),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="A bad line ends the run with exit code 1.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def read_trace(
    trace: Path,
    *,
    block_size: int,
    strict: bool,
    form: TraceFormat | None = None,
    rules: ClassRules | None = None,
    session_gap: str = "",
) -> tuple[TraceFile, list[TraceRequest]]:
    """Return a trace and its requests in order; bad lines are told, and with `strict` end the command.

    Errors: InvalidArgument on what is no trace or holds no request.
    """
    faults: list[tuple[int, str]] = []

    def note(number: int, fault: str) -> None:
        if len(faults) < FAULTS_SHOWN:
            faults.append((number, fault))

    file = TraceFile(
        trace,
        block_tokens=block_size,
        complain=note,
        form=form,
        rules=rules,
        session_gap_seconds=seconds_of(session_gap, "--session-gap") if session_gap else SESSION_GAP_SECONDS,
    )
    with progress("read", total=file.size_bytes, unit="bytes") as bar:
        requests = file.sorted(on_progress=bar.to)
    for number, fault in faults:
        complain(f"{trace}:{number}: skipped: {fault}")
    if file.lines_skipped > len(faults):
        complain(f"{trace}: {file.lines_skipped} bad lines skipped in all")
    if faults and strict:
        raise typer.Exit(EXIT_PROBLEM)
    if not requests:
        raise InvalidArgument(f"trace {trace}: no request in it")
    return file, requests


def rules_of(texts: Sequence[str] | None) -> ClassRules:
    """Return the rules that the options state.

    Errors: InvalidArgument.
    """
    return parse_rules(texts or ())


def seconds_of(text: str, option: str) -> float:
    """Return a time >= 0 that an option states.

    Errors: InvalidArgument naming the option.
    """
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise InvalidArgument(f"{option} {text}: {error}") from error


def ttl_of(ttl: str) -> float:
    """Return a TTL in seconds; `inf` never expires.

    Errors: InvalidArgument.
    """
    seconds = math.inf if ttl == "inf" else seconds_of(ttl, "--ttl")
    if not seconds > 0:
        raise InvalidArgument(f"--ttl {ttl}: must be positive")
    return seconds


def classes_of(
    ttls: Sequence[str] | None, mode: TtlMode | None, rules: ClassRules, *, lowest: Tier
) -> tuple[RetentionClass, ...]:
    """Return the classes a trace is judged by. A TTL without a class is that of all classes without one of
    their own; without any, shipped classes have their own TTL, unless there is nothing but the default class,
    which then never expires.

    Errors: InvalidArgument on a class that a rule names and that has no TTL.
    """
    own: dict[str, float] = {}
    common: float | None = None
    for text in ttls or ():
        name, equals, value = text.rpartition("=")
        if equals:
            own[name] = ttl_of(value)
        else:
            common = ttl_of(text)
    shipped = {c.name: c for c in SHIPPED_CLASSES}
    if not own and not rules.classes:
        common = math.inf if common is None else common
    names = list(dict.fromkeys((DEFAULT_CLASS, *own, *rules.classes)))
    found = []
    for name in names:
        base = shipped.get(name) or RetentionClass(name, math.nan)
        ttl = own.get(name, base.ttl_seconds if common is None else common)
        if math.isnan(ttl):
            known = ", ".join(shipped)
            raise InvalidArgument(
                f"class {name!r} is none of the shipped ones ({known}): give it a --ttl {name}=.."
            )
        depth = base.lowest_tier if lowest is Tier.SSD else Tier.HOST
        found.append(replace(base, ttl_seconds=ttl, mode=mode or base.mode, lowest_tier=depth))
    return tuple(found)


def blocks_of(text: str, option: str, *, block_bytes: int) -> int:
    """Return a capacity in blocks: a plain number, or bytes such as 64GiB.

    Errors: InvalidArgument naming the option; bytes need the size of a block.
    """
    if text.isdecimal():
        return int(text)
    try:
        capacity = parse_bytes(text)
    except ValueError as error:
        raise InvalidArgument(
            f"{option} {text}: expected blocks, such as 65536, or bytes, such as 64GiB"
        ) from error
    if not block_bytes:
        raise InvalidArgument(f"{option} {text}: bytes need --bytes-per-token")
    return capacity // block_bytes
