"""`kvstore inspect`: what is stored, in a running daemon or in a stopped one's data directory."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.connection import AddressOption, CaOption, Daemon, JsonOption, OfflineOption, TokenOption
from kvstore.cli.output import (
    EXIT_FINE,
    EXIT_PROBLEM,
    Sheet,
    bytes_text,
    count_text,
    duration_text,
    emit_json,
    hash_text,
    plain,
    time_text,
)
from kvstore.cli.views import NamespaceView, RunView, SegmentView
from kvstore.errors import InvalidArgument
from kvstore.hashing import block_hashes, chain_root
from kvstore.namespace import Namespace
from kvstore.rpc.enums import MISS_REASON
from kvstore.types import HASH_BYTES, key_count

HEX = re.compile(r"(?:[0-9a-f]{2})+")
RUNS_DEFAULT = 100

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    help="Look at namespaces, blocks and segments; `--offline DIR` reads a stopped store.",
)

NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAME",
        help="Model name, or first hex digits of a fingerprint. Not needed when there is only one.",
        show_default=False,
    ),
]


@app.command("namespaces")
def namespaces(
    address: AddressOption = None,
    offline: OfflineOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """List every namespace, what makes it different and what it holds.

    Examples:

      kvstore inspect namespaces

      kvstore inspect namespaces --offline /var/lib/kvstore --json
    """
    found = known_namespaces(address, offline, token, tls_ca)
    if as_json:
        emit_json({"namespaces": [view.to_plain() for view in found]})
        return
    page = Sheet()
    columns = ("fingerprint", "model, weights", "block>", "blocks>", "host>", "ssd>")
    page.table("Namespaces", columns, [_namespace_cells(view) for view in found])
    if not found:
        page.line("no namespace: nothing has been stored yet")
    page.show()


def _namespace_cells(view: NamespaceView) -> tuple[str, ...]:
    namespace = view.namespace
    tenant = f" (tenant {namespace.tenant})" if namespace.tenant else ""
    return (
        hash_text(namespace.fingerprint),
        plain(f"{namespace.model}, {namespace.weights[:12]}{tenant}"),
        f"{namespace.block_tokens} tokens, {bytes_text(namespace.layout.block_bytes)}",
        count_text(view.blocks),
        bytes_text(view.host_bytes),
        bytes_text(view.ssd_bytes),
    )


@app.command("blocks")
def blocks(
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens", metavar="FILE", help="Token ids of a prompt: JSON list or numbers; - is stdin."
        ),
    ] = None,
    hash_prefix: Annotated[
        str,
        typer.Option(
            "--hash", metavar="PREFIX", help="First hex digits of a block's hash.", show_default=False
        ),
    ] = "",
    keys: Annotated[
        str,
        typer.Option(
            "--keys", metavar="HEX,...", help="Whole hashes, in the order of the chain.", show_default=False
        ),
    ] = "",
    namespace: NamespaceOption = "",
    secret: Annotated[
        Path | None,
        typer.Option("--tenant-secret", metavar="FILE", help="The tenant's secret, where one was used."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=65536, help="Runs shown.")] = RUNS_DEFAULT,
    address: AddressOption = None,
    offline: OfflineOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Show where the blocks of a prompt lie, in which class, until when, and how big.

    With --tokens or --keys the last line says how much a match would find and
    why it ends there. Exit code 1 when nothing is found.

    Examples:

      kvstore inspect blocks --tokens prompt.json

      kvstore inspect blocks --hash 3fa9 --namespace SmolLM2-135M-Instruct
    """
    if sum(map(bool, (tokens, hash_prefix, keys))) != 1:
        raise InvalidArgument("inspect blocks: give one of --tokens FILE, --hash PREFIX or --keys HEX,...")
    chosen = choose_namespace(known_namespaces(address, offline, token, tls_ca), namespace)
    wanted = wanted_keys(chosen, tokens, keys, secret)
    prefix = hex_bytes(hash_prefix, "--hash")
    if offline is not None:
        found = _offline_blocks(offline, chosen, wanted, prefix, limit)
    else:
        with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
            reply = daemon.inspect(chosen.fingerprint, keys=wanted, hash_prefix=prefix, limit=limit)
        reason = MISS_REASON.from_wire_optional(reply.reason, "reason")
        found = ([RunView.from_wire(run) for run in reply.runs], reply.visible_blocks, str(reason or ""))
    _show_blocks(found, chosen, wanted, as_json=as_json)


Blocks = tuple[list[RunView], int, str]


def _offline_blocks(directory: Path, chosen: Namespace, wanted: bytes, prefix: bytes, limit: int) -> Blocks:
    from kvstore.cli import offline

    return offline.blocks(directory, chosen, keys=wanted, hash_prefix=prefix, limit=limit)


def _show_blocks(found: Blocks, chosen: Namespace, wanted: bytes, *, as_json: bool) -> None:
    runs, visible, reason = found
    asked = key_count(wanted)
    if as_json:
        document: dict[str, Any] = {
            "namespace": chosen.fingerprint.hex(),
            "runs": [run.to_plain() for run in runs],
        }
        if asked:
            document |= {"asked_blocks": asked, "visible_blocks": visible, "reason": reason or None}
        emit_json(document)
    else:
        _blocks_sheet(runs, visible, reason, asked, chosen.block_tokens).show()
    raise typer.Exit(EXIT_PROBLEM if (asked and not visible) or not runs else EXIT_FINE)


