"""Classes changed on a running store: foreseen, kept across restarts, overruled by a newer configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore import hashing
from kvstore.api import MatchRequest
from kvstore.clock import ManualClock
from kvstore.errors import InvalidArgument, SettingsError, TierUnavailable
from kvstore.events import Events
from kvstore.retention import HOUR, UNDO_SECONDS
from kvstore.rpc.v1 import admin_pb2 as pb
from kvstore.service.store import Store
from kvstore.types import MatchMode
from tests.support.driver import namespace, put
from tests.unit.service.test_store import settings

SPACE = namespace()
ROOT = hashing.chain_root(SPACE.fingerprint)
KEYS = hashing.block_hashes(ROOT, list(range(24)), block_tokens=4)


@pytest.fixture
def place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


class Running:
    """A store with six blocks in it; start it again with other settings by making another."""

    def __init__(self, place: Path, clock: ManualClock, **more: object) -> None:
        self.store = Store.open(settings(place, **more), clock=clock, events=Events())
        self.store.recover()
        self.store.ladder.open(SPACE, root=ROOT)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close(deadline_seconds=5)

    def blocks(self) -> int:
        request = MatchRequest(namespace=SPACE.fingerprint, keys=KEYS, mode=MatchMode.PROBE)
        return self.store.ladder.match(request).blocks

    def set(self, name: str, *, dry_run: bool = False, **fields: object) -> dict[str, object]:
        change = pb.ClassChange(retention_class=name, **fields)  # type: ignore[arg-type]
        return self.store.administrator.retention(pb.RetentionRequest(change=change, dry_run=dry_run))

    def undo(self, name: str = "") -> dict[str, object]:
        request = pb.RetentionRequest(undo=pb.ClassUndo(retention_class=name))
        return self.store.administrator.retention(request)

    def row(self, name: str) -> dict[str, object]:
        document = self.store.administrator.retention(pb.RetentionRequest())
        found: dict[str, object] = next(row for row in document["classes"] if row["class"] == name)
        return found


def test_a_change_is_foreseen_then_made_then_kept_across_a_restart(place: Path) -> None:
    clock = ManualClock()
    with Running(place, clock) as first:
        put(first.store.ladder, SPACE, ROOT, KEYS)
        clock.advance(2 * HOUR)
        foreseen = first.set("agent", ttl_seconds=HOUR, dry_run=True)
        assert foreseen["hides"] == {"runs": 1, "blocks": 6, "bytes": 6 * 4096}
        assert (foreseen["applied"], first.blocks()) == (False, 6)
        assert not (place / "data" / "retention.json").exists()
        done = first.set("agent", ttl_seconds=HOUR)
        assert (done["applied"], done["persisted"], done["undo_seconds"]) == (True, True, UNDO_SECONDS)
        assert first.blocks() == 0
    clock.advance(60)
    with Running(place, clock) as second:
        assert any("classes.agent.ttl_seconds" in note for note in second.store.notes())
        assert "kvstore retention set" in str(second.row("agent")["origin"])
        second.store.ladder.tick()
        clock.advance(2)
        second.store.ladder.tick()
        assert second.blocks() == 0
        second.undo()
        assert second.blocks() == 6
        assert second.row("agent")["origin"] == "configuration"
    with Running(place, clock) as third:
        assert third.blocks() == 6
        assert third.row("agent")["ttl_seconds"] == 72 * HOUR


def test_a_newer_configuration_of_that_field_overrules_the_change(place: Path) -> None:
    clock = ManualClock()
    with Running(place, clock) as first:
        first.set("chat", ttl_seconds=HOUR)
        first.set("chat", quota_bytes=1 << 20)
    with Running(place, clock, classes__chat__ttl_seconds="9d") as second:
        assert (second.row("chat")["ttl_seconds"], second.row("chat")["quota_bytes"]) == (216 * HOUR, 1 << 20)
        assert any("classes.chat.ttl_seconds: configured anew" in note for note in second.store.notes())
    with Running(place, clock, classes__chat__ttl_seconds="9d") as third:
        assert third.row("chat")["quota_bytes"] == 1 << 20
        assert not any("configured anew" in note for note in third.store.notes())


def test_forever_and_fixed_survive_a_restart(place: Path) -> None:
    clock = ManualClock()
    with Running(place, clock) as first:
        first.set("batch", ttl_seconds=float("inf"), mode="fixed")
    with Running(place, clock) as second:
        assert second.row("batch")["ttl_seconds"] == float("inf")
        assert second.row("batch")["mode"] == "fixed"


def test_an_undo_after_a_restart_touches_nothing_else_of_the_class(place: Path) -> None:
    clock = ManualClock()
    with Running(place, clock) as first:
        first.set("chat", ttl_seconds=HOUR)
    with Running(place, clock, classes__chat__admission="second") as second:
        second.undo("chat")
        assert (second.row("chat")["ttl_seconds"], second.row("chat")["admission"]) == (168 * HOUR, "second")


def test_without_a_data_directory_it_holds_until_the_end(place: Path) -> None:
    clock = ManualClock()
    with Running(place, clock, ssd__enabled="false") as first:
        assert first.set("chat", ttl_seconds=HOUR)["persisted"] is False
    with Running(place, clock, ssd__enabled="false") as second:
        assert second.row("chat")["ttl_seconds"] == 168 * HOUR


def test_what_cannot_be_kept_is_not_done(place: Path) -> None:
    with Running(place, ManualClock()) as running:
        (place / "data" / "retention.json.tmp").mkdir()
        with pytest.raises(TierUnavailable, match="nothing has changed"):
            running.set("chat", ttl_seconds=HOUR)
        assert running.row("chat")["ttl_seconds"] == 168 * HOUR


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"version": 2}', '{"version": 1, "classes": {"a": {}}, "changes": []}'],
)
def test_a_file_that_cannot_be_read_is_left_alone_and_named(place: Path, content: str) -> None:
    (place / "data").mkdir()
    path = place / "data" / "retention.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match=r"retention\.json cannot be read.*move it away"):
        Running(place, ManualClock())
    assert path.read_text() == content


def test_the_file_says_its_version(place: Path) -> None:
    with Running(place, ManualClock()) as running:
        running.set("chat", ttl_seconds=HOUR)
    assert json.loads((place / "data" / "retention.json").read_text())["version"] == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttl_seconds": 0.0}, "greater than 0"),
        ({"ttl_seconds": float("nan")}, "greater than 0"),
        ({"mode": "rolling"}, "one of sliding, fixed"),
        ({}, "nothing changes"),
    ],
)
def test_a_senseless_change_is_refused(place: Path, fields: dict[str, object], message: str) -> None:
    with Running(place, ManualClock()) as running, pytest.raises(InvalidArgument, match=message):
        running.set("chat", **fields)  # type: ignore[arg-type]


def test_a_forecast_is_told_by_class(place: Path) -> None:
    clock = ManualClock()
    with Running(place, clock) as running:
        put(running.store.ladder, SPACE, ROOT, KEYS, retention_class="batch")
        document = running.store.administrator.forecast(pb.ForecastRequest(hours=3))
        assert document["classes"]["batch"]["hours"] == {"1": {"runs": 1, "blocks": 6, "bytes": 6 * 4096}}
        with pytest.raises(InvalidArgument, match="at most"):
            running.store.administrator.forecast(pb.ForecastRequest(hours=10**6))
