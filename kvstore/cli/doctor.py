"""`kvstore doctor`: is this machine fit, does the daemon work, and what to do about each finding."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.checks import Place, examine
from kvstore.cli.connection import AddressOption, CaOption, Daemon, JsonOption, TokenOption, listens
from kvstore.cli.output import (
    EXIT_FINE,
    EXIT_PROBLEM,
    Sheet,
    duration_text,
    emit_json,
    plain,
    progress,
    styled,
)
from kvstore.errors import KVStoreError
from kvstore.finding import Finding, Level
from kvstore.paths import default_address
from kvstore.settings import load

STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "red"}


def doctor(
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Data directory to look at; else the configured one."),
    ] = None,
    shared_memory: Annotated[
        Path | None,
        typer.Option("--shared-memory", metavar="DIR", help="Mount of the arena; else the configured one."),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Start a temporary daemon and put a run through every tier.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="NAME", help="An engine to examine too: transformers, vllm."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option("--python", metavar="FILE", help="The engine's interpreter; else this command's own."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Configuration the daemon would read.")
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
) -> None:
    """Check the machine, then use the daemon: write, read, verify and delete a small run.

    Each finding says what to do about it. Exit code 1 when one of them is a
    problem; a note is none. --self-test also sees a restart and an expiry.
    --engine asks whether an engine and its adapter are there, in tested versions,
    and whether blocks in its layout go into the daemon and come back.

    Examples:

      kvstore doctor

      kvstore doctor --self-test

      kvstore doctor --data /mnt/nvme/kvstore --json

      kvstore doctor --engine vllm --python /opt/vllm/bin/python
    """
    with progress("asking the daemon", total=None):
        answer = _ask(address or default_address(), token, tls_ca)
    place = _place(data, shared_memory, config, answer)
    sections = {"Machine": examine(place)}
    with progress("using the daemon", total=None):
        sections["Daemon"] = _daemon(answer, token, tls_ca)
    if self_test:
        sections["Temporary daemon"] = _self_test()
    if engine is not None:
        sections[f"Engine {engine}"] = _engine(engine, python, answer.address, token, tls_ca)
    raise typer.Exit(_report(sections, as_json=as_json))


def _report(sections: dict[str, list[Finding]], *, as_json: bool) -> int:
    """Print the findings and return the exit code."""
    findings = [finding for section in sections.values() for finding in section]
    problems = [finding for finding in findings if finding.level is Level.PROBLEM]
    if as_json:
        emit_json({"findings": [_plain(name, f) for name, section in sections.items() for f in section]})
    else:
        _sheet(sections, len(problems)).show()
    return EXIT_PROBLEM if problems else EXIT_FINE


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the daemon said of itself, or why it said nothing."""

    address: str
    document: dict[str, Any]
    serving: bool
    error: KVStoreError | None = None


def _ask(address: str, token: str, tls_ca: Path | None) -> _Answer:
    try:
        with Daemon(address, token=token, tls_ca=tls_ca) as daemon:
            return _Answer(address, daemon.status(), daemon.serving())
    except KVStoreError as error:
        return _Answer(address, {}, serving=False, error=error)


def _place(data: Path | None, shared_memory: Path | None, config: Path | None, answer: _Answer) -> Place:
    """Return the places that the running daemon uses; without one, those that it would use."""
    used = answer.document.get("settings", {})
    if {"ssd.path", "host.directory"} <= set(used):
        directory, memory = Path(used["ssd.path"]), Path(used["host.directory"])
    else:
        settings = load(environ=os.environ, config=config).settings
        directory, memory = settings.ssd.path, settings.host.directory
    return Place((data or directory).absolute(), (shared_memory or memory).absolute(), answer.address)


def _daemon(answer: _Answer, token: str, tls_ca: Path | None) -> list[Finding]:
    check = "daemon"
    if answer.error is not None and listens(answer.address):
        return [Finding(check, Level.PROBLEM, str(answer.error), "look at its log; restart it if it hangs")]
    if answer.error is not None:
        advice = "`kvstore serve` starts one; `kvstore doctor --self-test` tries a temporary one"
        return [Finding(check, Level.NOTE, f"no daemon answers at {answer.address}", advice)]
    version, up = answer.document.get("version", "?"), answer.document.get("uptime_seconds", 0.0)
    found = f"version {version} answers at {answer.address}, up {duration_text(up)}"
    if not answer.serving:
        return [Finding(check, Level.PROBLEM, found + ", but is not serving", "look at its log")]
    from kvstore.cli.selftest import exercise

    return [Finding(check, Level.OK, found), *exercise(answer.address, token=token, tls_ca=tls_ca)]


def _engine(name: str, python: Path | None, address: str, token: str, tls_ca: Path | None) -> list[Finding]:
    from kvstore.cli.engines import examine_engine

    with progress(f"importing {name}", total=None):
        return examine_engine(name, python=python, address=address, token=token, tls_ca=tls_ca)


def _self_test() -> list[Finding]:
    from kvstore.cli.selftest import self_test

    findings: list[Finding] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-doctor-") as directory,
        progress("temporary daemon", total=None) as bar,
    ):
        for finding in self_test(Path(directory)):
            findings.append(finding)
            bar.to(len(findings), label=f"temporary daemon: {finding.check}")
    return findings


def _sheet(sections: dict[str, list[Finding]], problems: int) -> Sheet:
    page = Sheet()
    for name, findings in sections.items():
        rows = [(styled(f.level, STYLES[f.level]), plain(f.check), _told(f)) for f in findings]
        page.table(name, ("", "check", "finding"), rows)
    if problems:
        page.markup(styled(f"{problems} problem{'s' if problems > 1 else ''} found", "bold red"))
    else:
        page.markup(styled("no problem found", "bold green"))
    return page


def _told(finding: Finding) -> str:
    return plain(finding.found) + (f"\n{styled('-> ' + finding.advice, 'cyan')}" if finding.advice else "")


def _plain(section: str, finding: Finding) -> dict[str, str]:
    return {
        "section": section.lower(),
        "check": finding.check,
        "level": str(finding.level),
        "found": finding.found,
        "advice": finding.advice,
    }
