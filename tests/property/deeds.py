"""What can happen to a store: every verb, every client's misbehaviour, time, faults, and restarts."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvstore import hashing
from kvstore.api import (
    CommitAnswer,
    CommitRequest,
    MatchRequest,
    OutcomeRun,
    PartBlocks,
    ReserveRequest,
)
from kvstore.errors import Overloaded
from kvstore.types import (
    LEASE_SECONDS_MAX,
    RESERVATION_SECONDS,
    AckTier,
    BlockHash,
    MatchMode,
    PutOutcome,
    ReleaseOutcome,
    split_keys,
)
from tests.property.promises import Held
from tests.property.world import SESSIONS, World, Writer
from tests.support.asleep import wake
from tests.support.driver import check_extents, fill
from tests.support.model import ModelPart, ModelPut

Deed = Callable[["World", random.Random], None]
LEASES_KEPT = 4
WRITERS_KEPT = 4


def spread(runs: tuple[OutcomeRun, ...]) -> list[PutOutcome]:
    """One outcome a block."""
    return [run.outcome for run in runs for _ in range(run.count)]


def some_space(world: World, rng: random.Random) -> int:
    return rng.randrange(len(world.spaces))


def some_class(world: World, rng: random.Random) -> str:
    return rng.choice([c.name for c in world.classes])


def chain(world: World, rng: random.Random, space: int, *, longest: int = 9) -> bytes:
    """Two alternatives a block: short histories share prefixes, and branch."""
    path = [rng.getrandbits(1) if rng.random() < 0.6 else 0 for _ in range(rng.randint(1, longest))]
    tokens = [token for choice in path for token in (choice, 0, 0, 0)]
    return hashing.block_hashes(world.roots[space], tokens, block_tokens=4)


# Put


def reserve(
    world: World,
    rng: random.Random,
    *,
    space: int,
    put: ModelPut,
    pieces: tuple[PartBlocks, ...],
    joined: bool,
) -> Writer | None:
    """Reserve, and compare what is granted with what the oracle wants."""
    model, session = world.models[space], rng.choice(SESSIONS)
    now = world.now
    joins = put.put_id in model.puts
    request = ReserveRequest(
        namespace=world.prints[space],
        parent=BlockHash(put.parent),
        keys=b"".join(put.keys),
        put_id=put.put_id,
        parts=pieces,
        retention_class=put.retention_class,
        provenance=put.provenance,
        session=session,
    )
    try:
        answer = world.ladder.reserve(request)
    except Overloaded:
        assert world.setting.pages < 100, "a client's share is small only in a small arena"
        return None
    if not joins:
        model.supersede(put.keys, world.clock.monotonic())
        model.start(put, now)
    pieces = pieces or tuple(PartBlocks(index, 0, len(put.keys)) for index in model.required)
    parts = {
        piece.part: ModelPart(model.wanted(put, piece, now), [False] * len(put.keys)) for piece in pieces
    }
    for extent in answer.extents:
        for index in range(extent.first, extent.first + extent.count):
            parts[extent.part].granted[index] = True
    _check_granted(world, put, parts)
    paint = [PutOutcome.DUPLICATE] * len(put.keys)
    wanted = [part.wanted for part in parts.values()]
    granted = [part.granted for part in parts.values()]
    for index in range(len(put.keys)):
        if put.in_flight[index]:
            paint[index] = PutOutcome.IN_FLIGHT
        if any(mask[index] for mask in wanted):
            paint[index] = PutOutcome.THROTTLED
        if any(mask[index] for mask in granted):
            paint[index] = PutOutcome.RESERVED
    assert spread(answer.outcomes) == paint
    world.log.append(("reserve", paint))
    if not answer.reservation:
        return None
    if not put.put_id:
        put.put_id = b"#" + answer.reservation.to_bytes(8, "little")
    model.granted(put, parts)
    writer = Writer(space, answer.reservation, session, put, parts, answer.extents, joined)
    world.writers.append(writer)
    return writer


def _check_granted(world: World, put: ModelPut, parts: dict[int, ModelPart]) -> None:
    """All that is wanted, or all of it before the first block for which there is no room."""
    short = [i for i in range(len(put.keys)) if any(p.wanted[i] and not p.granted[i] for p in parts.values())]
    assert not short or not world.setting.is_roomy, "refused though there is room"
    room = short[0] if short else len(put.keys)
    for part in parts.values():
        assert part.granted == [wanted and i < room for i, wanted in enumerate(part.wanted)]


def commit(world: World, writer: Writer, *, blocks: int, ack: AckTier, refill: bool = True) -> None:
    """Fill the slots, commit, and compare the outcomes."""
    model, space = world.models[writer.space], world.spaces[writer.space]
    keys = b"".join(writer.put.keys)
    filled = tuple(fill(world.ladder, space, keys, extent) for extent in writer.extents)
    now, acks = world.now, list[CommitAnswer]()
    request = CommitRequest(reservation=writer.number, blocks=blocks, parts=filled, ack=ack)
    published = model.commit(writer.put, writer.parts, blocks, now)
    if not model.flat:
        writer.ancestors = {key: model.path(key) for key in writer.put.keys}
    answer = world.ladder.commit(request, acks.append)
    world.writers.remove(writer)
    world.settle()
    stored = PutOutcome.STORED_HOST if published else PutOutcome.PART_PENDING
    if answer is not None and ack is AckTier.HOST:
        assert spread(answer.outcomes) == painted(writer, stored)
        world.log.append(("commit", painted(writer, stored)))
    if ack is AckTier.SSD:
        world.waiting_acks.append((writer, acks, answer))
        world.log.append(("commit", painted(writer, stored)))


def painted(writer: Writer, stored: PutOutcome) -> list[PutOutcome]:
    paint = [PutOutcome.DUPLICATE] * len(writer.put.keys)
    for index in range(len(paint)):
        if writer.put.in_flight[index]:
            paint[index] = PutOutcome.IN_FLIGHT
        if any(part.wanted[index] for part in writer.parts.values()):
            paint[index] = PutOutcome.THROTTLED
        if any(part.granted[index] for part in writer.parts.values()):
            paint[index] = stored
    return paint


def new_put(world: World, rng: random.Random, space: int, *, put_id: bytes) -> ModelPut:
    keys = split_keys(chain(world, rng, space))
    skip = rng.randrange(len(keys)) if rng.random() < 0.4 else 0
    parent = keys[skip - 1] if skip else bytes(world.roots[space])
    if skip:
        # A put renews what is awake of that which it follows: an engine that appends has matched before.
        wake(world.ladder, world.prints[space], keys[:skip])
        world.ladder.match(
            MatchRequest(namespace=world.prints[space], keys=b"".join(keys[:skip]), mode=MatchMode.PROBE)
        )
    provenance = rng.choice([0, 0, 0, 0, 640])
    deadline = world.clock.monotonic() + RESERVATION_SECONDS
    return ModelPut(put_id, parent, keys[skip:], some_class(world, rng), provenance, deadline)


def put_whole(world: World, rng: random.Random) -> None:
    """All parts at once, committed at once."""
    space = some_space(world, rng)
    model = world.models[space]
    put = new_put(world, rng, space, put_id=b"")
    pieces: tuple[PartBlocks, ...] = ()
    if model.side_windows and rng.random() < 0.7:
        pieces = tuple(PartBlocks(i, 0, len(put.keys)) for i in model.required) + some_sides(model, put, rng)
    writer = reserve(world, rng, space=space, put=put, pieces=pieces, joined=False)
    if writer is not None:
        blocks = len(put.keys) if rng.random() < 0.8 else rng.randint(0, len(put.keys))
        commit(world, writer, blocks=blocks, ack=rng.choice([AckTier.HOST, AckTier.SSD]))


def some_sides(model: object, put: ModelPut, rng: random.Random) -> tuple[PartBlocks, ...]:
    pieces = []
    for index, _ in model.side_windows:  # type: ignore[attr-defined]
        first = rng.randrange(len(put.keys)) if rng.random() < 0.5 else max(0, len(put.keys) - 2)
        pieces.append(PartBlocks(index, first, len(put.keys) - first))
    return tuple(pieces)


def reserve_part(world: World, rng: random.Random) -> None:
    """One rank of several: joins a put that is under way, or starts one."""
    if len(world.writers) >= WRITERS_KEPT:
        return commit_some(world, rng)
    space = some_space(world, rng)
    model = world.models[space]
    pieces = list(range(len(world.spaces[space].layout.parts)))
    open_puts = [put for put in model.puts.values() if put.put_id[:1] == b"j"]
    if open_puts and rng.random() < 0.7:
        put = rng.choice(open_puts)
        if put.deadline <= world.clock.monotonic():
            return None
        pieces = [i for i in pieces if i not in put.parts]
    else:
        put = new_put(world, rng, space, put_id=b"j%d" % world.numbers.getrandbits(30))
    if not pieces:
        return None
    mine = rng.sample(pieces, rng.randint(1, len(pieces)))
    parts = []
    for index in sorted(mine):
        first = rng.randrange(len(put.keys)) if index not in model.required else 0
        parts.append(PartBlocks(index, first, len(put.keys) - first))
    reserve(world, rng, space=space, put=put, pieces=tuple(parts), joined=True)
    return None


def commit_some(world: World, rng: random.Random) -> None:
    if world.writers:
        writer = rng.choice(world.writers)
        count = len(writer.put.keys)
        blocks = count if rng.random() < 0.7 else rng.randint(0, count)
        commit(world, writer, blocks=blocks, ack=rng.choice([AckTier.HOST, AckTier.SSD]))


def abort_some(world: World, rng: random.Random) -> None:
    """A writer gives up; those in quarantine may speak up late, too."""
    if world.quarantine and rng.random() < 0.5:
        number = rng.choice(list(world.quarantine))
        writer = world.quarantine.pop(number)
        if rng.random() < 0.5:
            answer = world.ladder.commit(CommitRequest(reservation=number, blocks=1, parts=()))
            assert answer is not None
            assert spread(answer.outcomes) == [PutOutcome.EXPIRED] * len(writer.put.keys)
        else:
            assert world.ladder.abort(number)
        assert not world.ladder.abort(number)
    elif world.writers:
        writer = world.writers.pop(rng.randrange(len(world.writers)))
        assert world.ladder.abort(writer.number)
        assert not world.ladder.abort(writer.number)
        world.models[writer.space].withdraw(writer.put, writer.parts)


def write_late(world: World, rng: random.Random) -> None:
    """A hung client wakes up and scribbles over slots that it no longer holds."""
    for writer in world.quarantine.values():
        space = world.spaces[writer.space]
        for extent in writer.extents:
            for image in world.ladder.images(extent, space.layout.parts[extent.part]):
                image[:64] = bytes([rng.randrange(256)]) * 64


# Match and what follows


def match(world: World, rng: random.Random) -> None:
    space = some_space(world, rng)
    keys = chain(world, rng, space)
    model, names, now = world.models[space], split_keys(keys), world.now
    by = some_class(world, rng) if rng.random() < 0.4 else ""
    exact_only = rng.random() < 0.2
    owner = rng.choice(["", "", "r1", "r2"])
    session = rng.choice(SESSIONS)
    request = MatchRequest(
        namespace=world.prints[space],
        keys=keys,
        retention_class=by,
        owner=owner,
        exact_only=exact_only,
        session=session,
        load=rng.random() < 0.9,
        lease_seconds=rng.choice([5.0, 30.0, 300.0]),
    )
    frozen = world.frozen(space, owner, keys, exact_only=exact_only)
    blocks = model.visible(names, now, exact_only=exact_only)
    boundaries = model.boundaries(names, blocks, now)
    reasons = model.reasons(names, blocks, now, exact_only=exact_only)
    answer = world.ladder.match(request)
    if frozen is not None:
        assert answer.blocks == frozen.answer.blocks
        assert answer.boundaries == frozen.answer.boundaries
    else:
        assert answer.blocks == blocks, f"{answer.blocks} blocks, {blocks} expected"
        assert answer.boundaries == boundaries
        assert answer.reason in reasons or answer.lease, f"{answer.reason}, expected {reasons}"
        model.match(names, blocks, by, now)
    world.log.append(("match", answer.blocks, answer.boundaries))
    assert sum(run.count for run in answer.tiers) == answer.blocks
    if not answer.lease:
        assert not answer.blocks
        return
    seconds = min(request.lease_seconds, LEASE_SECONDS_MAX)
    held = Held(
        space,
        keys,
        answer,
        owner,
        session,
        world.clock.monotonic() + seconds,
        world.steps,
        exact_only,
        frozen.has_approx if frozen else any(model.blocks[k].provenance for k in names[:blocks]),
        list(answer.extents),
        frozen.is_stale if frozen else False,
    )
    check_extents(world.ladder, world.spaces[space], keys, answer.extents)
    world.held.append(held)
    while len(world.held) > LEASES_KEPT:
        release(world, rng, world.held[0])


def watch(world: World, rng: random.Random) -> None:
    """Any process may look at a lease; what it is told is true."""
    if not world.held:
        return
    held = rng.choice(world.held)
    if rng.random() < 0.5:
        world.run_io()
    progress = world.ladder.watch(held.answer.lease)
    world.settle()
    check_extents(world.ladder, world.spaces[held.space], held.keys, progress.extents)
    held.extents = [*held.extents, *progress.extents][-6:]
    assert progress.blocks <= held.answer.blocks
    assert progress.blocks == held.answer.blocks or progress.reason is not None
    if progress.done:
        covered = {i for e in progress.extents if e.part == 0 for i in range(e.first, e.first + e.count)}
        assert covered >= set(range(progress.blocks)), "done, but not all of it is there"


def release(world: World, rng: random.Random, held: Held) -> None:
    used = rng.randint(0, held.answer.blocks)
    outcome = rng.choice([ReleaseOutcome.USED, ReleaseOutcome.USED, ReleaseOutcome.UNUSED])
    if rng.random() < 0.03 and world.setting.faults:
        outcome = ReleaseOutcome.CORRUPT
    assert world.ladder.release(held.answer.lease, used=used, outcome=outcome)
    assert not world.ladder.release(held.answer.lease, used=used)
    world.held.remove(held)


def release_some(world: World, rng: random.Random) -> None:
    if world.held:
        release(world, rng, rng.choice(world.held))


def renew(world: World, rng: random.Random) -> None:
    if world.held:
        held = rng.choice(world.held)
        seconds = rng.choice([1.0, 20.0, 500.0])
        assert world.ladder.renew([held.answer.lease, 3], lease_seconds=seconds) == (3,)
        held.deadline = max(held.deadline, world.clock.monotonic() + min(seconds, LEASE_SECONDS_MAX))


def probe(world: World, rng: random.Random) -> None:
    space = some_space(world, rng)
    keys, model, now = chain(world, rng, space), world.models[space], world.now
    names, exact_only = split_keys(keys), rng.random() < 0.3
    expected = model.visible(names, now, exact_only=exact_only)
    fields = {"namespace": world.prints[space], "keys": keys, "exact_only": exact_only}
    answer = world.ladder.match(MatchRequest(**fields, mode=MatchMode.PROBE))  # type: ignore[arg-type]
    assert (answer.blocks, answer.lease) == (expected, 0)
    assert answer.reason in model.reasons(names, expected, now, exact_only=exact_only)
    bitmap = world.ladder.match(MatchRequest(**fields, mode=MatchMode.BITMAP)).bitmap  # type: ignore[arg-type]
    bits = [bool(bitmap[i // 8] >> i % 8 & 1) for i in range(len(names))]
    if model.flat:
        assert bits == [model.visible([key], now, exact_only=exact_only) == 1 for key in names]
    else:
        assert bits == [i < expected for i in range(len(names))]
    world.log.append(("probe", answer.blocks, answer.boundaries, bits))


def touch(world: World, rng: random.Random) -> None:
    space = some_space(world, rng)
    keys, model, now = chain(world, rng, space), world.models[space], world.now
    by = some_class(world, rng) if rng.random() < 0.5 else ""
    names = split_keys(keys)
    blocks = model.visible(names, now)
    assert world.ladder.touch(world.prints[space], keys, retention_class=by) == blocks
    model.match(names, blocks, by, now)


def prefetch(world: World, rng: random.Random) -> None:
    space = some_space(world, rng)
    keys = chain(world, rng, space)
    blocks = world.models[space].visible(split_keys(keys), world.now)
    answer = world.ladder.prefetch(world.prints[space], keys, deadline_seconds=rng.choice([0.5, 20.0]))
    assert (answer.blocks, answer.resident + answer.loading) == (blocks, blocks)
    if answer.prefetch:
        world.prefetches.append(answer.prefetch)


def cancel(world: World, rng: random.Random) -> None:
    if world.prefetches:
        number = world.prefetches.pop(rng.randrange(len(world.prefetches)))
        world.ladder.cancel(number)
        assert not world.ladder.cancel(number)
