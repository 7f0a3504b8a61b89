"""Random histories of the ladder against a dict: never wrong bytes, never more than the oracle allows."""

from __future__ import annotations

import os
import random

import hypothesis.strategies as st
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore import hashing
from kvstore.api import MatchAnswer, MatchRequest, ReserveRequest
from kvstore.clock import ManualClock
from kvstore.core.eviction import ExactLru, S3Fifo
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.events import Events
from kvstore.types import Addressing, BlockHash, MatchMode, PutOutcome
from tests.support.driver import check_extents, namespace, put
from tests.support.integrity import check_integrity
from tests.support.memory import DictTier, Disk, PrivateMemory
from tests.support.model import ModelStore, split_keys

CLASSES = st.sampled_from(["agent", "chat", "batch", "handoff", "swa"])
BIG_PAGES = 4096
SMALL_PAGES = 40
STORED = {PutOutcome.STORED_HOST, PutOutcome.STORED_SSD}
THERE = {*STORED, PutOutcome.DUPLICATE}


class LadderMachine(RuleBasedStateMachine):
    """Puts, matches, leases, ticks, deletes and reopens on a tree of chains."""

    addressing = Addressing.CHAIN

    @initialize(
        small=st.booleans(),
        fifo=st.booleans(),
        manual=st.booleans(),
        parts=st.integers(1, 2),
        capacity=st.sampled_from([0, 0, 40_000]),
    )
    def start(self, small: bool, fifo: bool, manual: bool, parts: int, capacity: int) -> None:
        self.exact = not small and not capacity
        self.pages = SMALL_PAGES if small else BIG_PAGES
        self.fifo, self.manual, self.capacity = fifo, manual, capacity
        self.clock = ManualClock()
        self.disk = Disk()
        self.space = namespace(parts=parts, addressing=self.addressing)
        self.root = hashing.chain_root(self.space.fingerprint)
        self.model = ModelStore(self.root, flat=self.addressing is Addressing.FLAT)
        self.leases: list[tuple[bytes, MatchAnswer]] = []
        self.open_ladder()

    def open_ladder(self) -> None:
        self.tier = DictTier(self.disk, manual=self.manual)
        rng = random.Random(7)
        self.ladder = Ladder(
            host=PrivateMemory(self.pages),
            ssd=self.tier,
            clock=self.clock,
            events=Events(),
            new_number=lambda: rng.getrandbits(63) | 1,
            policy=S3Fifo() if self.fifo else ExactLru(),
            limits=Limits(ssd_capacity_bytes=self.capacity, load_bytes=8192),
        )
        self.ladder.recover()
        self.ladder.open(self.space, root=self.root)

    def chain(self, tokens: list[int]) -> bytes:
        """Two alternatives a block: short histories share prefixes, and branch."""
        flat = [token for choice in tokens for token in (choice, 0, 0, 0)]
        return hashing.block_hashes(self.root, flat, block_tokens=4)

    paths = st.lists(st.integers(0, 1), min_size=1, max_size=9)

    @rule(path=paths, skip=st.integers(0, 4), retention_class=CLASSES, blocks=st.integers(0, 9))
    def put(self, path: list[int], skip: int, retention_class: str, blocks: int) -> None:
        keys = self.chain(path)
        skip = min(skip, len(path) - 1)
        parent = keys[(skip - 1) * 32 : skip * 32] if skip else self.root
        mine = keys[skip * 32 :]
        count = min(blocks or len(mine) // 32, len(mine) // 32)
        answer = put(self.ladder, self.space, parent, mine, retention_class=retention_class, blocks=count)
        assert answer is not None
        outcomes = [run.outcome for run in answer.outcomes for _ in range(run.count)]
        assert len(outcomes) == len(mine) // 32
        names = split_keys(mine)
        fresh = {key for key, outcome in zip(names, outcomes, strict=True) if outcome in STORED}
        there = [outcome in THERE for outcome in outcomes]
        self.model.put(parent, names, there, retention_class, self.clock.wall(), fresh)

    @rule(
        path=paths,
        retention_class=st.one_of(st.just(""), CLASSES),
        keep=st.booleans(),
        owner=st.sampled_from(["", "r1"]),
    )
    def match(self, path: list[int], retention_class: str, keep: bool, owner: str) -> None:
        keys = self.chain(path)
        frozen = owner and any(a.lease and k.startswith(keys[: a.blocks * 32]) for k, a in self.leases)
        request = MatchRequest(
            namespace=self.space.fingerprint, keys=keys, retention_class=retention_class, owner=owner
        )
        answer = self.ladder.match(request)
        if not frozen:
            expected = self.model.match(split_keys(keys), retention_class, self.clock.wall())
            assert answer.blocks <= expected
            if self.exact:
                assert answer.blocks == expected
            assert (answer.reason is None) == (answer.blocks == len(path))
        check_extents(self.ladder, self.space, keys, answer.extents)
        if answer.lease:
            if keep and len(self.leases) < 3:
                self.leases.append((keys, answer))
            else:
                self.ladder.release(answer.lease, used=answer.blocks)
                assert not self.ladder.release(answer.lease, used=answer.blocks)

    @rule(path=paths)
    def probe_has_no_effect(self, path: list[int]) -> None:
        keys = self.chain(path)
        for mode in (MatchMode.PROBE, MatchMode.BITMAP):
            answer = self.ladder.match(MatchRequest(namespace=self.space.fingerprint, keys=keys, mode=mode))
            assert not answer.lease
            if mode is MatchMode.PROBE:
                expected = self.model.visible(split_keys(keys), self.clock.wall())
                assert answer.blocks <= expected and (answer.blocks == expected or not self.exact)

    @rule(path=paths)
    def prefetch(self, path: list[int]) -> None:
        answer = self.ladder.prefetch(self.space.fingerprint, self.chain(path), deadline_seconds=5.0)
        assert answer.resident + answer.loading == answer.blocks

    @precondition(lambda self: self.leases)
    @rule()
    def fetch_and_release(self) -> None:
        keys, answer = self.leases.pop(0)
        self.tier.run()
        progress = self.ladder.watch(answer.lease)
        check_extents(self.ladder, self.space, keys, progress.extents)
        if progress.done and self.exact:
            assert progress.blocks == answer.blocks
            assert sum(e.count for e in progress.extents if e.part == 0) == answer.blocks
        self.ladder.release(answer.lease, used=progress.blocks)

    @rule(path=paths, give_up=st.booleans())
    def writer_that_never_commits(self, path: list[int], give_up: bool) -> None:
        request = ReserveRequest(
            namespace=self.space.fingerprint, parent=BlockHash(self.root), keys=self.chain(path)
        )
        answer = self.ladder.reserve(request)
        now = self.clock.wall()
        there = [run.outcome is PutOutcome.DUPLICATE for run in answer.outcomes for _ in range(run.count)]
        self.model.put(self.root, split_keys(request.keys), there, "agent", now)
        if answer.reservation:
            assert self.ladder.abort(answer.reservation)
            assert not self.ladder.abort(answer.reservation)

    @rule(path=paths)
    def delete(self, path: list[int]) -> None:
        keys = self.chain(path)[-32:]
        self.ladder.delete(self.space.fingerprint, keys)
        self.model.delete(split_keys(keys))
        self.exact = False

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 61.0, 200.0, 3000.0, 90_000.0]))
    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.leases = self.leases if seconds < 1.0 else []
        if seconds >= 1.0:
            self.clock.advance(31.0)
        self.ladder.tick()

    @rule()
    def io_completes(self) -> None:
        self.tier.run()

    @precondition(lambda self: not self.leases)
    @rule()
    def reopen(self) -> None:
        self.tier.run()
        self.ladder.close(deadline_seconds=0.0)
        self.tier.run()
        self.model.reopen()
        self.exact = False
        self.open_ladder()

    @invariant()
    def leased_blocks_stay(self) -> None:
        for keys, answer in getattr(self, "leases", []):
            for extent in answer.extents:
                now = self.ladder._catalog.memory.generations[extent.slots]
                assert (now == extent.generations).all(), "a leased slot was given away"
            check_extents(self.ladder, self.space, keys, answer.extents)

    @invariant()
    def structures_agree(self) -> None:
        if hasattr(self, "ladder"):
            check_integrity(self.ladder)


class FlatMachine(LadderMachine):
    """The same with a key that is just a key."""

    addressing = Addressing.FLAT


TestChain = LadderMachine.TestCase
TestFlat = FlatMachine.TestCase
PHASES = [phase for phase in Phase if phase is not Phase.shrink or os.environ.get("KVSTORE_SHRINK")]
TestChain.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, phases=PHASES)
TestFlat.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, phases=PHASES)
