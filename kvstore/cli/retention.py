"""`kvstore retention`: the classes of a running daemon, and what a change of one does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvstore.cli.advice import advice_sheet
from kvstore.cli.answers import ask, carry_out, tell
from kvstore.cli.connection import AddressOption, CaOption, Daemon, JsonOption, TokenOption
from kvstore.cli.forecast import HoursOption, PlotOption, forecast_sheet, plot
from kvstore.cli.output import Sheet, bytes_text, count_text, duration_text, plain, styled
from kvstore.errors import InvalidArgument
from kvstore.quantities import parse_bytes, parse_seconds
from kvstore.rpc.v1 import admin_pb2 as pb

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Retention classes of a running daemon: how long each kind of traffic stays, and how much of it.",
)
NameArgument = Annotated[str, typer.Argument(metavar="CLASS", help="A class by its name.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do it, and do not ask.")]


@app.command("list")
def list_classes(
    address: AddressOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Show the classes in force, what they hold, and where each comes from.

    Examples:

      kvstore retention list
    """
    ask(
        "Retention",
        pb.RetentionRequest(),
        _list_sheet,
        address=address,
        token=token,
        tls_ca=tls_ca,
        as_json=as_json,
    )


def _list_sheet(document: Mapping[str, Any]) -> Sheet:
    page = Sheet()
    columns = ("class", "life", "mode", "lowest tier", "blocks>", "host>", "ssd>", "quota a tier>", "origin")
    page.table("Retention classes", columns, [_class_cells(row) for row in document["classes"]])
    for change in document["undo"]:
        left = duration_text(change["seconds_left"])
        page.line(f"{_change_text(change)}: `kvstore retention undo {change['class']}` within {left}")
    if not document["persisted"]:
        page.line("changes hold until the daemon ends: it has no data directory")
    return page


def _class_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    origin = str(row["origin"])
    return (
        plain(str(row["class"])),
        duration_text(row["ttl_seconds"]),
        str(row["mode"]),
        str(row["lowest_tier"]),
        count_text(row["blocks"]),
        bytes_text(row["host_bytes"]),
        bytes_text(row["ssd_bytes"]),
        _quota_text(row["quota_bytes"]),
        styled(origin, "dim" if origin == "configuration" else "bold"),
    )


@app.command("set")
def set_class(
    name: NameArgument,
    ttl: Annotated[
        str | None, typer.Option("--ttl", metavar="TIME", help="Life: 3d, 90m, forever.", show_default=False)
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", metavar="MODE", help="sliding or fixed.", show_default=False)
    ] = "",
    quota: Annotated[
        str | None,
        typer.Option(
            "--quota", metavar="BYTES", help="Limit in each tier: 64GiB; 0: none.", show_default=False
        ),
    ] = None,
    yes: YesOption = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Change a class of a running daemon; without --yes, say first what that would hide or show.

    A shorter life hides blocks at once and can be undone for ten minutes. The
    change survives a restart, until the class is configured anew. A new mode
    counts from the next touch. What leaves for a lower quota is gone.

    Examples:

      kvstore retention set agent --ttl 4d

      kvstore retention set batch --quota 64GiB --yes
    """
    if ttl is None and quota is None and not mode:
        raise InvalidArgument("retention set: give --ttl, --mode or --quota")
    change = pb.ClassChange(retention_class=name, mode=mode)
    try:
        if ttl is not None:
            change.ttl_seconds = parse_seconds(ttl)
        if quota is not None:
            change.quota_bytes = parse_bytes(int(quota) if quota.isdecimal() else quota)
    except ValueError as error:
        raise InvalidArgument(f"retention set: {error}") from error
    with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
        _carry_out(daemon, pb.RetentionRequest(change=change), yes=yes, as_json=as_json)


@app.command()
def undo(
    name: Annotated[
        str, typer.Argument(metavar="[CLASS]", help="Which; else the latest.", show_default=False)
    ] = "",
    yes: YesOption = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Take back the latest change of the last ten minutes: what it hid is there again.

    Examples:

      kvstore retention undo agent --yes
    """
    with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
        request = pb.RetentionRequest(undo=pb.ClassUndo(retention_class=name))
        _carry_out(daemon, request, yes=yes, as_json=as_json)


def _carry_out(daemon: Daemon, request: pb.RetentionRequest, *, yes: bool, as_json: bool) -> None:
    done = carry_out(daemon, "Retention", request, _effect_sheet, question="Do it?", yes=yes, as_json=as_json)
    if done is not None:
        tell(done, lambda document: _done_sheet(document, with_effect=yes), as_json=as_json)


def _done_sheet(done: Mapping[str, Any], *, with_effect: bool) -> Sheet:
    page = _effect_sheet(done) if with_effect else Sheet()
    undo_seconds = done.get("undo_seconds")
    page.line(
        f"done; `kvstore retention undo {done['class']}` takes it back within {duration_text(undo_seconds)}"
        if undo_seconds
        else "done"
    )
    if not done["persisted"]:
        page.line("it holds until the daemon ends: there is no data directory to keep it in")
    return page


def _effect_sheet(document: Mapping[str, Any]) -> Sheet:
    page = Sheet()
    would = "" if document["applied"] else "would "
    page.line(_change_text(document))
    hides, shows = document["hides"], document["shows"]
    s = "s" if document["applied"] else ""
    page.line(f"this {would}hide{s} {_amount_text(hides)}, now")
    if shows["blocks"]:
        page.line(f"this {would}show{s} {_amount_text(shows)} again, now")
    for tier, size in document["over_quota"].items():
        if size:
            page.line(f"the quota {would}evict{s} {bytes_text(size)} from {tier}; no undo brings that back")
    return page


def _amount_text(amount: Mapping[str, Any]) -> str:
    return f"{count_text(amount['blocks'])} blocks, {bytes_text(amount['bytes'])}"


def _change_text(document: Mapping[str, Any]) -> str:
    before, after = document["before"], document["after"]
    spoken = {"ttl_seconds": duration_text, "quota_bytes": _quota_text}
    changed = [
        f"{key.split('_')[0]} {spoken.get(key, str)(before[key])} -> {spoken.get(key, str)(after[key])}"
        for key in ("ttl_seconds", "mode", "quota_bytes")
        if before[key] != after[key]
    ]
    return f"{document['class']}: {', '.join(changed)}"


def _quota_text(size: float) -> str:
    return bytes_text(size) if size else "-"


@app.command()
def forecast(
    hours: HoursOption = 24,
    plot_file: PlotOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Show how many blocks and bytes expire in the coming hours, by class, if nothing is touched again.

    Examples:

      kvstore retention forecast --hours 72

      kvstore retention forecast --plot forecast.png
    """
    request = pb.ForecastRequest(hours=hours)
    document = ask(
        "Forecast", request, forecast_sheet, address=address, token=token, tls_ca=tls_ca, as_json=as_json
    )
    if plot_file is not None:
        plot(document, plot_file)


@app.command()
def advice(
    address: AddressOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Show what each class lost to expiry and to eviction, and what would have kept it.

    A choice is named when it keeps nearly all that any choice would have kept
    in the last day; --json has all of them.

    Examples:

      kvstore retention advice
    """
    ask(
        "Advice",
        pb.AdviceRequest(),
        advice_sheet,
        address=address,
        token=token,
        tls_ca=tls_ca,
        as_json=as_json,
    )
