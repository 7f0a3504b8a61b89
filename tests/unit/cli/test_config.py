"""`kvstore config`: what the daemon would run with, and where each value came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.main import run
from kvstore.cli.output import EXIT_FINE, EXIT_MISUSE


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("KVSTORE_CLASSES__AGENT__TTL_SECONDS", "4d")
    for name in ("KVSTORE_ADDRESS", "KVSTORE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_json_has_value_and_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "kvstore.toml"
    config.write_text('[ssd]\nsegment_bytes = "8MiB"\n')
    assert run(["config", "--json", "--config", str(config), "--set", "log.level=debug"]) == EXIT_FINE
    document = json.loads(capsys.readouterr().out)
    assert document["ssd.path"] == {"value": f"{tmp_path}/kvstore", "origin": "default"}
    assert document["ssd.segment_bytes"] == {"value": 8 << 20, "origin": f"file {config}"}
    assert document["log.level"] == {"value": "debug", "origin": "flag --set log.level"}
    assert document["classes.agent.ttl_seconds"] == {
        "value": 345600.0,
        "origin": "environment KVSTORE_CLASSES__AGENT__TTL_SECONDS",
    }


def test_only_what_was_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--changed", "--origin"]) == EXIT_FINE
    shown = capsys.readouterr().out
    assert "4 d" in shown
    assert "environment KVSTORE_CLASSES__AGENT__TTL_SECONDS" in shown
    assert "ssd.path" not in shown


def test_a_wrong_setting_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--set", "ssd.pth=x"]) == EXIT_MISUSE
    assert "the nearest valid key is ssd.path" in capsys.readouterr().err
