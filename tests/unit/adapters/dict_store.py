"""A store that is a dict, with the client's verbs as far as an adapter uses them; it can lose and break."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.api import OutcomeRun, TierRun
from kvstore.client.recompute import Choice, choose
from kvstore.hashing import Tokens, block_hashes, chain_root
from kvstore.namespace import Namespace
from kvstore.types import BlockHash, MissReason, PutOutcome, ReleaseOutcome, Tier, key_at, key_count

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Answer:
    """What match, fetch and put answer, in one."""

    blocks: int = 0
    reason: MissReason | None = None
    tiers: tuple[TierRun, ...] = ()
    keys: bytes = b""
    stored: int = 0
    present: int = 0
    outcomes: tuple[OutcomeRun, ...] = ()


def tiers_of(blocks: int) -> tuple[TierRun, ...]:
    """Pretend that two blocks lay in host memory and the rest on SSD."""
    runs = (TierRun(Tier.HOST, min(2, blocks)), TierRun(Tier.SSD, max(0, blocks - 2)))
    return tuple(run for run in runs if run.count)


@dataclass
class DictStore:
    """Blocks by key, whatever the namespace: keys carry it."""

    blocks: dict[BlockHash, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    raises: dict[str, BaseException] = field(default_factory=dict)
    fetch_stops_at: int | None = None
    put_blocks_max: int = 1 << 30
    block_seconds: dict[Tier, float] = field(default_factory=dict)
    released: list[tuple[int, ReleaseOutcome]] = field(default_factory=list)

    def open(
        self, namespace: Namespace, *, tenant_secret: bytes = b"", retention_class: str = "agent"
    ) -> DictNamespace:
        return DictNamespace(self, namespace, chain_root(namespace.fingerprint, tenant_secret=tenant_secret))

    def called(self, verb: str) -> None:
        self.calls.append(verb)
        if verb in self.raises:
            raise self.raises[verb]


@dataclass
class DictNamespace:
    """One opened namespace."""

    store: DictStore
    namespace: Namespace
    root: BlockHash

    def hashes(self, tokens: Tokens) -> bytes:
        return block_hashes(self.root, tokens, block_tokens=self.namespace.block_tokens)

    def match(self, keys: bytes, **_: Any) -> Answer:
        self.store.called("match")
        names = [key_at(keys, i) for i in range(key_count(keys))]
        found = next((i for i, name in enumerate(names) if name not in self.store.blocks), len(names))
        reason = MissReason.NEVER_STORED if found < len(names) else None
        return Answer(blocks=found, reason=reason, tiers=tiers_of(found), keys=keys)

    def fetch(self, match: Answer, into: U8, *, blocks: int | None = None, **_: Any) -> Answer:
        self.store.called("fetch")
        wanted = match.blocks if blocks is None else blocks
        stop = wanted if self.store.fetch_stops_at is None else min(wanted, self.store.fetch_stops_at)
        for index in range(stop):
            into[index] = np.frombuffer(self.store.blocks[key_at(match.keys, index)], np.uint8)
        into[stop:] = 0xEE
        reason = MissReason.CORRUPT if stop < wanted else None
        return Answer(blocks=stop, reason=reason, tiers=tiers_of(stop))

    def worth(self, match: Answer, *, block_recompute_seconds: float, first: int = 0) -> Choice:
        pace = self.store.block_seconds
        return choose(
            match.tiers,
            first=first,
            block_load_seconds=lambda tier: pace.get(tier, 0.0),
            block_recompute_seconds=block_recompute_seconds,
        )

    def release(self, match: Answer, *, used: int, outcome: ReleaseOutcome) -> None:
        self.store.called("release")
        self.store.released.append((used, outcome))

    def put(self, parent: BlockHash, keys: bytes, source: U8, **_: Any) -> Answer:
        self.store.called("put")
        assert key_count(keys) == len(source)
        assert parent == self.root or parent in self.store.blocks
        new = 0
        fits = self.store.put_blocks_max
        outcomes: tuple[OutcomeRun, ...] = (OutcomeRun(PutOutcome.STORED_HOST, 1),)
        if len(source) > fits:
            source, outcomes = source[:fits], (*outcomes, OutcomeRun(PutOutcome.THROTTLED, 1))
        for index, row in enumerate(source):
            new += self.store.blocks.setdefault(key_at(keys, index), row.tobytes()) == row.tobytes()
        return Answer(blocks=len(source), stored=new, present=len(source), outcomes=outcomes)
