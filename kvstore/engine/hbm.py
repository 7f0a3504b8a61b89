"""The hbm tier: the ladder that the daemon runs, over the pages of a KV pool.

One page of the pool is one page of the ladder's memory, and the ladder never asks for its bytes: there is
no tier below it here. What leaves is in the daemon already (see `saving.py`), so eviction is free.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstore.api import CommitRequest, MatchRequest, PartDigests, ReserveRequest
from kvstore.clock import Clock
from kvstore.core.ladder import Ladder
from kvstore.core.limits import Limits
from kvstore.errors import Overloaded
from kvstore.events import Events
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.types import (
    DIGEST_BYTES,
    LEASE_SECONDS_MAX,
    BlockHash,
    MatchMode,
    MissReason,
    PutOutcome,
    key_count,
)

_log = logging.getLogger(__name__)


class PoolPages:
    """Pages of the pool as the ladder lends them. Implements kvstore.tiers.base.HostMemory."""

    first_page = 1

    def __init__(self, page_count: int) -> None:
        self.total_pages = 1 + page_count
        self.generations = np.zeros(self.total_pages, np.uint32)

    def images(self, slots: object, *, stride_pages: int) -> tuple[memoryview, ...]:
        """Nobody below asks for bytes."""
        raise AssertionError("the hbm ladder has no tier below it")

    def touched_pages(self) -> int:
        """All of the pool is touched when it is made."""
        return self.total_pages - self.first_page


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that stay where they are until `release`: pages in block order."""

    lease: int
    pages: tuple[int, ...]
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """Pages for blocks that are about to be filled, in block order."""

    reservation: int
    pages: tuple[int, ...]


class Hbm:
    """Content-addressed pages of one model: match, claim, publish, release.

    Keys are those of the daemon's namespace, so a block has one name on every tier.
    Threads: any; the ladder has its lock.
    """

    def __init__(
        self, namespace: Namespace, *, root: BlockHash, page_count: int, clock: Clock, events: Events
    ) -> None:
        # A block is one page whatever its bytes are: the layout only has to fit into it.
        handle = Layout.single(dtype=namespace.dtype or "any", bytes_max=1, layers=1)
        self._space = replace(namespace, layout=handle, packing=f"{namespace.packing} page")
        self._name = self._space.fingerprint
        self._ladder = Ladder(
            host=PoolPages(page_count),
            ssd=None,
            clock=clock,
            events=events,
            limits=Limits(session_reserved_share=1.0),
            new_number=itertools.count(1).__next__,
        )
        self._ladder.open(self._space, root=root)
        self.page_count = self._ladder.catalog.slabs.usable_pages

    def match(self, keys: bytes, *, retention_class: str = "") -> Held:
        """Hold the longest prefix that is in the pool."""
        if not keys:
            return Held(0, ())
        found = self._ladder.match(
            MatchRequest(
                namespace=self._name,
                keys=keys,
                mode=MatchMode.LEASE,
                lease_seconds=LEASE_SECONDS_MAX,
                retention_class=retention_class,
            )
        )
        pages = np.concatenate([extent.slots for extent in found.extents] or [np.empty(0, np.uint32)])
        return Held(found.lease, tuple(pages.tolist()), found.reason)

    def claim(self, parent: BlockHash, keys: bytes, *, retention_class: str) -> Claimed | PutOutcome:
        """Take pages for blocks that follow `parent`, all of them or none; else say why not.

        DUPLICATE: some are in the pool by now; IN_FLIGHT: somebody else is filling them; THROTTLED: no room.
        """
        try:
            answer = self._ladder.reserve(
                ReserveRequest(
                    namespace=self._name, parent=parent, keys=keys, retention_class=retention_class
                )
            )
        except Overloaded:
            return PutOutcome.THROTTLED
        refused = [run.outcome for run in answer.outcomes if run.outcome is not PutOutcome.RESERVED]
        if refused:
            if answer.reservation:
                self._ladder.abort(answer.reservation)
            return refused[0]
        pages = np.concatenate([extent.slots for extent in answer.extents])
        return Claimed(answer.reservation, tuple(pages.tolist()))

    def publish(self, claimed: Claimed, blocks: int) -> None:
        """Let others find the first `blocks` of what was claimed, now that they are filled; the rest goes
        back. Their bytes were made here and never leave the device: nothing to digest.
        """
        part = PartDigests(
            0, 0, np.ones(len(claimed.pages), "<u4").tobytes(), bytes(DIGEST_BYTES * len(claimed.pages))
        )
        self._ladder.commit(CommitRequest(reservation=claimed.reservation, blocks=blocks, parts=(part,)))

    def abandon(self, claimed: Claimed) -> None:
        """Give claimed pages back; nobody writes to them any more."""
        self._ladder.abort(claimed.reservation)

    def release(self, held: Held, *, used: int | None = None) -> None:
        """Let go; `used` blocks were of use (default: all)."""
        if held.lease:
            self._ladder.release(held.lease, used=len(held.pages) if used is None else used)

    def renew(self, held: Sequence[Held]) -> None:
        """Hold on for another minute."""
        leases = [one.lease for one in held if one.lease]
        if leases and (ended := self._ladder.renew(leases, lease_seconds=LEASE_SECONDS_MAX)):
            _log.error("hbm leases ended while in use count=%d", len(ended))

    def resident(self, keys: bytes) -> int:
        """Return how many leading blocks are in the pool, without touching them."""
        if not key_count(keys):
            return 0
        return self._ladder.match(MatchRequest(namespace=self._name, keys=keys, mode=MatchMode.PROBE)).blocks

    def tick(self) -> None:
        """Give expired pages back."""
        self._ladder.tick()
