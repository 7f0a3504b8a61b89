"""The values that the store's verbs take and give; the wire carries exactly these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.types import (
    AckTier,
    BlockHash,
    Fingerprint,
    MatchMode,
    MissReason,
    PutOutcome,
    Tier,
)

U32Array = npt.NDArray[np.uint32]
NO_SESSION = 0
BOUNDARIES_MAX = 8


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """A stretch of blocks of one part that lies in host slots.

    Shapes: slots u32[n] (arena page each slot starts at; 0 = not resident), generations u32[n], lengths
    u32[n] (payload bytes), digests 16 bytes x segments x n, packed; empty while a writer still has to provide
    them.
    """

    part: int
    first: int
    slots: U32Array
    generations: U32Array
    lengths: U32Array
    digests: bytes = b""

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class TierRun:
    """`count` consecutive blocks of a match that were found in `tier`."""

    tier: Tier
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRequest:
    """Ask for the longest stored prefix of `keys`.

    With LEASE, blocks that lie deeper than host start to load at once when `load` is set. A repeated LEASE by
    the same `owner` answers the same length while its lease lives. `retention_class` is the class of this
    touch (default: the class that holds the run). `parts` limits extents (not the match) to some parts.
    """

    namespace: Fingerprint
    keys: bytes
    mode: MatchMode = MatchMode.LEASE
    owner: str = ""
    retention_class: str = ""
    exact_only: bool = False
    parts: tuple[int, ...] = ()
    lease_seconds: float = 30.0
    load: bool = True
    session: int = NO_SESSION


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchAnswer:
    """What is there.

    `blocks` is the full-history length; `boundaries` the longest usable boundaries, longest first (at most 8;
    boundary h means blocks [0, h) can be used as they are). `reason` says why the match ended before the last
    key. `ready` says that every leased block is resident and listed in `extents`; else `watch` the lease.
    `bitmap` (BITMAP only) has one bit per key, least significant first.
    """

    blocks: int
    boundaries: tuple[int, ...] = ()
    reason: MissReason | None = None
    lease: int = 0
    lease_seconds: float = 0.0
    tiers: tuple[TierRun, ...] = ()
    ready: bool = True
    extents: tuple[Extent, ...] = ()
    bitmap: bytes = b""


@dataclass(frozen=True, slots=True)
class Progress:
    """News of a lease whose blocks are loading: newly resident extents; when `done`, nothing more follows.

    `blocks` is the length that is, or can still become, readable: it shrinks when a load fails, and `reason`
    says why.
    """

    lease: int
    extents: tuple[Extent, ...]
    done: bool
    blocks: int
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class PartBlocks:
    """Blocks [first, first + count) of a put, of one part."""

    part: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequest:
    """Ask for slots to put blocks `keys` that follow `parent` (the chain root before a first block).

    `put_id` joins the puts of all ranks that bring parts of the same blocks. `parts` says what this writer
    brings; empty means every required part of every block. `provenance` is 0 for exact bytes, else the
    horizon H of approx(H). `token_ids` (packed u32) lets the store verify the chain of a namespace without
    extra keys.
    """

    namespace: Fingerprint
    parent: BlockHash
    keys: bytes
    put_id: bytes = b""
    parts: tuple[PartBlocks, ...] = ()
    retention_class: str = ""
    provenance: int = 0
    token_ids: bytes = b""
    session: int = NO_SESSION


@dataclass(frozen=True, slots=True)
class OutcomeRun:
    """`count` consecutive blocks of a put with the same outcome."""

    outcome: PutOutcome
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveAnswer:
    """Slots to write: `extents` cover what is RESERVED (their `first` counts in the put's blocks).

    A `reservation` of 0 means that there is nothing to write.
    """

    reservation: int
    outcomes: tuple[OutcomeRun, ...]
    extents: tuple[Extent, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PartDigests:
    """What was written of one reserved extent: payload lengths u32[n] and packed digests of the source."""

    part: int
    first: int
    lengths: bytes
    digests: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """Publish the first `blocks` blocks of a reservation; the rest of it is given back. Idempotent."""

    reservation: int
    blocks: int
    parts: tuple[PartDigests, ...]
    ack: AckTier = AckTier.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAnswer:
    """What became of each block; with AckTier.SSD the final word comes when the write is durable."""

    outcomes: tuple[OutcomeRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchAnswer:
    """`loading` blocks follow the `resident` ones to host; `prefetch` names the request for cancel."""

    prefetch: int
    blocks: int
    resident: int
    loading: int
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run as `list` and `inspect` show it. Units: wall seconds; expires_at is inf without a TTL."""

    parent: BlockHash
    keys: bytes
    tiers: tuple[Tier, ...]
    host_blocks: int
    ssd_blocks: int
    retention_class: str
    written_at: float
    touched_at: float
    expires_at: float
    bytes: int
    provenance: int
    leased: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListAnswer:
    """One page of runs; an empty cursor means that this was the last."""

    runs: tuple[RunInfo, ...]
    cursor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAnswer:
    """A namespace is open. `siblings` says how others of the same model differ, to explain missing hits."""

    fingerprint: Fingerprint
    siblings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSnapshot:
    """Everything `status` prints, as JSON-ready values; the keys are the contract of its --json."""

    tiers: tuple[dict[str, Any], ...] = ()
    classes: tuple[dict[str, Any], ...] = ()
    namespaces: tuple[dict[str, Any], ...] = ()
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
