"""Examines an engine for `doctor`: in the engine's interpreter, and by what the daemon counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import typer

from kvstore.cli.connection import Daemon
from kvstore.cli.status import labelled
from kvstore.errors import KVStoreError
from kvstore.finding import Finding, Level

EXAMINATION = "engine_adapters.doctor"
EXAMINATION_SECONDS = 300.0
"""Importing an engine on a cold disk takes minutes at worst."""
MISUSE = 2
SHOWN_CHARACTERS = 400


def examine_engine(
    name: str, *, python: Path | None, address: str, token: str = "", tls_ca: Path | None = None
) -> list[Finding]:
    """Examine an engine in the environment of `python` (default: this one) and against the daemon.

    Errors: typer.BadParameter when there is no such engine.
    """
    before = _hit_tokens(address, token, tls_ca)
    findings = _in_its_environment(name, python, address, token, tls_ca)
    if any(finding.check == "round trip" and finding.level is not Level.PROBLEM for finding in findings):
        findings.append(_counters(before, _hit_tokens(address, token, tls_ca)))
    return findings


def _in_its_environment(
    name: str, python: Path | None, address: str, token: str, tls_ca: Path | None
) -> list[Finding]:
    command = [str(python or sys.executable), "-m", EXAMINATION, name, "--address", address, "--json"]
    if tls_ca is not None:
        command += ["--tls-ca", str(tls_ca)]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=EXAMINATION_SECONDS,
            env=os.environ | {"KVSTORE_TOKEN": token},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("interpreter", Level.PROBLEM, f"{command[0]}: {error}", "name another with --python")]
    last = done.stdout.strip().splitlines()[-1:]
    try:
        rows = json.loads(last[0])["findings"]
    except (IndexError, ValueError, KeyError, TypeError):
        return [_spoke_otherwise(done, command[0])]
    return [Finding(row["check"], Level(row["level"]), row["found"], row["advice"]) for row in rows]


def _spoke_otherwise(done: subprocess.CompletedProcess[str], python: str) -> Finding:
    said = done.stderr.strip()[-SHOWN_CHARACTERS:]
    if done.returncode == MISUSE:
        raise typer.BadParameter(said.rpartition("error: ")[2], param_hint="--engine")
    if "No module named" in said:
        advice = f"install kvstore there too, its base is enough: `{python} -m pip install tiered-kvstore`"
        return Finding("interpreter", Level.PROBLEM, f"{python}: {said.splitlines()[-1]}", advice)
    found = f"{python} -m {EXAMINATION} ended with {done.returncode}: {said or 'it said nothing'}"
    return Finding("interpreter", Level.PROBLEM, found, "run that command by hand")


def _hit_tokens(address: str, token: str, tls_ca: Path | None) -> float | None:
    """Return how many hit tokens the daemon has counted, None when it does not say."""
    try:
        with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
            counters = daemon.status().get("counters", {})
    except KVStoreError:
        return None
    return sum(labelled(counters, "kvstore_hit_tokens_total", "tier").values())


def _counters(before: float | None, after: float | None) -> Finding:
    check = "hit counters"
    if before is None or after is None:
        advice = "an administrator's token is needed to ask"
        return Finding(check, Level.NOTE, "the daemon does not say what it has counted", advice)
    if after > before:
        found = f"kvstore_hit_tokens_total went from {before:,.0f} to {after:,.0f}"
        return Finding(check, Level.OK, found)
    found = f"blocks were fetched, and kvstore_hit_tokens_total stays at {after:,.0f}"
    return Finding(check, Level.PROBLEM, found, "look at the daemon's log, and file a bug with it")
