"""`kvstore why`: what stopped a request, when that block left and why, and what would have saved it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvstore.cli.answers import ask
from kvstore.cli.connection import AddressOption, CaOption, JsonOption, TokenOption
from kvstore.cli.output import EXIT_PROBLEM, Sheet, bytes_text, count_text, time_text
from kvstore.rpc.v1 import admin_pb2 as pb

HASH = re.compile(r"[0-9a-f]{8,64}")


def why(
    what: Annotated[
        str, typer.Argument(metavar="REQUEST|HASH", help="A request by its id, or a block by its hash.")
    ],
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace", "-n", metavar="HEX", help="A fingerprint, for a hash.", show_default=False
        ),
    ] = "",
    address: AddressOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Explain a miss: what was asked, how far it hit, what stopped it, and what would have saved it.

    The daemon remembers the latest few thousand requests that named themselves
    (`owner`), and why blocks left, also across restarts. Of a block that has
    left it takes the first 16 digits of its hash. Exit code 1 when nothing is
    remembered.

    Examples:

      kvstore why cmpl-7f3a

      kvstore why 3fa98c1be0d2a417
    """
    request = pb.WhyRequest(request=what, namespace=_hex(namespace) or b"", hash_prefix=_hex(what) or b"")
    document = ask(
        "Why",
        request,
        lambda found: _sheet(found, what),
        address=address,
        token=token,
        tls_ca=tls_ca,
        as_json=as_json,
    )
    raise typer.Exit(0 if document["request"] or document["blocks"] else EXIT_PROBLEM)


def _hex(text: str) -> bytes | None:
    """Return the whole bytes of a hash or the beginning of one."""
    found = HASH.fullmatch(text.lower())
    return bytes.fromhex(found[0][: len(found[0]) // 2 * 2]) if found else None


def _sheet(document: Mapping[str, Any], what: str) -> Sheet:
    page = Sheet()
    asked = document["request"]
    if asked:
        tokens = asked["block_tokens"]
        page.line(
            f"request {asked['request']} at {time_text(asked['at'])}: class {asked['class']}, {_name(asked)}"
        )
        where = ", ".join(f"{count_text(run['blocks'])} in {run['tier']}" for run in asked["tiers"])
        size = count_text(asked["asked_blocks"] * tokens)
        found = f"found {asked['found_blocks']}" + (f" ({where})" if where else "")
        page.line(f"asked for {asked['asked_blocks']} blocks ({size} tokens), {found}, {_used(asked)}")
        _verdict(page, asked)
    for block in document["blocks"]:
        page.line(f"block {block['stopped_at'][:16]} in {_name(block)}")
        there = block["present"]
        if there:
            page.line(
                f"is there, in {' and '.join(there['tiers'])}, class {there['class']}, touched "
                f"{time_text(there['touched_at'])}, ends {time_text(there['expires_at'])}"
            )
        _verdict(page, block)
    if not asked and not document["blocks"]:
        page.line(
            f"nothing is remembered of {what!r}: neither a request of that name nor a block of that hash"
        )
    return page


def _name(document: Mapping[str, Any]) -> str:
    tenant = f", tenant {document['tenant']}" if document["tenant"] else ""
    return f"namespace {document['namespace'][:12]} ({document['model']}{tenant})"


def _used(asked: Mapping[str, Any]) -> str:
    if asked["delivered_blocks"] is None:
        return "released none" if asked["found_blocks"] else "so there was nothing to use"
    return f"used {asked['delivered_blocks']}"


def _verdict(page: Sheet, item: Mapping[str, Any]) -> None:
    if not item["reason"]:
        return
    page.line(f"stopped at block {item['stopped_at'][:16]}: {item['reason']}")
    left = item["departed"]
    if left:
        evicted = left["evicted_bytes_since"]
        since = f"; {bytes_text(evicted)} were evicted from then on" if evicted else ""
        page.line(
            f"that block was of class {left['class']}, last touched {time_text(left['touched_at'])}, "
            f"gone {time_text(left['left_at'])}{since}"
        )
    if item["remedy"]:
        page.line(f"what would have saved it: {item['remedy']}")
