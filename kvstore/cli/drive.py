"""`kvstore drive`: a trace against a live daemon, and what the simulator says of the same requests."""

from __future__ import annotations

import math
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.child import ChildDaemon
from kvstore.cli.connection import LIMITS, AddressOption, CaOption, Daemon, TokenOption, tls_of
from kvstore.cli.drive_replay import Driven, Replay, interrupts
from kvstore.cli.drive_run import BLOCK_BYTES, Driver, distinct_blocks, trace_namespace
from kvstore.cli.output import (
    EXIT_FINE,
    EXIT_PROBLEM,
    Sheet,
    complain,
    count_text,
    duration_text,
    emit_json,
    plain,
    progress,
)
from kvstore.cli.traces import (
    BlockOption,
    CapacityOption,
    FormatOption,
    GapOption,
    JsonOption,
    ModeOption,
    RuleOption,
    StrictOption,
    TraceArgument,
    TtlOption,
    classes_of,
    read_trace,
    rules_of,
)
from kvstore.client import Client
from kvstore.core.eviction import POLICIES
from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.retention import RetentionClass
from kvstore.told_clock import TEST_CLOCK_VARIABLE, ToldClock
from kvstore.trace.blocks import TraceRequest
from kvstore.trace.simulator import HALF_TICK_SECONDS, Simulator
from kvstore.trace.tally import Served, Tally
from kvstore.types import PAGE_BYTES, Admission, Tier, TtlMode, round_up

WALL_POINTS = 0.1
"""How far the two hit rates may lie apart in wall time, where the clock goes on while a request takes."""
MIB = 1 << 20
ARENA_SHARE, ARENA_BYTES_MIN = 1.04, 4 * MIB
"""Of an arena a little goes to its tables and to rounding: what is asked for fits, and a few blocks more."""
ONE_CLIENT = 1
CLIENTS = 4

SpeedOption = Annotated[
    str, typer.Option("--speed", help="How much faster than it was: 1x, 10x, or max: as fast as it goes.")
]
ExactOption = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Start a daemon for it that lives on the trace's clock: both hit rates must be equal.",
    ),
]
LimitOption = Annotated[int, typer.Option("--requests", min=0, help="Only the first so many; 0: all.")]
ClientsOption = Annotated[
    int,
    typer.Option(
        "--clients",
        min=0,
        help=f"How many clients send side by side; 0: {CLIENTS}, or 1 with --exact.",
    ),
]
KeepOption = Annotated[bool, typer.Option("--keep", help="Leave what was stored in the daemon.")]


@dataclass(frozen=True, slots=True)
class Store:
    """What a daemon is set to. Units: blocks of a trace that fit into host memory, bytes on SSD (0: none)."""

    address: str
    classes: tuple[RetentionClass, ...]
    host_blocks: int
    ssd_bytes: int
    policy: str


