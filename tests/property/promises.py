"""A lease of a random history, and what it promised: its blocks stay where they were said to lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.api import Extent, MatchAnswer
from kvstore.core.ladder import Ladder
from kvstore.namespace import Namespace
from kvstore.types import HASH_BYTES, split_keys
from tests.support.driver import check_extents
from tests.support.memory import PrivateMemory


@dataclass(slots=True, eq=False)
class Held:
    """A lease, and all that was ever said about where its blocks lie."""

    space: int
    keys: bytes
    answer: MatchAnswer
    owner: str
    session: int
    deadline: float
    granted_at: int
    exact_only: bool
    has_approx: bool
    extents: list[Extent] = field(default_factory=list)
    is_stale: bool = False

    def stands_for(self, space: int, owner: str, keys: bytes, *, exact_only: bool) -> bool:
        """Say whether its answer stands for the next match of its owner."""
        is_mine = owner and self.owner == owner and self.space == space
        answered = self.keys[: self.answer.blocks * HASH_BYTES]
        stands = not self.is_stale and not (exact_only and self.has_approx)
        return bool(is_mine and stands and keys.startswith(answered))

    def lost(self, names: Iterable[bytes]) -> None:
        """Blocks of its namespace left. It keeps its slots, but its answer is no longer what is there."""
        self.is_stale |= not set(split_keys(self.keys)[: self.answer.blocks]).isdisjoint(names)

    def promised(self, ladder: Ladder) -> tuple[Extent, ...]:
        """What was told part by part is taken back where another part of it does not come: the lease then
        ends before it.
        """
        lease, promised = ladder._leases._leases.get(self.answer.lease), list[Extent]()
        for extent in self.extents:
            kept = extent.count if lease is None else max(0, min(extent.count, lease.limit - extent.first))
            width = len(extent.digests) // extent.count
            promised.append(
                Extent(
                    extent.part,
                    extent.first,
                    extent.slots[:kept],
                    extent.generations[:kept],
                    extent.lengths[:kept],
                    extent.digests[: kept * width],
                )
            )
        return tuple(promised)

    def check_slots(self, ladder: Ladder, memory: PrivateMemory) -> None:
        """Nobody else was given what it was promised."""
        for extent in self.promised(ladder):
            now = memory.generations[extent.slots]
            assert (now == extent.generations).all(), "a leased slot was given away"

    def check_bytes(self, ladder: Ladder, space: Namespace) -> None:
        """What it was promised is there, byte by byte."""
        check_extents(ladder, space, self.keys, self.promised(ladder))
