"""From a question to what is printed: a daemon's document as a page for people, or as it is for machines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from kvstore.cli.connection import Daemon
from kvstore.cli.output import Sheet, emit_json, say

Document = dict[str, Any]
Drawn = Callable[[Mapping[str, Any]], Sheet]


def tell(document: Document, drawn: Drawn, *, as_json: bool) -> None:
    """Print a document."""
    emit_json(document) if as_json else drawn(document).show()


def ask(
    verb: str,
    request: Any,
    drawn: Drawn,
    *,
    address: str | None,
    token: str,
    tls_ca: Path | None,
    as_json: bool,
) -> Document:
    """Ask a daemon one question and print the answer; returns it.

    Errors: those of `Daemon.document`.
    """
    with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
        document = daemon.document(verb, request)
    tell(document, drawn, as_json=as_json)
    return document


def carry_out(
    daemon: Daemon,
    verb: str,
    request: Any,
    foreseen: Drawn,
    *,
    question: str,
    yes: bool,
    as_json: bool,
) -> Document | None:
    """Say what a request would do, ask where somebody can answer, and do it; None when it is not to be done.

    `request.dry_run` asks for what it would do.
    """
    if not yes:
        request.dry_run = True
        tell(daemon.document(verb, request), foreseen, as_json=as_json)
        if as_json:
            return None
        if not sys.stdin.isatty():
            say("nothing has changed: --yes does it")
            return None
        typer.confirm(question, abort=True, err=True)
        request.dry_run = False
    return daemon.document(verb, request)