def _blocks_sheet(runs: Sequence[RunView], visible: int, reason: str, asked: int, block_tokens: int) -> Sheet:
    page = Sheet()
    columns = ("first block", "blocks>", "host>", "ssd>", "class", "written", "expires", "size>", "")
    now = time.time()
    page.table("Runs", columns, [_run_cells(run, now) for run in runs])
    if not runs:
        page.line("no such block")
    if asked:
        rest = f", then {reason}" if reason else ""
        page.line(
            f"a match finds {visible} of {asked} blocks, {visible * block_tokens:,} of "
            f"{asked * block_tokens:,} tokens{rest}"
        )
    return page


def _run_cells(run: RunView, now: float) -> tuple[str, ...]:
    notes = [f"approx({run.provenance})"] if run.provenance else []
    notes += ["leased"] if run.leased else []
    return (
        hash_text(run.keys),
        count_text(run.blocks),
        count_text(run.host_blocks),
        count_text(run.ssd_blocks),
        plain(run.retention_class),
        f"{duration_text(now - run.written_at)} ago",
        _expiry_text(run.expires_at, now),
        bytes_text(run.bytes),
        ", ".join(notes),
    )


def _expiry_text(expires_at: float | None, now: float) -> str:
    if expires_at is None:
        return "-"
    if math.isinf(expires_at):
        return "never"
    left = expires_at - now
    return f"in {duration_text(left)}" if left > 0 else f"{duration_text(-left)} ago"


@app.command("segments")
def segments(
    address: AddressOption = None,
    offline: OfflineOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """List the segments of the SSD tier: files of frames that expire together.

    Examples:

      kvstore inspect segments

      kvstore inspect segments --offline /var/lib/kvstore
    """
    if offline is not None:
        from kvstore.cli import offline as files

        found = files.segments(offline)
    else:
        with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
            found = [SegmentView.from_wire(message) for message in daemon.segments()]
    if as_json:
        emit_json({"segments": [view.to_plain() for view in found]})
        return
    page = Sheet()
    for folder in sorted({str(Path(view.path).parent) for view in found}):
        page.line(f"in {folder}")
    columns = ("file", "bucket", "frames>", "size>", "state", "created")
    page.table("Segments", columns, [_segment_cells(view) for view in found])
    if not found:
        page.line("no segment: nothing has been written to SSD yet")
    page.show()


def _segment_cells(view: SegmentView) -> tuple[str, ...]:
    return (
        plain(Path(view.path).name),
        plain(view.bucket),
        count_text(view.frames),
        bytes_text(view.bytes),
        "sealed" if view.sealed else "open",
        time_text(view.created_at),
    )


def known_namespaces(
    address: str | None, offline: Path | None, token: str, tls_ca: Path | None
) -> list[NamespaceView]:
    """Return the namespaces of a running daemon, or of a stopped one's directory."""
    if offline is not None:
        from kvstore.cli import offline as files

        return files.namespaces(offline)
    with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
        return [NamespaceView.from_wire(message) for message in daemon.namespaces()]


def choose_namespace(views: Sequence[NamespaceView], name: str) -> Namespace:
    """Return the namespace that `name` means: a model's name or the start of a fingerprint.

    An empty name means the only one there is.

    Errors: InvalidArgument listing what there is.
    """
    known = [view.namespace for view in views]
    fits = [n for n in known if not name or n.model == name or n.fingerprint.hex().startswith(name.lower())]
    if len(fits) == 1:
        return fits[0]
    listed = ", ".join(f"{n.fingerprint.hex()[:16]} ({n.model})" for n in fits or known) or "none"
    if not fits:
        raise InvalidArgument(f"no namespace fits {name!r}; there is: {listed}")
    if not name:
        raise InvalidArgument(f"there are {len(fits)} namespaces, say which with --namespace: {listed}")
    raise InvalidArgument(f"--namespace {name}: {len(fits)} namespaces fit, give more digits: {listed}")


def wanted_keys(chosen: Namespace, tokens: Path | None, keys: str, secret: Path | None) -> bytes:
    if tokens is not None:
        root = chain_root(chosen.fingerprint, tenant_secret=secret.read_bytes() if secret else b"")
        ids = read_tokens(sys.stdin.read() if str(tokens) == "-" else tokens.read_text(), str(tokens))
        if len(ids) < chosen.block_tokens:
            raise InvalidArgument(
                f"--tokens {tokens}: {len(ids)} tokens are no full block; one has {chosen.block_tokens}"
            )
        return block_hashes(root, ids, block_tokens=chosen.block_tokens)
    packed = b"".join(hex_bytes(key, "--keys") for key in keys.split(",") if key)
    if len(packed) % HASH_BYTES:
        raise InvalidArgument(f"--keys: hashes have {2 * HASH_BYTES} hex digits each, got {keys!r}")
    return packed


def read_tokens(text: str, name: str) -> list[int]:
    """Return token ids from a JSON list, or from numbers apart by spaces, commas or lines.

    Errors: InvalidArgument naming the file and what is no number.
    """
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else re.split(r"[\s,]+", text.strip())
        return [int(item) for item in ids]
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"--tokens {name}: not a list of token ids: {error}") from error


def hex_bytes(text: str, option: str) -> bytes:
    text = text.strip().lower()
    if text and not HEX.fullmatch(text):
        raise InvalidArgument(f"{option}: an even number of hex digits is expected, got {text!r}")
    return bytes.fromhex(text)
