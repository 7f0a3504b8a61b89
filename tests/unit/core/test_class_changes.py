"""A class changed on a running ladder: hidden at once, back on undo, gone for good only after the window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.ladder import Ladder
from kvstore.core.roll import SHELF_NODES
from kvstore.errors import InvalidArgument
from kvstore.retention import CHANGES_MAX, HOUR, UNDO_SECONDS, ClassTable
from kvstore.types import MissReason, TtlMode
from tests.support.driver import put
from tests.unit.core.rig import Rig


def with_ttl(ladder: Ladder, name: str, seconds: float) -> ClassTable:
    table = ladder.class_table()
    return table.changed(replace(table.named(name), ttl_seconds=seconds), at=ladder.wall())


def stored(rig: Rig, blocks: int, *, salt: int, retention_class: str = "agent") -> bytes:
    keys = rig.keys(blocks, salt=salt)
    put(rig.ladder, rig.space, rig.root, keys, retention_class=retention_class)
    return keys


@pytest.mark.parametrize("ssd", [True, False])
def test_a_shorter_life_hides_at_once_and_undo_brings_back(ssd: bool) -> None:
    rig = Rig(ssd=ssd)
    old, young = stored(rig, 6, salt=1), None
    rig.tick(2 * HOUR)
    young = stored(rig, 4, salt=2)
    shorter = with_ttl(rig.ladder, "agent", HOUR)
    foreseen = rig.ladder.effect(shorter)
    assert (foreseen.hides.blocks, foreseen.shows.blocks) == (6, 0)
    assert foreseen.hides.bytes == 6 * 4096
    assert rig.length(old) == 6
    rig.ladder.adopt(shorter)
    answer = rig.match(old)
    assert (answer.blocks, answer.reason) == (0, MissReason.EXPIRED)
    assert rig.length(young) == 4
    for _ in range(9):
        rig.tick(60)
    rig.ladder.adopt(rig.ladder.class_table().undone("", at=rig.ladder.wall()))
    assert rig.length(old) == 6


@pytest.mark.parametrize("ssd", [True, False])
def test_what_was_hidden_goes_after_the_window(ssd: bool) -> None:
    rig = Rig(ssd=ssd)
    old = stored(rig, 6, salt=1)
    rig.tick(2 * HOUR)
    rig.ladder.adopt(with_ttl(rig.ladder, "agent", HOUR))
    rig.tick(UNDO_SECONDS - 1)
    assert len(rig.ladder.catalog.segments) == int(ssd)
    rig.tick(2)
    assert not rig.ladder.catalog.slabs.used_pages
    assert not len(rig.ladder.catalog.segments)
    with pytest.raises(InvalidArgument, match="nothing to undo"):
        rig.ladder.class_table().undone("agent", at=rig.ladder.wall())
    assert rig.match(old).reason is MissReason.EXPIRED


def test_of_several_changes_the_longest_life_is_kept_and_each_is_undone_in_turn() -> None:
    rig = Rig(ssd=False)
    old = stored(rig, 3, salt=1)
    rig.tick(2 * HOUR)
    rig.ladder.adopt(with_ttl(rig.ladder, "agent", HOUR))
    rig.tick(UNDO_SECONDS / 2)
    rig.ladder.adopt(with_ttl(rig.ladder, "agent", 60))
    rig.ladder.adopt(with_ttl(rig.ladder, "chat", 60))
    table = rig.ladder.class_table()
    assert table.keep_seconds("agent", rig.ladder.wall()) == 72 * HOUR
    once = table.undone("agent", at=rig.ladder.wall())
    assert (once.named("agent").ttl_seconds, once.named("chat").ttl_seconds) == (HOUR, 60)
    rig.ladder.adopt(once.undone("agent", at=rig.ladder.wall()))
    assert rig.length(old) == 3


def test_a_longer_life_shows_what_has_expired_and_is_still_there() -> None:
    rig = Rig()
    old = stored(rig, 6, salt=1, retention_class="batch")
    lasting = stored(rig, 1, salt=2, retention_class="agent")
    rig.clock.advance(2 * HOUR)
    longer = with_ttl(rig.ladder, "batch", 3 * HOUR)
    foreseen = rig.ladder.effect(longer)
    assert (foreseen.hides.blocks, foreseen.shows.blocks) == (0, 6)
    rig.ladder.adopt(longer)
    assert (rig.length(old), rig.length(lasting)) == (6, 1)


def test_what_follows_a_hidden_run_is_counted_as_hidden_too() -> None:
    rig = Rig()
    keys = rig.keys(8)
    put(rig.ladder, rig.space, rig.root, keys[: 3 * 32], retention_class="batch")
    rig.clock.advance(1800)
    put(rig.ladder, rig.space, keys[2 * 32 : 3 * 32], keys[3 * 32 :], retention_class="chat")
    rig.clock.advance(60)
    foreseen = rig.ladder.effect(with_ttl(rig.ladder, "chat", 30))
    assert (foreseen.hides.runs, foreseen.hides.blocks) == (1, 8)


def test_a_fixed_class_is_no_longer_renewed() -> None:
    rig = Rig()
    keys = stored(rig, 2, salt=1, retention_class="batch")
    table = rig.ladder.class_table()
    rig.ladder.adopt(table.changed(replace(table.named("batch"), mode=TtlMode.FIXED), at=rig.ladder.wall()))
    rig.clock.advance(0.75 * HOUR)
    assert rig.match(keys).blocks == 2
    rig.clock.advance(0.5 * HOUR)
    assert rig.length(keys) == 0


def test_changes_have_a_limit_and_say_what_is_wrong() -> None:
    table = Rig().ladder.class_table()
    with pytest.raises(InvalidArgument, match="nothing changes"):
        table.changed(table.named("agent"), at=0)
    with pytest.raises(InvalidArgument, match="'agnet' is unknown"):
        table.changed(replace(table.named("agent"), name="agnet"), at=0)
    for number in range(CHANGES_MAX):
        table = table.changed(replace(table.named("agent"), ttl_seconds=100.0 + number), at=number)
    with pytest.raises(InvalidArgument, match=f"the limit is {CHANGES_MAX} changes"):
        table.changed(replace(table.named("agent"), ttl_seconds=5), at=CHANGES_MAX)
    later = table.changed(replace(table.named("agent"), ttl_seconds=5), at=UNDO_SECONDS + CHANGES_MAX)
    assert len(later.changes) == 1


def test_the_forecast_tells_hours_by_class() -> None:
    rig = Rig()
    stored(rig, 2, salt=1, retention_class="batch")
    rig.clock.advance(HOUR / 2)
    stored(rig, 3, salt=2, retention_class="batch")
    stored(rig, 4, salt=3, retention_class="agent")
    for salt in range(SHELF_NODES + 1):
        stored(rig, 1, salt=100 + salt, retention_class="chat")
    pauses: list[int] = []
    forecast = rig.ladder.forecast(hours=72, pause=lambda: pauses.append(1))
    assert len(pauses) == 2
    batch = forecast.hours["batch"]
    assert {hour: (a.runs, a.blocks, a.bytes) for hour, a in batch.items()} == {
        0: (1, 2, 8192),
        1: (1, 3, 12288),
    }
    assert forecast.later["agent"].blocks == 4
    assert forecast.later["chat"].runs == SHELF_NODES + 1
    rig.clock.advance(0.75 * HOUR)
    assert rig.ladder.forecast(hours=1).expired["batch"].blocks == 2
