"""Quotas: how much of host memory and of SSD each class takes, and its own eviction when that is too much.

A block counts for the class it was put under, in every tier that it lies in; who touches it later may hold it
longer, but does not pay for it. A full class makes room among its own, and is refused where it cannot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.api import U32Array
from kvstore.core.farewells import dismiss_and_bury
from kvstore.core.frames import Frame
from kvstore.core.sleepers import Sleeper
from kvstore.types import HASH_BYTES, PAGE_BYTES, MissReason, Tier, round_up

if TYPE_CHECKING:
    from kvstore.core.catalog import Catalog

SLACK_SHARE = 1 / 16
"""A class that is full makes this much of its quota free at a time: looking for who leaves takes time."""
SHRINK_BYTES = 64 << 20
"""So much leaves a class at a time when its quota was lowered."""
NOBODY = ""


class Quotas:
    """The bytes of each class by tier. Guarded by the ladder's lock.

    Shapes: `_payers` u16[total_pages]: by the first page of a slot, which class it was lent to.
    """

    def __init__(self, catalog: Catalog, *, total_pages: int) -> None:
        self._catalog = catalog
        self._codes = {NOBODY: 0}
        self._names = [NOBODY]
        self._payers: npt.NDArray[np.uint16] = np.zeros(total_pages, np.uint16)
        self.host_pages: defaultdict[str, int] = defaultdict(int)
        self.writing_bytes: defaultdict[str, int] = defaultdict(int)
        """Bytes on their way to SSD."""

    def held_bytes(self, name: str) -> dict[Tier, int]:
        """Return what a class takes of each tier."""
        ssd = self._catalog.segments.class_bytes[name] + self.writing_bytes[name]
        return {Tier.HOST: self.host_pages[name] * PAGE_BYTES, Tier.SSD: ssd}

    # Host memory

    def admit(self, count: int, *, stride_pages: int, name: str) -> int:
        """Return how many of `count` slots a class may take, after it has made room for them."""
        quota = self._quota(name)
        if not quota:
            return count
        over = (self.host_pages[name] + count * stride_pages) * PAGE_BYTES - quota
        if over > 0:
            self._evict_from_host(name, over + int(quota * SLACK_SHARE))
        room = quota // PAGE_BYTES - self.host_pages[name]
        return min(count, max(0, room // stride_pages))

    def charge(self, slots: U32Array, *, stride_pages: int, name: str) -> None:
        """Slots were lent to a class."""
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = len(self._names)
            self._names.append(name)
        self._payers[slots] = code
        self.host_pages[name] += len(slots) * stride_pages

    def give_back(self, slots: U32Array, *, stride_pages: int) -> None:
        """Slots of one size came back."""
        counts = np.bincount(self._payers[slots])
        for code in np.flatnonzero(counts).tolist():
            self.host_pages[self._names[code]] -= int(counts[code]) * stride_pages

    def _quota(self, name: str) -> int:
        held_by = self._catalog.retention.classes.get(name)
        return held_by.quota_bytes if held_by is not None else 0

    def _evict_from_host(self, name: str, size: int) -> None:
        """Evict a class's own, leaves first. A pass follows the policy's list of nodes, which need not be the
        order in which they would leave: what follows a run may come behind it; the next pass takes the run.
        """
        goal, before = self.host_pages[name] - -(-size // PAGE_BYTES), -1
        while before != self.host_pages[name] > goal:
            before = self.host_pages[name]
            self._evict_pass(name, goal)

    def _evict_pass(self, name: str, goal: int) -> None:
        for node in self._catalog.policy.nodes():
            if node.count and any(piece.frame.retention_class == name for piece in node.slices):
                self._catalog.room.evict_from(node, self.host_pages[name] - goal)
                if self.host_pages[name] <= goal:
                    return

    # SSD

    def admit_write(self, frame: Frame, size: int) -> bool:
        """Say whether a frame may go to SSD, after its class has made room for it there."""
        quota = self._quota(frame.retention_class)
        if not quota:
            return True
        size += round_up(frame.count * HASH_BYTES + PAGE_BYTES, PAGE_BYTES)
        if size > quota:
            return False
        over = self.held_bytes(frame.retention_class)[Tier.SSD] + size - quota
        if over > 0:
            over -= self._evict_from_ssd(frame.retention_class, over + int(quota * SLACK_SHARE))
        return over <= 0

    def _evict_from_ssd(self, name: str, size: int) -> int:
        """Let the frames of a class go that were touched longest ago, by segment; returns the bytes freed."""
        freed = 0
        for frame in self._oldest(name):
            if isinstance(frame, Sleeper):
                (gone,) = dismiss_and_bury(self._catalog, [frame], MissReason.EVICTED)
                freed += gone.location.length_bytes
                if freed >= size:
                    break
                continue
            location = frame.location
            if location is None or frame.holds or frame.loads:
                continue
            self._catalog.forget_on_ssd(frame, MissReason.EVICTED)
            self._catalog.graves.bury(location, frame.fingerprint)
            freed += location.length_bytes
            if freed >= size:
                break
        return freed

    def _oldest(self, name: str) -> Iterator[Frame | Sleeper]:
        mine = (s for s in self._catalog.segments if s.class_bytes.get(name))
        for segment in sorted(mine, key=lambda s: (s.last_touch, s.number)):
            awake = [f for f in segment.frames if f.retention_class == name and f.nodes]
            found: list[tuple[float, Frame | Sleeper]] = [
                (max(node.since for node in frame.nodes), frame) for frame in awake
            ]
            found += self._catalog.sleepers.of_class(segment.number, name)
            for _, frame in sorted(found, key=lambda pair: pair[0]):
                if not isinstance(frame, Sleeper) or self._catalog.sleepers.is_here(frame):
                    yield frame

    # A quota that was lowered

    def shrink(self) -> None:
        """Bring classes back below their quotas, a bounded amount at a time."""
        for name, held_by in self._catalog.retention.classes.items():
            if not held_by.quota_bytes:
                continue
            over = {tier: held - held_by.quota_bytes for tier, held in self.held_bytes(name).items()}
            if over[Tier.HOST] > 0:
                self._evict_from_host(name, min(over[Tier.HOST], SHRINK_BYTES))
            if over[Tier.SSD] > 0:
                self._evict_from_ssd(name, min(over[Tier.SSD], SHRINK_BYTES))