def drive(
    trace: TraceArgument,
    address: AddressOption = None,
    token: TokenOption = "",
    tls_ca: CaOption = None,
    speed: SpeedOption = "max",
    exact: ExactOption = False,
    clients: ClientsOption = 0,
    requests: LimitOption = 0,
    ttl: TtlOption = None,
    ttl_mode: ModeOption = None,
    capacity_blocks: CapacityOption = 0,
    class_rule: RuleOption = None,
    form: FormatOption = None,
    block_size: BlockOption = 0,
    session_gap: GapOption = "120s",
    keep: KeepOption = False,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Send a trace to a daemon, with synthetic payloads of 4 KiB a block, and compare the hit rates.

    Measured is what was delivered and checked; simulated is what `kvstore simulate` says of the same
    requests at the times at which they were sent, with the daemon's own classes and sizes. Exit code 1 when
    they lie further apart than 0.1 points, or with --exact at all. A speed compresses the trace's times, not
    the daemon's TTLs. The trace has a namespace of its own, which is deleted at the end.

    Examples:

      kvstore drive trace.jsonl.gz --speed 60x

      kvstore drive trace.jsonl.gz --exact --ttl 180s --capacity-blocks 65536 --json
    """
    rules = rules_of(class_rule)
    factor = _speed(speed)
    _check(exact=exact, clients=clients, sets_up=bool(ttl or ttl_mode or capacity_blocks))
    file, wanted = read_trace(
        trace, block_size=block_size, strict=strict, form=form, rules=rules, session_gap=session_gap
    )
    wanted = wanted[: requests or None]
    space = trace_namespace(secrets.token_hex(8), block_tokens=file.block_tokens)
    if exact:
        classes = classes_of(ttl, ttl_mode, rules, lowest=Tier.HOST)
        with (
            _own_daemon(classes, capacity_blocks or distinct_blocks(wanted)) as (store, clock),
            Client(store.address) as client,
        ):
            driven = _drive([Driver(client, space)], wanted, factor, clock, keep=True)
    else:
        with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
            store = _store(daemon)
        with ExitStack() as stack:
            tls, count = tls_of(tls_ca), clients or CLIENTS
            many = [Client(store.address, token=token, tls=tls, limits=LIMITS) for _ in range(count)]
            drivers = [Driver(stack.enter_context(client), space) for client in many]
            driven = _drive(drivers, wanted, factor, None, keep=keep)
    measured, simulated, differ = _compare(driven, store, block_tokens=file.block_tokens)
    document = _document(str(trace), store, driven, measured, simulated, differ, exact=exact)
    emit_json(document) if as_json else _sheet(document).show()
    raise typer.Exit(EXIT_FINE if document["agrees"] else EXIT_PROBLEM)


def _check(*, exact: bool, clients: int, sets_up: bool) -> None:
    if sets_up and not exact:
        raise InvalidArgument("--ttl, --ttl-mode and --capacity-blocks are the daemon's own without --exact")
    if exact and clients > 1:
        raise InvalidArgument("--exact is for one client: of several nobody can say who comes first")


def _speed(text: str) -> float:
    try:
        factor = math.inf if text == "max" else float(text.removesuffix("x"))
    except ValueError as error:
        raise InvalidArgument(f"--speed {text}: expected a factor such as 10x, or max") from error
    if not factor > 0:
        raise InvalidArgument(f"--speed {text}: must be positive")
    return factor


def _drive(
    drivers: Sequence[Driver],
    requests: Sequence[TraceRequest],
    speed: float,
    clock: ToldClock | None,
    *,
    keep: bool,
) -> Driven:
    with interrupts() as stop:
        replay = Replay(drivers, requests, speed=speed, clock=clock, stop=stop)
        try:
            with progress("drive", total=len(requests)) as bar:
                driven = replay.run(bar.to)
        finally:
            if not keep:
                _clear(drivers[0])
        if stop.is_set():
            raise KeyboardInterrupt
    return driven


def _clear(driver: Driver) -> None:
    try:
        driver.clear()
    except KVStoreError as error:
        complain(f"what was stored is still there: {error}")


@contextmanager
def _own_daemon(classes: Sequence[RetentionClass], blocks: int) -> Iterator[tuple[Store, ToldClock]]:
    """Run a daemon in host memory alone, with room for so many blocks, on a clock that is told."""
    with tempfile.TemporaryDirectory(prefix="kvstore-drive-") as folder:
        directory = Path(folder)
        clock = ToldClock.create(directory / "clock")
        settings = {"ssd.enabled": "false"}
        for held_by in classes:
            # In traces a TTL holds to its last millisecond.
            lasts = held_by.ttl_seconds + HALF_TICK_SECONDS
            settings[f"classes.{held_by.name}.ttl_seconds"] = "forever" if math.isinf(lasts) else repr(lasts)
            settings[f"classes.{held_by.name}.mode"] = str(held_by.mode)
            settings[f"classes.{held_by.name}.lowest_tier"] = str(held_by.lowest_tier)
        child = ChildDaemon(
            directory,
            arena_bytes=max(ARENA_BYTES_MIN, round_up(int(blocks * ARENA_SHARE) * PAGE_BYTES, 2 * MIB)),
            settings=settings,
            environment={TEST_CLOCK_VARIABLE: str(directory / "clock")},
        )
        with child, Daemon(child.address) as daemon:
            yield _store(daemon), clock


def _store(daemon: Daemon) -> Store:
    """Return what a daemon says of its classes and sizes."""
    status = daemon.status()
    tiers = {row["tier"]: row for row in status["tiers"]}
    settings = status["settings"]
    classes = tuple(
        RetentionClass(
            row["class"],
            math.inf if row["ttl_seconds"] is None else row["ttl_seconds"],
            TtlMode(row["mode"]),
            Tier(row["lowest_tier"]) if "ssd" in tiers else Tier.HOST,
            row["quota_bytes"],
            Admission(settings[f"classes.{row['class']}.admission"]),
        )
        for row in status["classes"]
    )
    ssd = tiers["ssd"]["capacity_bytes"] if "ssd" in tiers else 0
    blocks = tiers["host"]["capacity_bytes"] // PAGE_BYTES
    return Store(daemon.address, classes, blocks, ssd, settings["host.eviction"])


def _compare(driven: Driven, store: Store, *, block_tokens: int) -> tuple[Tally, Tally, list[int]]:
    """Return what was measured, what the simulator says, and which requests differ."""
    simulator = Simulator(
        block_tokens=block_tokens,
        classes=store.classes,
        capacity_blocks=store.host_blocks,
        policy=POLICIES[store.policy](),
        block_bytes=BLOCK_BYTES,
        ssd_bytes=store.ssd_bytes,
        is_inclusive=False,
        session=ONE_CLIENT,
    )
    measured, simulated = Tally(block_tokens), Tally(block_tokens)
    differ = []
    with progress("simulate", total=len(driven.sent)) as bar:
        for index, (request, delivered) in enumerate(zip(driven.sent, driven.delivered_blocks, strict=True)):
            served = simulator.serve(request)
            measured.count(request, Served(delivered), retention_class="", in_half=False)
            simulated.count(request, served, retention_class="", in_half=False)
            if served.hit_blocks != delivered:
                differ.append(index)
            bar.to(index + 1)
    return measured, simulated, differ


def _document(
    trace: str,
    store: Store,
    driven: Driven,
    measured: Tally,
    simulated: Tally,
    differ: Sequence[int],
    *,
    exact: bool,
) -> dict[str, Any]:
    rates = [tally.rates()["token_hit_rate"] for tally in (measured, simulated)]
    points = 100 * (rates[0] - rates[1])
    return {
        "trace": trace,
        "address": store.address,
        "exact": exact,
        "agrees": not differ if exact else abs(points) <= WALL_POINTS,
        "requests": measured.requests,
        "input_tokens": measured.input_tokens,
        "measured": _counts(measured),
        "simulated": _counts(simulated),
        "difference_points": points,
        "requests_that_differ": len(differ),
        "first_that_differs": differ[0] if differ else None,
        "stored_blocks": driven.stored_blocks,
        "refused_blocks": driven.refused_blocks,
        "misses": dict(driven.misses),
        "capacity_blocks": store.host_blocks,
        "ssd_capacity_bytes": store.ssd_bytes,
        "policy": store.policy,
        "seconds": driven.seconds,
        "lag_seconds": driven.lag_seconds,
    }


def _counts(tally: Tally) -> dict[str, Any]:
    rates = tally.rates()
    names = ("token_hit_rate", "block_hit_rate", "request_hit_rate")
    return {"hit_tokens": tally.hit_tokens, **{name: rates[name] for name in names}}


def _sheet(document: dict[str, Any]) -> Sheet:
    sheet = Sheet()
    measured, simulated = document["measured"], document["simulated"]
    per_second = document["requests"] / max(1e-9, document["seconds"])
    sheet.line(
        f"{count_text(document['requests'])} requests in {duration_text(document['seconds'])} "
        f"({count_text(per_second)} a second), {count_text(document['stored_blocks'])} blocks stored; "
        f"room for {count_text(document['capacity_blocks'])} in host memory"
    )
    names = {
        "token_hit_rate": "hit rate, tokens",
        "block_hit_rate": "hit rate, blocks",
        "request_hit_rate": "requests with a hit",
    }
    rows = [(label, f"{measured[name]:.4%}", f"{simulated[name]:.4%}") for name, label in names.items()]
    rows += [("tokens that hit", count_text(measured["hit_tokens"]), count_text(simulated["hit_tokens"]))]
    sheet.table("Hit rates", ["what", "measured>", "simulated>"], rows)
    misses = sorted(document["misses"].items(), key=lambda item: -item[1])
    sheet.table(
        "Where prompts stopped to hit",
        ["reason", "requests>"],
        [(plain(r), count_text(n)) for r, n in misses],
    )
    if document["refused_blocks"]:
        sheet.line(f"{count_text(document['refused_blocks'])} blocks found no room in the daemon")
    if document["lag_seconds"] > 1:
        sheet.line(
            f"the daemon was too slow for this speed: {duration_text(document['lag_seconds'])} late at worst"
        )
    sheet.line(_verdict(document))
    return sheet


def _verdict(document: dict[str, Any]) -> str:
    differ = document["requests_that_differ"]
    if not differ:
        return "every request hit as simulated"
    text = f"{count_text(differ)} requests differ, the first is number {document['first_that_differs'] + 1}"
    return f"{text}; {abs(document['difference_points']):.4f} points apart"
