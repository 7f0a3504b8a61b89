"""`kvstore purge`: remove for good, with a receipt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.answers import carry_out, tell
from kvstore.cli.connection import AddressOption, CaOption, Daemon, JsonOption, TokenOption
from kvstore.cli.inspect import NamespaceOption, choose_namespace, hex_bytes, known_namespaces, wanted_keys
from kvstore.cli.output import (
    EXIT_PROBLEM,
    Sheet,
    bytes_text,
    count_text,
    plain,
    styled,
    time_text,
)
from kvstore.errors import InvalidArgument
from kvstore.rpc.v1 import admin_pb2 as pb

NAME_ONE = "purge: name what: --namespace (--tokens or --hash for a part of it), --tenant or --class"
ASK = "Remove it for good?"
COLUMNS = (
    "receipt", "what", "unreachable since", "blocks>", "size>", "on disk>", "bytes gone", "state",
)  # fmt: skip
STATE_STYLES = {"gone": "green", "leaving": "yellow"}


def purge(
    namespace: NamespaceOption = "",
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="All of a tenant.", show_default=False)
    ] = None,
    retention_class: Annotated[
        str, typer.Option("--class", metavar="NAME", help="All that a class holds.", show_default=False)
    ] = "",
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE", help="All that starts with these token ids; - is stdin."),
    ] = None,
    hash_prefix: Annotated[
        str,
        typer.Option("--hash", metavar="PREFIX", help="A block and all that follows it.", show_default=False),
    ] = "",
    secret: Annotated[
        Path | None,
        typer.Option("--tenant-secret", metavar="FILE", help="The tenant's secret, where one was used."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it, and do not ask.")] = False,
    receipt: Annotated[
        str, typer.Option("--receipt", metavar="ID", help="How far that purge is.", show_default=False)
    ] = "",
    receipts: Annotated[bool, typer.Option("--receipts", help="All receipts that are kept.")] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Remove blocks for good; without --yes, say first what would go. Prints a receipt.

    What was meant is invisible at once, and no restart brings it back once the receipt says so; its
    bytes follow when leases end and writes come back. --tokens and --hash remove the last block named
    and all that follows it. Exit code 1 when it is not durable yet.

    Examples:

      kvstore purge --tenant acme

      kvstore purge --receipt 5f0c2a91d3e7
    """
    with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
        if receipt or receipts:
            kept = daemon.document("Receipts", pb.ReceiptsRequest(receipt=receipt))
            tell(kept, _receipts_sheet, as_json=as_json)
            return
        in_namespace = bool(namespace or tokens or hash_prefix)
        if sum((in_namespace, tenant is not None, bool(retention_class))) != 1:
            raise InvalidArgument(NAME_ONE)
        request = pb.PurgeRequest(retention_class=retention_class, tenant=tenant)
        if in_namespace:
            chosen = choose_namespace(known_namespaces(address, None, token, tls_ca), namespace)
            request.namespace = chosen.fingerprint
            request.keys = wanted_keys(chosen, tokens, "", secret)
            request.hash_prefix = hex_bytes(hash_prefix, "--hash")
        done = carry_out(daemon, "Purge", request, _foreseen_sheet, question=ASK, yes=yes, as_json=as_json)
    if done is not None:
        tell({"receipts": [done]}, _receipts_sheet, as_json=as_json)
        raise typer.Exit(0 if done["durable"] else EXIT_PROBLEM)


def _foreseen_sheet(foreseen: Mapping[str, Any]) -> Sheet:
    page = Sheet()
    page.line(f"this would remove {_amount_text(foreseen)}: {_what_text(foreseen['what'])}")
    return page


def _receipts_sheet(document: Mapping[str, Any]) -> Sheet:
    page = Sheet()
    page.table("Purges", COLUMNS, [_receipt_cells(receipt) for receipt in document["receipts"]])
    if not document["receipts"]:
        page.line("nothing has been purged")
    return page


def _receipt_cells(receipt: Mapping[str, Any]) -> tuple[str, ...]:
    waiting = [
        f"{bytes_text(receipt[key])} {words}"
        for key, words in (("leased_bytes", "leased"), ("writing_bytes", "being written"))
        if receipt.get(key)
    ]
    state = str(receipt["state"])
    return (
        str(receipt["id"]),
        plain(_what_text(receipt["what"])),
        time_text(receipt.get("unreachable_since")),
        count_text(receipt.get("blocks", 0) + receipt.get("also_blocks", 0)),
        bytes_text(receipt.get("bytes", 0)),
        bytes_text(receipt.get("ssd_bytes", 0)),
        time_text(receipt["gone_at"]) if receipt.get("gone_at") else ", ".join(waiting) or "-",
        styled(state, STATE_STYLES.get(state, "red")),
    )


def _amount_text(amount: Mapping[str, Any]) -> str:
    return f"{count_text(amount['blocks'])} blocks, {bytes_text(amount['bytes'])}"


def _what_text(what: Mapping[str, str]) -> str:
    if "namespace" in what:
        part = f", from block {what['last_block'][:16]}" if "last_block" in what else ""
        return f"namespace {what['namespace'][:12]} ({what['model']}){part}"
    return ", ".join(f"{key} {value!r}" for key, value in what.items())
