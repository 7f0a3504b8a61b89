"""Examines an engine and its adapter from inside the engine's own environment, with the base install alone.

    python -m engine_adapters.doctor vllm --address unix:/run/user/1000/kvstore/kvstore.sock --json

`kvstore doctor --engine vllm --python .../bin/python` runs this there, and looks at the daemon as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine_adapters.entry import Entry, entry_of
from kvstore.client import Client, OpenNamespace, TlsFiles, Transport
from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.finding import Finding, Level
from kvstore.types import ReleaseOutcome

BLOCKS = 4
DEADLINE_SECONDS = 10.0
LOG_ADVICE = "look at the daemon's log"
Payload = dict[int, npt.NDArray[np.uint8]]
"""Blocks of every part: [BLOCKS, bytes_max]."""


def examine(entry: Entry, client: Client) -> Iterator[Finding]:
    """Yield what is found, the engine first; what builds on a problem is not tried."""
    for check in (_engine, _adapter):
        finding = check(entry)
        yield finding
        if finding.level is Level.PROBLEM:
            return
    yield from _store(entry, client)


def _engine(entry: Entry) -> Finding:
    """Is the engine installed, in a version that the adapter was tested with?"""
    for distribution in entry.distributions:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        found, tested = f"{distribution} {version}", ", ".join(entry.tested)
        if any(version == minor or version.startswith(f"{minor}.") for minor in entry.tested):
            return Finding("engine", Level.OK, f"{found}, a tested version")
        advice = "run the adapter's tests with this version, or install a tested one"
        return Finding("engine", Level.NOTE, f"{found} is not tested, tested are {tested}", advice)
    found = f"none of {', '.join(entry.distributions)} is installed in {sys.prefix}"
    advice = (
        f"install it there, or name the engine's own interpreter: `kvstore doctor --engine {entry.name} "
        "--python PATH`"
    )
    return Finding("engine", Level.PROBLEM, found, advice)


def _adapter(entry: Entry) -> Finding:
    """Does the adapter, and with it the engine, import?"""
    began = time.monotonic()
    try:
        importlib.import_module(entry.adapter)
    except Exception as error:  # an engine may fail in any way
        found = f"{entry.adapter} does not import: {type(error).__name__}: {error}"
        return Finding("adapter", Level.PROBLEM, found, f"`{sys.executable} -c 'import {entry.adapter}'`")
    return Finding("adapter", Level.OK, f"{entry.adapter} imports, in {time.monotonic() - began:.1f} s")


def _store(entry: Entry, client: Client) -> Iterator[Finding]:
    """Do blocks in the engine's layout go into the daemon, and come back the same?"""
    try:
        namespace = entry.sample()
        client.ping(DEADLINE_SECONDS)
        space = client.open(namespace)
    except KVStoreError as error:
        advice = "`kvstore serve` starts a daemon; --address names another"
        yield Finding("namespace", Level.PROBLEM, str(error), advice)
        return
    layout = namespace.layout
    found = (
        f"{len(layout.parts)} parts, {layout.block_bytes / 1e6:.2f} MB and {namespace.block_tokens} tokens"
    )
    yield Finding("namespace", Level.OK, f"opens: {found} a block")
    payload = {
        part.index: np.frombuffer(secrets.token_bytes(BLOCKS * part.bytes_max), np.uint8).reshape(BLOCKS, -1)
        for part in layout.parts
    }
    keys = space.hashes([secrets.randbits(31) for _ in range(BLOCKS * namespace.block_tokens)])
    try:
        yield _round_trip(space, keys, payload)
    finally:
        space.delete(keys, deadline_seconds=DEADLINE_SECONDS)


def _round_trip(space: OpenNamespace, keys: bytes, payload: Payload) -> Finding:
    check, began = "round trip", time.monotonic()
    put = space.put(space.root, keys, payload, deadline_seconds=DEADLINE_SECONDS)
    if put.stored < BLOCKS:
        outcomes = ", ".join(f"{run.count} {run.outcome}" for run in put.outcomes) or str(put.reason)
        found = f"{put.stored} of {BLOCKS} blocks stored: {outcomes}"
        return Finding(check, Level.PROBLEM, found, LOG_ADVICE)
    match = space.match(keys, deadline_seconds=DEADLINE_SECONDS)
    into = {part: np.zeros_like(rows) for part, rows in payload.items()}
    fetched = space.fetch(match, into, deadline_seconds=DEADLINE_SECONDS)
    space.release(match, used=fetched.blocks, outcome=ReleaseOutcome.USED)
    space.client.ping(DEADLINE_SECONDS)  # what is said on a session is heard in order: the release has been
    if fetched.blocks < BLOCKS:
        found = f"{fetched.blocks} of {BLOCKS} blocks came back: {fetched.reason or match.reason}"
        return Finding(check, Level.PROBLEM, found, LOG_ADVICE)
    if any(not np.array_equal(into[part], rows) for part, rows in payload.items()):
        return Finding(check, Level.PROBLEM, "other bytes came back than were written", LOG_ADVICE)
    size = sum(rows.nbytes for rows in payload.values()) / 1e6
    found = f"{BLOCKS} blocks, {size:.1f} MB, put, matched and fetched in {time.monotonic() - began:.2f} s"
    if space.client.transport is Transport.FRAMED:
        advice = (
            "share the daemon's unix socket and its arena's mount with the engine, both are needed to map"
        )
        return Finding(check, Level.NOTE, f"{found}, by framed streams: the arena is not mapped", advice)
    return Finding(check, Level.OK, f"{found}, through the mapped arena")


def main(arguments: Sequence[str]) -> int:
    """Print the findings; the exit code is 1 when one of them is a problem, 2 for misuse."""
    parser = argparse.ArgumentParser(
        prog="engine_adapters.doctor", description="Examine an engine's adapter."
    )
    parser.add_argument("engine")
    parser.add_argument("--address", default=os.environ.get("KVSTORE_ADDRESS"))
    parser.add_argument("--tls-ca", default=os.environ.get("KVSTORE_TLS_CA"))
    parser.add_argument("--json", action="store_true", help="one JSON document, the last line of stdout")
    chosen = parser.parse_args(arguments)
    try:
        entry = entry_of(chosen.engine)
        tls = TlsFiles(chosen.tls_ca) if chosen.tls_ca else None
        client = Client(chosen.address, token=os.environ.get("KVSTORE_TOKEN", ""), tls=tls)
    except InvalidArgument as error:
        parser.error(str(error))
    with client:
        findings = list(examine(entry, client))
    if chosen.json:
        lines = [json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings]})]
    else:
        lines = [f"{finding.level:8} {finding.check:11} {finding.found}" for finding in findings]
        lines += [f"{'':20} -> {finding.advice}" for finding in findings if finding.advice]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(finding.level is Level.PROBLEM for finding in findings))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
