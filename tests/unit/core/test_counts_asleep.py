"""What sleeps is counted from its rows: all counts are the same as of the same store awake."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvstore.core.purging import Target
from kvstore.core.roll import SHELF_NODES, Roll
from kvstore.core.sweep import Amount
from kvstore.retention import HOUR
from kvstore.types import BlockHash
from tests.support.asleep import asleep_twice
from tests.support.driver import namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig
from tests.unit.core.test_sleep import again, asleep, use


def a_store_of_several_lives() -> Rig:
    """Classes, times, a branch inside of a frame, a second namespace; all of it asleep."""
    rig = Rig()
    other = namespace(model="other", bytes_max=9000)
    put(rig.ladder, rig.space, rig.root, rig.keys(9), retention_class="chat")
    put(rig.ladder, rig.space, rig.root, rig.keys(2, salt=1), retention_class="batch")
    rig.tick(0.5 * HOUR)
    use(rig, rig.keys(5))
    put(rig.ladder, rig.space, rig.root, rig.keys(3, salt=2), retention_class="agent")
    root = rig.keys(1, salt=77)
    rig.ladder.open(other, root=root)
    put(rig.ladder, other, BlockHash(root), rig.keys(4, salt=3), retention_class="batch")
    rig.tick(0.75 * HOUR)
    return again(rig)


def told(amounts: Iterable[tuple[object, Amount]]) -> dict[object, tuple[int, int]]:
    return {key: (amount.blocks, amount.bytes) for key, amount in amounts if amount.blocks}


def counts(rig: Rig) -> list[Any]:
    """All that is counted; runs are not, for of runs awake equal neighbours are one."""
    ladder = rig.ladder
    status = ladder.status()
    ssd = [row for row in status.tiers if row["tier"] == "ssd"]
    table = ladder.class_table()
    shorter = table.changed(replace(table.named("batch"), ttl_seconds=HOUR / 10), at=ladder.wall())
    forecast = ladder.forecast(hours=100)
    effect = ladder.effect(shorter)
    targets = [
        Target(namespace=rig.space.fingerprint),
        *(Target(retention_class=name) for name in ("agent", "batch", "chat")),
    ]
    return [
        status.classes,
        status.namespaces,
        [row["blocks"] for row in ssd],
        told(forecast.expired.items()),
        told(forecast.later.items()),
        told(((name, hour), a) for name, hours in forecast.hours.items() for hour, a in hours.items()),
        told([("hides", effect.hides), ("shows", effect.shows)]),
        told((target, ladder.foresee_purge(target)) for target in targets),
    ]


def test_counts_are_the_same_asleep_and_awake() -> None:
    rig = a_store_of_several_lives()
    states = list(rig.ladder.catalog.namespaces.values())
    assert not any(asleep_twice(rig.ladder, state) for state in states)
    frames, found = asleep(rig), counts(rig)
    assert frames == 4
    assert asleep(rig) == frames, "a count wakes nothing"
    rig.ladder._wake(list(rig.ladder.catalog.sleepers.of_spaces(rig.ladder.catalog.namespaces)))
    assert asleep(rig) == 0
    check_integrity(rig.ladder)
    assert counts(rig) == found
    assert [row["blocks"] for row in found[1]] == [14, 4]
    assert found[3], "some have expired"
    assert found[6], "a shorter life hides some"


def test_a_purge_by_class_finds_what_a_match_cuts_off_meanwhile() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    for salt in range(1, SHELF_NODES + 1):
        put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=salt), retention_class="agent")
    cut: list[int] = []

    def cut_once() -> None:
        if not cut:
            cut.append(rig.match(keys[: 2 * 32], retention_class="agent").blocks)

    # The run is one of the last looked at; what is cut off of it before comes behind it.
    roll: Roll = rig.ladder.catalog.namespaces[rig.space.fingerprint].runs.roll
    (node,) = [node for node in roll if node.retention_class == "batch"]
    roll.remove(node)
    roll.add(node)
    purge = rig.ladder.purge(Target(retention_class="batch"), pause=cut_once)
    assert cut == [2]
    assert purge.amount.blocks == 4
    assert rig.length(keys) == 2
