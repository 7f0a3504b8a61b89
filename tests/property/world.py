"""A ladder, its disk, its clients and the oracle beside it: what every random history is made of."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvstore import hashing
from kvstore.api import CommitAnswer, Extent
from kvstore.clock import ManualClock
from kvstore.core.eviction import EvictionPolicy, ExactLru, S3Fifo
from kvstore.core.eviction_density import HitDensity
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.events import Events
from kvstore.namespace import Namespace
from kvstore.retention import SHIPPED_CLASSES, RetentionClass
from kvstore.tiers.base import FrameKind, Tier
from kvstore.types import Addressing, MissReason, PutOutcome, split_keys
from tests.property.departures import Departures
from tests.property.promises import Held
from tests.support.asleep import all_nodes
from tests.support.driver import namespace
from tests.support.faulty import FaultyTier
from tests.support.integrity import check_integrity
from tests.support.memory import Disk, PrivateMemory
from tests.support.model import Cell, ModelPart, ModelPut, ModelStore

SHORTER = tuple(RetentionClass(c.name, c.ttl_seconds / 3, c.mode, c.lowest_tier) for c in SHIPPED_CLASSES)
FEWER = tuple(c for c in SHIPPED_CLASSES if c.name != "batch")
CLASS_TABLES = (SHIPPED_CLASSES, SHIPPED_CLASSES, SHORTER, FEWER)
SESSIONS = (1, 2, 3)
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": ExactLru,
    "s3fifo": lambda: S3Fifo(ghosts_max=64),
    "density": lambda: HitDensity(gone_max=64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a history runs on."""

    pages: int = 4096
    policy: str = "lru"
    manual: bool = False
    parts: int = 1
    side: str = ""
    flat: bool = False
    capacity: int = 0
    load_bytes: int = 8192
    loads_in_flight: int = 16
    queue_bytes: int = 1 << 20
    frames_per_segment: int = 4
    faults: bool = True
    spaces: int = 2
    longest_pause: float = 1e6
    sleep_seconds: float = 61.0

    @property
    def is_roomy(self) -> bool:
        """Nothing has to leave for want of room."""
        return self.pages >= 4096 and not self.capacity


@dataclass(slots=True, eq=False)
class Purge:
    """A delete whose answer is awaited: until then its blocks may return."""

    space: int
    keys: set[bytes]
    heard: list[tuple[int, bool]] = field(default_factory=list)
    count: int = 0


@dataclass(slots=True, eq=False)
class Writer:
    """A reservation and its model."""

    space: int
    number: int
    session: int
    put: ModelPut
    parts: dict[int, ModelPart]
    extents: tuple[Extent, ...]
    joined: bool = False
    ancestors: dict[bytes, list[bytes]] = field(default_factory=dict)
    """Of each block, those before it that were there when it was committed."""


