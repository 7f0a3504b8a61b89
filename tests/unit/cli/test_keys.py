"""`keys`: what is shown, what is written, and that a shredded tenant leaves nothing that could be read."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import run
from kvstore.testing.frames import FrameBuilder, two_part_namespace
from kvstore.tiers.ssd.crypto_keys import KeyRing, TenantKey, parse_keys, read_key_file, read_table
from tests.support.ssd import recovered_ssd

WAIT_SECONDS = 30.0


class Place:
    """A configuration, a key file and a data directory."""

    def __init__(self, root: Path, keys_name: str = "keys.toml") -> None:
        self.keys, self.data, self.config = root / keys_name, root / "data", root / "kvstore.toml"
        self.config.write_text(
            f'[ssd]\npath = "{self.data}"\n[encryption]\nenabled = true\nkey_file = "{self.keys}"\n'
        )

    def run(self, *arguments: str) -> int:
        return run(["keys", *arguments, "--config", str(self.config)])

    def store(self, *tenants: str) -> None:
        """Write a frame of three blocks for each tenant."""
        ring = KeyRing(lambda: read_table(key_file=self.keys, key_command=()))
        tier = recovered_ssd(self.data, keys=ring)
        for tenant in tenants:
            builder = FrameBuilder(namespace=replace(two_part_namespace(), tenant=tenant))
            tier.register(builder.namespace)
            (future,) = tier.write([builder.frame(3).write])
            assert future.result(WAIT_SECONDS).location
        tier.close(deadline_seconds=WAIT_SECONDS)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def listed(place: Place, capsys: pytest.CaptureFixture[str]) -> list[tuple[Any, ...]]:
    capsys.readouterr()
    assert place.run("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    return [(row["tenant"], row["id"], row["state"], row["segments"], row["frames"]) for row in rows]


@pytest.mark.parametrize("name", ["keys.toml", "keys.json"])
def test_rotation_makes_the_file_and_keeps_old_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    place = Place(tmp_path, name)
    assert place.run("rotate", "acme") == 0
    assert "tenant 'acme' writes with key 1 from now on" in capsys.readouterr().out
    assert place.run("rotate", "--default") == 0
    assert place.run("rotate", "acme") == 0
    assert place.keys.stat().st_mode & 0o777 == 0o600
    table = parse_keys(read_key_file(place.keys), source="test")
    assert [key.key_id for key in table.keys_of("acme")] == [3, 1]
    assert [key.key_id for key in table.keys_of(None)] == [2]
    assert place.keys.read_text().startswith("{") == (name == "keys.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "kvstore.toml"])


def test_what_is_listed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.run("rotate", "acme")
    place.store("acme")
    place.run("rotate", "acme")
    place.store("acme")
    assert listed(place, capsys) == [("acme", 2, "writes", 1, 1), ("acme", 1, "reads", 1, 1)]
    assert place.run("list") == 0
    shown = capsys.readouterr().out
    assert "writes" in shown
    secrets = [key.secret.hex() for key in parse_keys(place.keys.read_text(), source="").keys_of("acme")]
    assert not any(secret in shown for secret in secrets)
    place.keys.unlink()
    place.run("rotate", "new")
    assert listed(place, capsys) == [
        ("new", 1, "writes", 0, 0), ("-", 1, "another secret", 1, 1), ("-", 2, "missing", 1, 1),
    ]  # fmt: skip


def test_shredding(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.run("rotate", "acme")
    place.run("rotate", "other")
    place.store("acme", "other")
    secret = parse_keys(place.keys.read_text(), source="").keys_of("acme")[0].secret.hex()
    old = place.keys.open("rb")
    capsys.readouterr()
    assert place.run("shred", "acme", "--yes", "--json") == 0
    receipt = json.loads(capsys.readouterr().out)
    assert (receipt["tenant"], receipt["keys"], receipt["frames"]) == ("acme", [1], 1)
    assert receipt["bytes"] > 3 * 6000
    assert not any(old.read()), "the file that held the key is overwritten where it lay"
    old.close()
    assert secret not in place.keys.read_text()
    table = parse_keys(read_key_file(place.keys), source="test")
    assert table.keys_of("acme") == (TenantKey(1),)
    assert listed(place, capsys) == [("acme", 1, "shredded", 1, 1), ("other", 2, "writes", 1, 1)]
    place.store()
    assert listed(place, capsys) == [("acme", 1, "shredded", 0, 0), ("other", 2, "writes", 1, 1)]
    assert place.run("shred", "acme", "--yes") == 2
    assert "no key of its own" in capsys.readouterr().err


def test_shredding_asks(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place.run("rotate", "--default")
    before = place.keys.read_bytes()
    monkeypatch.setattr("typer.confirm", refuse)
    assert place.run("shred", "--default") != 0
    assert place.keys.read_bytes() == before


def refuse(text: str, **options: object) -> bool:
    import typer

    assert "the default key: keys 1; 0 frames" in text
    raise typer.Abort


def test_misuse(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run("rotate") == 2
    assert place.run("rotate", "a", "--default") == 2
    assert (
        run(["keys", "shred", "a", "--set", f"ssd.path={tmp_path}", "--set", "encryption.key_command=k"]) == 2
    )
    assert "kill -HUP" in capsys.readouterr().err


def test_the_daemon_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append((pid, number)))
    place.data.mkdir()
    (place.data / "lock").write_text("4711\n")
    assert place.run("rotate", "a") == 0
    assert "no daemon runs" in capsys.readouterr().out
    with (place.data / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert place.run("rotate", "a") == 0
    assert told == [(4711, signal.SIGHUP)]
    assert "pid 4711 was told" in capsys.readouterr().out


def test_verify_and_inspect_of_a_stopped_store(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.run("rotate", "acme")
    place.store("acme")
    offline = ["--offline", str(place.data)]
    capsys.readouterr()
    assert run(["verify", *offline, "--json"]) == 0
    blind = json.loads(capsys.readouterr().out)
    assert (blind["blocks"], blind["unreadable"], blind["faults"]) == (3, 3, [])
    assert run(["verify", *offline]) == 0
    assert "3 blocks cannot be judged: their key is not at hand" in capsys.readouterr().out
    assert run(["verify", *offline, "--keys", str(place.keys), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unreadable"] == 0
    assert run(["inspect", "segments", *offline, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["segments"][0]["frames"] == 1
    (segment,) = (place.data / "segments").iterdir()
    content = bytearray(segment.read_bytes())
    content[8192 + 5] ^= 1
    segment.write_bytes(content)
    assert run(["verify", *offline, "--keys", str(place.keys), "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert "does not authenticate" in fault["detail"]
