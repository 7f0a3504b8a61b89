"""What befalls a store from outside: removal, time, faults, clients that die, restarts and crashes."""

from __future__ import annotations

import random

from kvstore.types import MissReason, split_keys
from tests.property.deeds import chain, some_space
from tests.property.world import CLASS_TABLES, SESSIONS, World
from tests.support.asleep import asleep_twice

PAUSES = [0.0, 0.0, 0.2, 1.0, 6.0, 31.0, 61.0, 200.0, 3000.0, 90_000.0]


def delete(world: World, rng: random.Random) -> None:
    """Delete a block and all that follows; in a flat namespace the keys that are named."""
    space = some_space(world, rng)
    model, keys = world.models[space], chain(world, rng, space)
    keys = keys if model.flat else keys[-32:]
    gone = model.delete(split_keys(keys))
    world.may_undo_acks = True
    count = world.purge(space, keys, {*gone, *split_keys(keys)})
    assert count >= len(gone)
    assert gone <= world.keys_that_left(space, MissReason.DELETED)
    world.after_step(deep=False)
    for key in [*gone, *split_keys(keys)]:
        assert not [place for place in model.sides if place[1] == key], "a purged block left a side part"
    world.log.append(("delete", len(gone)))


def delete_namespace(world: World, rng: random.Random) -> None:
    space = some_space(world, rng)
    model = world.models[space]
    world.may_undo_acks = True
    there = {*model.blocks, *(key for _, key in model.sides), *model.may_return}
    assert world.purge(space, None, there) >= len(model.blocks)
    world.after_step(deep=False)
    assert not model.blocks and not model.sides


def list_all(world: World, rng: random.Random) -> None:
    """Pages cover everything, once."""
    space = some_space(world, rng)
    cursor, seen = "", list[bytes]()
    while True:
        page = world.ladder.list(world.prints[space], cursor=cursor, limit=rng.randint(1, 5))
        for run in page.runs:
            seen += split_keys(run.keys)
        cursor = page.cursor
        if not cursor:
            break
    model = world.models[space]
    state = world.ladder._catalog.namespaces[world.prints[space]]
    if not model.sides and not asleep_twice(world.ladder, state):
        assert sorted(seen) == sorted(model.blocks)
    listed, stored = set(seen), set(model.blocks) | {key for _, key in model.sides}
    assert listed == stored, f"{len(listed - stored)} runs too many, {len(stored - listed)} too few"


def status(world: World, rng: random.Random) -> None:
    found = world.ladder.status()
    assert found.tiers[0]["used_bytes"] <= found.tiers[0]["capacity_bytes"]
    blocks = sum(row["blocks"] for row in found.namespaces)
    sides = sum(len(model.sides) for model in world.models)
    states = [world.ladder._catalog.namespaces[space] for space in world.prints]
    blocks -= sum(asleep_twice(world.ladder, state) for state in states)
    assert blocks == sum(len(model.blocks) for model in world.models) + sides
    assert found.gauges["kvstore_ssd_used_bytes"] <= found.tiers[1]["used_bytes"] or world.setting.manual


def tick(world: World, rng: random.Random) -> None:
    """Time passes."""
    world.clock.advance(min(rng.choice(PAUSES), world.setting.longest_pause))
    if world.setting.longest_pause < 1e5:
        return world.tick()
    if rng.random() < 0.02:
        world.clock_jumps += 1
        world.clock.jump_wall(rng.choice([-1e6, -100.0, 100.0, 1e6]))
    if rng.random() < 0.005:
        world.clock.advance(8 * 86400.0)
    return world.tick()


def run_io(world: World, rng: random.Random) -> None:
    world.run_io(rng.randint(1, 6))


def session_ends(world: World, rng: random.Random) -> None:
    """A session breaks off; its client may live on, or die now or later."""
    session = rng.choice(SESSIONS)
    if rng.random() < 0.5:
        world.alive.discard(session)
    world.ladder.end_session(session)
    world.held = [held for held in world.held if held.session != session]
    world.end_writers([writer for writer in world.writers if writer.session == session])
    world.tick()


def client_comes_or_goes(world: World, rng: random.Random) -> None:
    session = rng.choice(SESSIONS)
    if session in world.alive:
        world.alive.discard(session)
    else:
        world.alive.add(session)
    world.tick()


def faults(world: World, rng: random.Random) -> None:
    """The disk refuses, fails to read, or rots, for a while."""
    if not world.setting.faults:
        return
    kind = rng.randrange(4)
    if kind == 0:
        world.tier.refuse_writes = "disk full"
        world.tier.refuse_deletes = "read-only" if rng.random() < 0.5 else ""
    elif kind == 1:
        world.tier.down_share = 0.5
    elif kind == 2:
        world.tier.rot()
    else:
        world.tier.refuse_writes = world.tier.refuse_deletes = ""
        world.tier.down_share = 0.0


def verify(world: World, rng: random.Random) -> None:
    if not world.setting.manual and not (world.setting.faults and world.tier.down_share):
        steps = list(world.ladder.verify())
        assert steps[-1].blocks_done == steps[-1].blocks_total


def reopen(world: World, rng: random.Random) -> None:
    """A clean restart: what a class lets reach the SSD and was written is there again."""
    world.close()
    world.reopen(classes=rng.choice(CLASS_TABLES) if world.setting.faults else world.classes)


def crash(world: World, rng: random.Random) -> None:
    """Power is lost."""
    world.crash()
    world.reopen(classes=world.classes)
