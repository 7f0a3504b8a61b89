"""What the examination of an engine finds when something is missing, and that it uses a real daemon."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_adapters.doctor import examine, main
from engine_adapters.entry import Entry, entry_of, names
from kvstore.cli.child import ChildDaemon
from kvstore.client import Client, ClientLimits, Transport
from kvstore.errors import InvalidArgument
from kvstore.finding import Finding, Level
from kvstore.namespace import Namespace
from kvstore.testing.adapter_suite.toy import layout_of


def sample() -> Namespace:
    return Namespace(model="toy", weights="none", layout=layout_of(2, 16), block_tokens=16)


ENTRY = Entry(
    name="toy", distributions=("no-such-engine", "pytest"), tested=("0.1", "9"), adapter="json", sample=sample
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildDaemon]:
    with ChildDaemon(tmp_path_factory.mktemp("daemon"), arena_bytes=16 << 20) as running:
        yield running


def nobody(tmp_path: Path) -> Client:
    return Client(f"unix:{tmp_path / 'nobody.sock'}", limits=ClientLimits(connect_seconds=1.0))


def found(entry: Entry, client: Client) -> dict[str, Finding]:
    with client:
        return {finding.check: finding for finding in examine(entry, client)}


def test_all_is_well_with_a_daemon(daemon: ChildDaemon) -> None:
    findings = found(ENTRY, Client(daemon.address))
    assert list(findings) == ["engine", "adapter", "namespace", "round trip"]
    assert {finding.level for finding in findings.values()} == {Level.OK}, findings
    with Client(daemon.address) as client:
        assert client.open(sample()).list().runs == ()


def test_a_daemon_that_cannot_be_mapped_is_worth_a_note(daemon: ChildDaemon) -> None:
    findings = found(ENTRY, Client(daemon.address, transport=Transport.FRAMED))
    assert findings["round trip"].level is Level.NOTE
    assert "not mapped" in findings["round trip"].found


def test_without_a_daemon_the_engine_is_examined(tmp_path: Path) -> None:
    findings = found(ENTRY, nobody(tmp_path))
    assert list(findings) == ["engine", "adapter", "namespace"]
    assert findings["namespace"].level is Level.PROBLEM
    assert "kvstore serve" in findings["namespace"].advice


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    findings = found(dataclasses.replace(ENTRY, distributions=("no-such-engine",)), nobody(tmp_path))
    assert list(findings) == ["engine"]
    assert findings["engine"].level is Level.PROBLEM
    assert "--engine toy --python" in findings["engine"].advice


def test_a_version_that_was_not_tested(tmp_path: Path) -> None:
    findings = found(dataclasses.replace(ENTRY, tested=("0.1",)), nobody(tmp_path))
    assert findings["engine"].level is Level.NOTE
    assert "tested are 0.1" in findings["engine"].found
    assert findings["adapter"].level is Level.OK


def test_an_adapter_that_does_not_import(tmp_path: Path) -> None:
    findings = found(dataclasses.replace(ENTRY, adapter="no_such_module"), nobody(tmp_path))
    assert list(findings) == ["engine", "adapter"]
    assert findings["adapter"].level is Level.PROBLEM
    assert "ModuleNotFoundError" in findings["adapter"].found


def test_every_engine_has_an_entry_of_its_name() -> None:
    assert "transformers" in names()
    assert all(entry_of(name).name == name for name in names())
    with pytest.raises(InvalidArgument, match="there are transformers"):
        entry_of("nothing")


def test_the_document_and_the_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["transformers", "--address", f"unix:{tmp_path / 'nobody.sock'}"]
    assert main([*arguments, "--json"]) == 1
    (document,) = capsys.readouterr().out.splitlines()
    levels = {row["check"]: row["level"] for row in json.loads(document)["findings"]}
    assert levels["adapter"] == "ok"
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])
    assert ended.value.code == 2
