"""Promotion from SSD to host: single-flight loads, fetches before prefetches, cancellation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvstore.api import U32Array
from kvstore.core.catalog import Catalog
from kvstore.core.frames import Frame
from kvstore.core.limits import Limits
from kvstore.tiers.base import FrameRead, ReadResult
from kvstore.types import DIGEST_BYTES, HASH_BYTES, MissReason, key_at


class Waiter(Protocol):
    """Somebody who wants blocks of a frame: a lease or a prefetch."""

    def loaded(self, load: Load, good: int, reason: MissReason | None) -> None:
        """The first `good` blocks of the load are resident; `reason` says what stopped the rest."""
        ...


class Load:
    """One read of consecutive blocks of a frame into fresh slots, shared by all who wait for them."""

    __slots__ = (
        "count",
        "frame",
        "overdue",
        "pending",
        "results",
        "since",
        "slots",
        "start",
        "submitted",
        "waiters",
    )

    def __init__(self, frame: Frame, start: int, count: int) -> None:
        self.frame = frame
        self.start = start
        self.count = count
        self.waiters: list[Waiter] = []
        self.submitted = False
        self.slots: tuple[U32Array, ...] = ()
        self.results: list[ReadResult] = []
        self.pending = 0
        self.since = 0.0
        self.overdue = False


class Loads:
    """The queue of loads. The ladder asks for the next ones and reports what came of them."""

    def __init__(self, catalog: Catalog, limits: Limits) -> None:
        self._catalog = catalog
        self._limits = limits
        self._urgent: deque[Load] = deque()
        self._ahead: deque[Load] = deque()
        self._under_way: dict[Load, None] = {}
        self._overdue = 0
        self._has_progress = False
        self._progress_at = 0.0

    @property
    def in_flight(self) -> int:
        """Loads that the tier has at hand."""
        return len(self._under_way)

    def want(self, frame: Frame, start: int, count: int, waiter: Waiter, *, urgent: bool) -> int:
        """Make blocks [start, start + count) come to host, joining loads that are under way; returns how
        many loads it waits for.
        """
        mask = frame.resident(start, count)
        if mask.all():
            return 0
        joined, index = 0, start
        per_load = max(1, self._limits.load_bytes // frame.block_stride_bytes)
        while index < start + count:
            if mask[index - start]:
                index += 1
                continue
            load = frame.loads.get(index)
            if load is None:
                load = self._new_load(frame, index, start, mask, per_load)
                (self._urgent if urgent else self._ahead).append(load)
            elif urgent and not load.submitted and load in self._ahead:
                self._ahead.remove(load)
                self._urgent.append(load)
            load.waiters.append(waiter)
            joined += 1
            index = load.start + load.count
        return joined

    def _new_load(
        self,
        frame: Frame,
        index: int,
        start: int,
        mask: np.ndarray[tuple[int], np.dtype[np.bool_]],
        per_load: int,
    ) -> Load:
        end = index + 1
        while (
            end < start + len(mask)
            and end - index < per_load
            and not mask[end - start]
            and end not in frame.loads
        ):
            end += 1
        load = Load(frame, index, end - index)
        for block in range(index, end):
            frame.loads[block] = load
        self._catalog.hold(frame, end)
        return load

    def leave(self, waiter: Waiter) -> None:
        """A waiter lost interest: loads that nobody waits for and that are not under way are dropped."""
        for queue in (self._urgent, self._ahead):
            for load in list(queue):
                if waiter in load.waiters:
                    load.waiters = [w for w in load.waiters if w is not waiter]
                    if not load.waiters:
                        queue.remove(load)
                        self._close(load)

    def next(self) -> list[tuple[Load, list[FrameRead]]]:
        """Return loads to submit now, slots in hand; those without room fail as throttled."""
        ready: list[tuple[Load, list[FrameRead]]] = []
        room = self._limits.loads_in_flight_max + self._overdue
        while (self._urgent or self._ahead) and self.in_flight < room:
            load = (self._urgent or self._ahead).popleft()
            if load.frame.dead or load.frame.location is None:
                key = key_at(load.frame.keys, load.start)
                self._finish(load, 0, self._catalog.ledger.reason(key))
            elif not self._allocate(load):
                self._finish(load, 0, MissReason.THROTTLED)
            else:
                load.submitted = True
                self._under_way[load] = None
                ready.append((load, self._reads(load)))
        return ready

    def _allocate(self, load: Load) -> bool:
        slots: list[U32Array] = []
        for part in load.frame.parts:
            slots.append(self._catalog.allocate(load.count, part))
            if len(slots[-1]) < load.count:
                for taken in slots:
                    self._catalog.free_slots(taken)
                return False
        load.slots = tuple(slots)
        return True

    def _reads(self, load: Load) -> list[FrameRead]:
        frame = load.frame
        assert frame.location is not None
        keys = frame.keys[load.start * HASH_BYTES : (load.start + load.count) * HASH_BYTES]
        load.pending = len(frame.parts)
        return [
            FrameRead(
                frame.location,
                frame.count,
                frame.parts,
                position,
                load.start,
                keys,
                self._catalog.memory.images(load.slots[position], stride_pages=part.stride_pages),
            )
            for position, part in enumerate(frame.parts)
        ]

    def expire(self, monotonic: float) -> None:
        """Nobody waits for ever: a load that is overdue ends for its waiters as tier_down, and so do all that
        are queued when nothing at all has come back for as long.

        The slots of a load under way stay its own until the tier lets go of them: it may still write there.
        """
        if self._has_progress or not self._under_way:
            self._has_progress, self._progress_at = False, monotonic
        for load in self._under_way:
            load.since = load.since or monotonic
            if monotonic - load.since >= self._limits.load_seconds_max:
                self._overdue += not load.overdue
                load.overdue = True
                self._tell(load, 0, MissReason.TIER_DOWN)
        if monotonic - self._progress_at >= self._limits.load_seconds_max:
            queued = [*self._urgent, *self._ahead]
            self._urgent.clear()
            self._ahead.clear()
            for load in queued:
                self._finish(load, 0, MissReason.TIER_DOWN)

    def finished(self, load: Load, results: Sequence[ReadResult]) -> None:
        """Install what arrived intact and tell the waiters; drop what did not."""
        del self._under_way[load]
        self._overdue -= load.overdue
        self._has_progress = True
        worst = min(results, key=lambda result: result.good)
        good, reason = worst.good, worst.reason if worst.good < load.count else None
        if load.frame.dead:
            good, reason = 0, MissReason.DELETED
        self._install(load, results, good)
        for slots in load.slots:
            self._catalog.free_slots(slots[good:])
        if reason is MissReason.CORRUPT:
            self._catalog.drop_block(load.frame, load.start + good, reason)
        self._finish(load, good, reason)

    def _install(self, load: Load, results: Sequence[ReadResult], good: int) -> None:
        if not good:
            return
        span = slice(load.start, load.start + good)
        for part, slots, result in zip(load.frame.slots_for_writing(), load.slots, results, strict=True):
            part.slots[span] = slots[:good]
            part.generations[span] = self._catalog.memory.generations[slots[:good]]
            part.lengths[span] = np.frombuffer(result.lengths, np.uint32)[:good]
            width = DIGEST_BYTES * len(part.part.segments)
            part.digests[span] = np.frombuffer(result.digests, np.uint8).reshape(-1, width)[:good]
        for node in load.frame.nodes:
            self._catalog.came_back(node)

    def _finish(self, load: Load, good: int, reason: MissReason | None) -> None:
        waiters, load.waiters = load.waiters, []
        self._close(load)
        for waiter in waiters:
            waiter.loaded(load, good, reason)

    @staticmethod
    def _tell(load: Load, good: int, reason: MissReason) -> None:
        waiters, load.waiters = load.waiters, []
        for waiter in waiters:
            waiter.loaded(load, good, reason)

    def _close(self, load: Load) -> None:
        for block in range(load.start, load.start + load.count):
            load.frame.loads.pop(block, None)
        self._catalog.unhold(load.frame, load.start + load.count)

    @property
    def queued(self) -> int:
        """Loads that wait for their turn."""
        return len(self._urgent) + len(self._ahead)
