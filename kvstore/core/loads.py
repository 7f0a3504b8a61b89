"""Promotion from SSD to host: single-flight loads, fetches before prefetches, cancellation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from kvstore.api import NO_SESSION, U32Array
from kvstore.core.catalog import Catalog
from kvstore.core.frames import NOTHING, Frame
from kvstore.core.limits import Limits
from kvstore.core.shares import FairQueue
from kvstore.errors import Overloaded
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
        "queue",
        "results",
        "session",
        "since",
        "slots",
        "start",
        "waiters",
    )

    def __init__(self, frame: Frame, start: int, count: int, *, session: int) -> None:
        self.frame = frame
        self.start = start
        self.count = count
        self.waiters: dict[Waiter, int] = {}  # how many of a waiter's stretches wait for this load
        self.session = session
        self.queue: FairQueue[Load] | None = None
        self.slots: tuple[U32Array, ...] = ()
        self.results: list[ReadResult] = []
        self.pending = 0
        self.since = 0.0
        self.overdue = False

    @property
    def submitted(self) -> bool:
        """Say whether the read is under way."""
        return bool(self.slots)

    def enter(self, queue: FairQueue[Load], *, session: int) -> None:
        """Wait in a queue, in the turn of a session, and no longer where it waited before."""
        self.quit()
        self.queue, self.session = queue, session
        queue.append(self, session=session)

    def quit(self) -> None:
        """Wait no more."""
        if self.queue is not None:
            self.queue.remove(self, session=self.session)
            self.queue = None


class Loads:
    """The queues of loads: fetches before prefetches, and sessions in turn. The ladder asks for the next ones
    and reports what came of them.
    """

    def __init__(self, catalog: Catalog, limits: Limits) -> None:
        self._catalog = catalog
        self._limits = limits
        self._urgent: FairQueue[Load] = FairQueue()
        self._ahead: FairQueue[Load] = FairQueue()
        self._under_way: dict[Load, None] = {}
        self._overdue = 0
        self._has_progress = False
        self._progress_at = 0.0

    @property
    def in_flight(self) -> int:
        """Loads that the tier has at hand."""
        return len(self._under_way)

    def check(self, session: int) -> None:
        """Let a session queue more.

        Errors: Overloaded when enough of its loads wait already.
        """
        queued, limit = self._urgent.queued(session), self._limits.session_loads_max
        if session != NO_SESSION and queued >= limit:
            raise Overloaded(f"session {session}: the limit is {limit} waiting loads, {queued} wait")

    def want(
        self,
        frame: Frame,
        start: int,
        count: int,
        waiter: Waiter,
        *,
        urgent: bool,
        session: int = NO_SESSION,
    ) -> int:
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
                load.enter(self._urgent if urgent else self._ahead, session=session)
            elif urgent and self._hurries(load, session):
                load.enter(self._urgent, session=session)
            load.waiters[waiter] = load.waiters.get(waiter, 0) + 1
            joined += 1
            index = load.start + load.count
        return joined

    def _hurries(self, load: Load, session: int) -> bool:
        """Say whether a load gets its turn sooner in the queue of a session that asks for it as well."""
        if load.queue is self._ahead:
            return True
        return load.queue is self._urgent and (
            self._urgent.queued(session) < self._urgent.queued(load.session) - 1
        )

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
        load = Load(frame, index, end - index, session=NO_SESSION)
        if not frame.loads:
            frame.loads = {}
        frame.loads.update(dict.fromkeys(range(index, end), load))
        self._catalog.hold(frame, end)
        return load

    def leave(self, waiter: Waiter, *, among: Iterable[Load] | None = None) -> None:
        """A waiter lost interest: loads that nobody waits for and that are not under way are dropped.

        `among` are the loads that it can be waiting for, by default all.
        """
        for load in list(dict.fromkeys((*self._urgent, *self._ahead) if among is None else among)):
            if load.queue is not None and load.waiters.pop(waiter, 0) and not load.waiters:
                load.quit()
                self._close(load)

    def next(self) -> list[tuple[Load, list[FrameRead]]]:
        """Return loads to submit now, slots in hand; those without room fail as throttled."""
        ready: list[tuple[Load, list[FrameRead]]] = []
        room = self._limits.loads_in_flight_max + self._overdue
        while (self._urgent or self._ahead) and self.in_flight < room:
            load = (self._urgent or self._ahead).popleft()
            load.queue = None
            if load.frame.dead or load.frame.location is None:
                key = key_at(load.frame.keys, load.start)
                self._finish(load, 0, self._catalog.ledger.reason(key, space=load.frame.fingerprint))
            elif not self._allocate(load):
                self._finish(load, 0, MissReason.THROTTLED)
            else:
                self._has_progress |= not self._under_way  # waiting begins with the first of them
                self._under_way[load] = None
                ready.append((load, self._reads(load)))
        return ready

    def _allocate(self, load: Load) -> bool:
        slots: list[U32Array] = []
        for part in load.frame.parts:
            slots.append(self._catalog.allocate(load.count, part, by=load.frame.retention_class))
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
            for load in dict.fromkeys((*self._urgent, *self._ahead)):
                load.quit()
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
        if reason in (MissReason.CORRUPT, MissReason.DELETED):
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
        waiters, load.waiters = load.waiters, {}
        self._close(load)
        for waiter in itertools.chain.from_iterable(map(itertools.repeat, waiters, waiters.values())):
            waiter.loaded(load, good, reason)

    @staticmethod
    def _tell(load: Load, good: int, reason: MissReason) -> None:
        waiters, load.waiters = load.waiters, {}
        for waiter in itertools.chain.from_iterable(map(itertools.repeat, waiters, waiters.values())):
            waiter.loaded(load, good, reason)

    def _close(self, load: Load) -> None:
        loads = load.frame.loads
        for block in range(load.start, load.start + load.count):
            if loads.get(block) is load:
                del loads[block]
        if not loads:
            load.frame.loads = NOTHING
        self._catalog.unhold(load.frame, load.start + load.count)

    @property
    def queued(self) -> int:
        """Loads that wait for their turn."""
        return len(self._urgent) + len(self._ahead)
