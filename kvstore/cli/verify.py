"""`kvstore verify`: every stored byte is read again and checked against its writer's digest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.connection import AddressOption, CaOption, Daemon, JsonOption, OfflineOption, TokenOption
from kvstore.cli.inspect import NamespaceOption, choose_namespace, known_namespaces
from kvstore.cli.output import (
    EXIT_FINE,
    EXIT_PROBLEM,
    Sheet,
    bytes_text,
    count_text,
    emit_json,
    hash_text,
    plain,
    progress,
    styled,
)
from kvstore.cli.views import FaultView, VerifyView

FAULTS_SHOWN = 20
KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FILE", help="Key file for --offline.", show_default=False),
]


def verify(
    address: AddressOption = None,
    offline: OfflineOption = None,
    namespace: NamespaceOption = "",
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
    keys: KeysOption = None,
) -> None:
    """Read every block of host memory and SSD again and check its digests.

    Exit code 1 when one is wrong. A daemon drops what it finds corrupt, so
    that it is never served; --offline changes nothing, and reads what is
    encrypted with the keys of the settings (`kvstore config`) or of --keys.

    Examples:

      kvstore verify

      kvstore verify --offline /var/lib/kvstore --json
    """
    fingerprint = b""
    if namespace:
        fingerprint = choose_namespace(
            known_namespaces(address, offline, token, tls_ca), namespace
        ).fingerprint
    steps = _offline(offline, fingerprint, keys) if offline else _live(address, token, tls_ca, fingerprint)
    last, faults = _follow(steps)
    if as_json:
        emit_json(
            {
                "blocks": last.blocks_done,
                "bytes": last.bytes_done,
                "unreadable": last.unreadable,
                "faults": [fault.to_plain() for fault in faults],
            }
        )
    else:
        _sheet(last, faults).show()
    raise typer.Exit(EXIT_PROBLEM if faults else EXIT_FINE)


def _live(address: str | None, token: str, tls_ca: Path | None, fingerprint: bytes) -> Iterator[VerifyView]:
    with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
        for message in daemon.verify(fingerprint):
            yield VerifyView.from_wire(message)


def _offline(directory: Path, fingerprint: bytes, key_file: Path | None) -> Iterator[VerifyView]:
    from kvstore.cli.keys import ring_at_hand
    from kvstore.cli.offline import verify as verify_files

    return verify_files(directory, fingerprint, keys=ring_at_hand(key_file))


def _follow(steps: Iterator[VerifyView]) -> tuple[VerifyView, list[FaultView]]:
    last = VerifyView(0, 0, 0, ())
    faults: list[FaultView] = []
    with progress("verifying blocks") as bar:
        for step in steps:
            last = step
            faults += step.faults
            label = f"verifying blocks, {len(faults)} faults" if faults else "verifying blocks"
            bar.to(step.blocks_done, total=step.blocks_total, label=label)
    return last, faults


def _sheet(last: VerifyView, faults: list[FaultView]) -> Sheet:
    page = Sheet()
    rows = [
        (hash_text(f.namespace), hash_text(f.key), plain(f.tier), plain(f.detail))
        for f in faults[:FAULTS_SHOWN]
    ]
    page.table(f"{len(faults)} blocks are not what was written", ("namespace", "block", "tier", "what"), rows)
    if len(faults) > FAULTS_SHOWN:
        page.line(f"... and {len(faults) - FAULTS_SHOWN} more; --json lists all")
    read = f"{count_text(last.blocks_done)} blocks, {bytes_text(last.bytes_done)} read"
    if last.unreadable:
        text = f"{count_text(last.unreadable)} blocks cannot be judged: their key is not at hand"
        page.markup(styled(text, "yellow"))
    page.markup(
        f"{read}: "
        + (styled(f"{len(faults)} faults", "red") if faults else styled("all digests right", "green"))
    )
    return page