class World:
    """Everything of one history. `rng` decides what the deeds leave open."""

    notes_may_be_lost = False

    def __init__(self, setting: Setting, *, seed: int) -> None:
        self.setting = setting
        self.rng = random.Random(seed)
        self.numbers = random.Random(seed + 1)
        self.clock = ManualClock()
        self.disk = Disk()
        self.alive: set[int] = set(SESSIONS)
        self.log: list[Any] = []
        self.classes: tuple[RetentionClass, ...] = SHIPPED_CLASSES
        self.spaces = [self._space(i) for i in range(setting.spaces)]
        self.prints = [space.fingerprint for space in self.spaces]
        self.roots = [hashing.chain_root(fingerprint) for fingerprint in self.prints]
        self.models = [ModelStore(s, r, self.classes) for s, r in zip(self.spaces, self.roots, strict=True)]
        self.steps = 0
        self.table_changes = 0
        self.clock_jumps = 0
        self.may_undo_acks = False
        self.open_ladder()

    def _space(self, index: int) -> Namespace:
        flat = self.setting.flat and index == 0
        return namespace(
            addressing=Addressing.FLAT if flat else Addressing.CHAIN,
            model=f"m{index}",
            parts=self.setting.parts,
            side="" if flat else self.setting.side,
            bytes_max=600 + 5000 * (index % 2),
        )

    # Open and reopen

    def make_tier(self) -> Tier:
        self.tier = tier = FaultyTier(
            self.disk,
            rng=random.Random(self.rng.getrandbits(32)),
            frames_per_segment=self.setting.frames_per_segment,
            manual=self.setting.manual,
        )
        return tier

    def open_ladder(self) -> None:
        setting = self.setting
        self.held: list[Held] = []
        self.writers: list[Writer] = []
        self.quarantine: dict[int, Writer] = {}
        self.prefetches: list[int] = []
        self.purges: list[Purge] = []
        self.waiting_acks: list[tuple[Writer, list[CommitAnswer], CommitAnswer | None]] = []
        self.events = Events()
        self.memory = PrivateMemory(setting.pages)
        self.ladder = Ladder(
            host=self.memory,
            ssd=self.make_tier(),
            clock=self.clock,
            events=self.events,
            classes=self.classes,
            new_number=lambda: self.numbers.getrandbits(62) | 1,
            client_alive=lambda session: session in self.alive,
            policy=POLICIES[setting.policy](),
            limits=Limits(
                ssd_capacity_bytes=setting.capacity,
                sleep_seconds=setting.sleep_seconds,
                wake_seconds=60.0,  # real time: how busy this machine is decides nothing
                load_bytes=setting.load_bytes,
                loads_in_flight_max=setting.loads_in_flight,
                write_queue_bytes_max=setting.queue_bytes,
            ),
        )
        self.ladder.recover()
        for space, root in zip(self.spaces, self.roots, strict=True):
            self.ladder.open(space, root=root)
        self.departures = Departures(self.ladder)

    def reopen(self, *, classes: tuple[RetentionClass, ...]) -> None:
        """Take over what the store found on its disk: not more than there was, and all that was promised."""
        self.table_changes += classes != self.classes
        self.classes = classes
        now_before = self.now
        self.open_ladder()
        for model in self.models:
            before_blocks, before_sides = model.blocks, model.sides
            ends = {id(c): model.end(c) for c in [*before_blocks.values(), *before_sides.values()]}
            model.classes = {c.name: c for c in classes}
            model.pending, model.puts, model.left = {}, {}, {}
            model.blocks, model.sides = self._indexed(model)
            for key, cell in model.blocks.items():
                assert key in before_blocks or key in model.may_return, "a block came back that had left"
                # An older copy may come back when the newer one had not reached the disk.
                if key in before_blocks and (before_blocks[key].acked or key not in model.may_return):
                    self._check_recovered(model, cell, before_blocks[key], ends, now_before)
            for place, cell in model.sides.items():
                assert place in before_sides or place[1] in model.may_return, "a side part came back"
                if place in before_sides and place[1] not in model.may_return:
                    self._check_recovered(model, cell, before_sides[place], ends, now_before)
            for key, cell in before_blocks.items():
                assert not cell.acked or key in model.blocks, "an acknowledged block is lost"

    def _check_recovered(
        self, model: ModelStore, cell: Cell, before: Cell, ends: dict[int, float], now: float
    ) -> None:
        # A clock that was set back may make a copy the newer one that had left, and whose end a crash undid.
        assert cell.provenance == before.provenance or self.clock_jumps
        assert cell.parent == before.parent
        assert cell.since <= max(now, before.since), "a touch from the future"
        if not self.table_changes and not (self.clock_jumps and self.notes_may_be_lost):
            assert model.end(cell) <= ends[id(before)], "kept longer than before the restart"
        cell.acked = before.acked

    def _indexed(self, model: ModelStore) -> tuple[dict[bytes, Cell], dict[tuple[int, bytes], Cell]]:
        """What the index of a namespace holds, as the oracle would say it."""
        state = self.ladder._catalog.namespaces[model.fingerprint]
        blocks: dict[bytes, Cell] = {}
        sides: dict[tuple[int, bytes], Cell] = {}
        for node in all_nodes(self.ladder, state):
            together = Cell(node.retention_class, node.since, node.slices[0].frame.provenance)
            before = bytes(node.parent_hash)
            for piece in node.slices:
                for key in split_keys(piece.keys):
                    if node.loose and piece.frame.kind is FrameKind.SIDE:
                        sides[(piece.frame.parts[0].index, key)] = together
                    elif node.loose:
                        blocks[key] = together
                    else:
                        assert key not in blocks, "a block is in the index twice"
                        blocks[key] = Cell(node.retention_class, node.since, piece.frame.provenance, before)
                    before = key
        return blocks, sides

    # Between steps

    @property
    def now(self) -> float:
        return self.ladder._retention.now()

    def settle(self) -> None:
        """Nothing to wait for: the dict tier answers when it is told to."""

    def run_io(self, count: int = 1 << 30) -> None:
        """Let the disk work."""
        self.tier.run(count)

    def purge(self, space: int, keys: bytes | None, names: set[bytes]) -> int:
        """Delete; once it is answered, no restart brings back what `names` says."""
        purge = Purge(space, names)
        self.purges.append(purge)
        purge.count = self.ladder.delete(
            self.prints[space], keys, lambda count, durable: purge.heard.append((count, durable))
        )
        # What shared a frame with them left too, but nobody asked for that: an older copy may bring it back.
        self.models[space].may_return |= names | self.keys_that_left(space, MissReason.DELETED)
        return purge.count

    def _collect_purges(self) -> None:
        for purge in [purge for purge in self.purges if purge.heard]:
            self.purges.remove(purge)
            ((count, durable),) = purge.heard
            assert count == purge.count
            if durable:
                self.models[purge.space].may_return -= purge.keys
            else:
                assert self.setting.manual or self.tier.refuse_deletes, "nothing was in the way of a purge"

    def close(self) -> None:
        """Stop in order."""
        for _ in range(100):
            if not self.tier.run():
                break
        self.ladder.close(deadline_seconds=0.0)
        self.follow()

    def crash(self) -> None:
        """Lose what is not on the disk."""
        self.tier.crash()
        self.follow()

    def tick(self) -> None:
        """Let housekeeping run, and the oracle end what has ended."""
        at = self.clock.monotonic()
        self.ladder.tick()
        self.held = [held for held in self.held if held.deadline > at]
        self.end_writers([writer for writer in self.writers if writer.put.deadline <= at])
        for model in self.models:
            for put in [put for put in model.puts.values() if put.deadline <= at]:
                model.close(put)
        self.quarantine = {n: w for n, w in self.quarantine.items() if w.session in self.alive}

    def end_writers(self, writers: list[Writer]) -> None:
        """Reservations end; their slots wait for the writer."""
        for writer in writers:
            self.writers.remove(writer)
            self.models[writer.space].withdraw(writer.put, writer.parts)
            self.quarantine[writer.number] = writer

    def frozen(self, space: int, owner: str, keys: bytes, *, exact_only: bool) -> Held | None:
        """The lease whose answer stands for the next match of its owner."""
        return next((h for h in self.held if h.stands_for(space, owner, keys, exact_only=exact_only)), None)

    def keys_that_left(self, space: int, reason: MissReason) -> set[bytes]:
        """What left since the oracle last followed."""
        mine = self.prints[space]
        return {
            key
            for piece, why, packed in self.departures.heard()
            if why is reason and piece.frame.fingerprint == mine
            for key in split_keys(packed)
        }

    def durable_keys(self, space: int) -> set[bytes]:
        """The blocks that lie on SSD."""
        state = self.ladder._catalog.namespaces[self.prints[space]]
        return {
            key
            for node in all_nodes(self.ladder, state)
            for piece in node.slices
            if piece.frame.location is not None and piece.frame.kind is FrameKind.MAIN
            for key in split_keys(piece.keys)
        }

    def collect_acks(self) -> None:
        """Note which blocks were promised to survive."""
        waiting, self.waiting_acks = self.waiting_acks, []
        for writer, acks, early in waiting:
            answer = early or (acks[0] if acks else None)
            if answer is None:
                self.waiting_acks.append((writer, acks, early))
                continue
            model, durable = self.models[writer.space], self.durable_keys(writer.space)
            outcomes = [run.outcome for run in answer.outcomes for _ in range(run.count)]
            for index, (key, outcome) in enumerate(zip(writer.put.keys, outcomes, strict=True)):
                brought = any(writer.parts[i].granted[index] for i in model.required if i in writer.parts)
                cell = model.blocks.get(key)
                if outcome is PutOutcome.STORED_SSD and cell is not None:
                    cell.acked = key in durable if brought else cell.acked
                    path = {key, *writer.ancestors.get(key, ())} & model.blocks.keys()
                    assert durable.issuperset(path) or not self.setting.is_roomy or self.may_undo_acks, (
                        "acknowledged, but it or an ancestor is not on SSD"
                    )

    def after_step(self, *, deep: bool) -> None:
        """Let the oracle follow what left, and compare."""
        self.settle()
        self.follow()
        for held in self.held:
            held.check_slots(self.ladder, self.memory)
        if deep:
            self.check()

    def follow(self) -> None:
        """Let the oracle take over what left, and what was promised."""
        self._departures()
        self._collect_purges()
        self.collect_acks()
        if self.setting.capacity or self.may_undo_acks:
            for model in self.models:
                if any(cell.acked for cell in model.blocks.values()):
                    self._check_durable(model)

    def _look_again(self, keys: set[bytes]) -> None:
        """Take over how the store holds some blocks now."""
        for model in self.models:
            blocks, _ = self._indexed(model)
            for key in keys & blocks.keys() & model.blocks.keys():
                model.blocks[key] = blocks[key]

    def _departures(self) -> None:
        now = self.now
        departed = self.departures.take()
        if self.departures.other_copies:
            self._look_again(self.departures.other_copies)
            self.departures.other_copies = set()
        for piece, reason, packed in departed:
            frame = piece.frame
            index = self.prints.index(frame.fingerprint)
            side = frame.parts[0].index if frame.kind is FrameKind.SIDE else None
            names = split_keys(packed)
            self.models[index].leave(names, side, reason, now)
            if reason is not MissReason.DELETED:
                for purge in self.purges:
                    purge.keys -= set(names) if purge.space == index else set()
            for held in self.held:
                if held.space == index and side is None:
                    held.lost(names)

    def check(self) -> None:
        """Compare everything with everything."""
        self.departures.settle()
        with self.ladder._lock:
            check_integrity(self.ladder)
            for model in self.models:
                blocks, sides = self._indexed(model)
                self._same(blocks, model.blocks)
                self._same(sides, model.sides)
                self._check_durable(model)
        for held in self.held:
            held.check_bytes(self.ladder, self.spaces[held.space])
        self._check_totals()

    def _same(self, real: dict[Any, Cell], expected: dict[Any, Cell]) -> None:
        assert real.keys() == expected.keys(), (
            f"{len(real.keys() - expected.keys())} blocks too many, "
            f"{len(expected.keys() - real.keys())} too few"
        )
        for key, cell in real.items():
            other = expected[key]
            mine = (cell.retention_class, cell.since, cell.provenance, cell.parent)
            assert mine == (other.retention_class, other.since, other.provenance, other.parent), (
                f"{mine} in the store, {other} expected"
            )

    def _check_durable(self, model: ModelStore) -> None:
        """What was acknowledged stays on SSD, unless it had to leave there."""
        state = self.ladder._catalog.namespaces[model.fingerprint]
        for node in all_nodes(self.ladder, state):
            for piece in node.slices:
                if piece.frame.location is None and piece.frame.kind is FrameKind.MAIN:
                    for key in split_keys(piece.keys):
                        cell = model.blocks[key]
                        assert not cell.acked or self.setting.capacity or self.may_undo_acks
                        cell.acked = False

    def _check_totals(self) -> None:
        gauges = self.ladder.gauges()
        assert gauges["kvstore_leases"] == len(self.held)
        assert gauges["kvstore_reservations"] == len(self.writers)
        waiting = sum(e.count for w in self.quarantine.values() for e in w.extents)
        assert gauges["kvstore_quarantined_slots"] == waiting
        hits = self.events.total("kvstore_hit_tokens_total")
        assert hits <= self.events.total("kvstore_lookup_tokens_total"), "more hits than lookups"
        if not self.held and not self.ladder._loads.in_flight and not self.ladder._loads.queued:
            assert not self.ladder._writeback.in_flight_bytes or self.setting.manual
