"""What the scheduler tells its workers in every step, and what they answer: plain values, pickled by vLLM.

The two sides share nothing else. A lease is a bearer token, so a worker fetches what the scheduler leased.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.api import TierRun
from kvstore.types import BlockHash, MissReason, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Bring the leased blocks [first, first + len(block_ids)) of a chain into the engine's `block_ids`.

    `blocks` is how far the lease reaches: less than was promised to vLLM when the store lost some in between.
    `tiers` is where the leased blocks were found, from the first of the chain on.
    """

    request_id: str
    namespace: bytes
    lease: int
    blocks: int
    first: int
    block_ids: tuple[int, ...]
    seconds: float
    tiers: tuple[TierRun, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """Store the engine's `block_ids` as the blocks `keys` behind `parent`; one put of all ranks."""

    request_id: str
    namespace: bytes
    parent: BlockHash
    keys: bytes
    block_ids: tuple[int, ...]
    put_id: bytes
    retention_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's orders.

    `waits`: the loads must be done before this step computes. `preempted`: their blocks may be overwritten in
    this very step. `draining`: finished, and their blocks stay theirs until all saves have read them. `idle`:
    nothing is computed. `epoch` counts the failed loads that the scheduler knows of: what is computed between
    a failed load and its answer may rest on garbage and is not stored.
    """

    epoch: int = 0
    loads: tuple[LoadJob, ...] = ()
    waits: bool = False
    saves: tuple[SaveJob, ...] = ()
    preempted: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One rank's load is over: the first `blocks` of the job's blocks are in place and checked."""

    request_id: str
    blocks: int
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed:
    """How long a tier takes for one rank's part of a block, as that rank measured it."""

    rank: str
    tier: Tier
    block_seconds: float


@dataclass(frozen=True, slots=True)
class Answers:
    """The loads that ended in a step and what they measured, of one rank or, joined, of several."""

    loaded: tuple[Loaded, ...] = field(default=())
    speeds: tuple[RankSpeed, ...] = field(default=())

    def joined(self, other: Answers) -> Answers:
        """Return both."""
        return Answers(self.loaded + other.loaded, self.speeds + other.speeds)
