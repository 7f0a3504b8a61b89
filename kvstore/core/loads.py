"""Promotion from SSD to host: single-flight loads, fetches before prefetches, cancellation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.api import NO_SESSION, U32Array
from kvstore.core.catalog import Catalog
from kvstore.core.frames import NOTHING, Frame
from kvstore.core.limits import Limits
from kvstore.core.shares import FairQueue
from kvstore.errors import Overloaded
from kvstore.tiers.base import FrameRead, ReadResult
from kvstore.types import DIGEST_BYTES, HASH_BYTES, MissReason, key_at

Mask = npt.NDArray[np.bool_]
LOAD_BYTES_MIN = 1 << 20
SHARES = 4
"""What one request wants is read in so many loads at least, if none of them would be smaller than that."""


class Waiter(Protocol):
    """Somebody who wants blocks of a frame: a lease or a prefetch."""

    def arrived(self, load: Load, position: int) -> None:
        """One of several parts of the load can be read; the others are on their way."""
        ...

    def loaded(self, load: Load, good: int, reason: MissReason | None) -> None:
        """The first `good` blocks of the load are resident; `reason` says what stopped the rest."""
        ...


class Load:
    """Consecutive blocks of a frame on their way into fresh slots, shared by all who wait for them; each part
    is a read of its own.
    """

    __slots__ = (
        "asked",
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
        self.queue: FairQueue[Turn] | None = None
        self.slots: tuple[U32Array, ...] = ()
        self.results: dict[int, ReadResult] = {}  # by position of the part
        self.asked = 0
        """Parts whose reads have been submitted; those of the others wait in the queue, or were given up."""
        self.pending = 0
        self.since = 0.0
        self.overdue = False

    @property
    def submitted(self) -> bool:
        """Say whether it has slots: reads of it are under way, or have been."""
        return bool(self.slots)

    @property
    def is_over(self) -> bool:
        """Say whether nothing of it is under way or will be."""
        return not self.pending and self.queue is None

    @property
    def has_unqueued_reads(self) -> bool:
        """Say whether it is new, or reads of it were given up because nobody waited for them."""
        return self.queue is None and self.asked < len(self.frame.parts)

    def quit(self) -> None:
        """Wait no more."""
        if self.queue is not None:
            for position in range(self.asked, len(self.frame.parts)):
                self.queue.remove((self, position), session=self.session)
            self.queue = None


def largest_stride(frame: Frame) -> int:
    """Return what a block takes in the largest of its parts."""
    return max(part.stride_bytes for part in frame.parts)


Turn = tuple[Load, int]
"""The read of one part of a load, by the part's position."""


def enter(loads: Sequence[Load], queue: FairQueue[Turn], *, session: int, sweep_bytes: int) -> None:
    """Let loads wait in a queue, in the turn of a session, and no longer where they waited before. Part by
    part, so that the first layers of all blocks come first, within sweeps of so many bytes.
    """
    sweep: list[Load] = []
    size = 0
    for load in loads:
        load.quit()
        load.queue, load.session = queue, session
        mine = load.count * load.frame.block_stride_bytes
        if sweep and size + mine > sweep_bytes:
            _queue(sweep, queue, session)
            sweep, size = [], 0
        sweep.append(load)
        size += mine
    _queue(sweep, queue, session)


def _queue(sweep: Sequence[Load], queue: FairQueue[Turn], session: int) -> None:
    for position in range(max((len(load.frame.parts) for load in sweep), default=0)):
        for load in sweep:
            if load.asked <= position < len(load.frame.parts):
                queue.append((load, position), session=session)


class Loads:
    """The queues of loads: fetches before prefetches, and sessions in turn. The ladder asks for the next ones
    and reports what came of them.
    """

    def __init__(self, catalog: Catalog, limits: Limits) -> None:
        self._catalog = catalog
        self._limits = limits
        self._urgent: FairQueue[Turn] = FairQueue()
        self._ahead: FairQueue[Turn] = FairQueue()
        self._under_way: dict[Load, None] = {}
        self._reading = 0
        """Reads that the tier has at hand, those aside that are overdue."""
        self._has_progress = False
        self._progress_at = 0.0

    @property
    def in_flight(self) -> int:
        """Loads that the tier has something of at hand."""
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
        stretches: Iterable[tuple[Frame, int, int]],
        waiter: Waiter,
        *,
        urgent: bool,
        session: int = NO_SESSION,
    ) -> int:
        """Make blocks [start, start + count) of frames come to host, joining loads that are under way;
        returns how many loads the waiter waits for.
        """
        entering: dict[Load, None] = {}
        joined = 0
        absent = [
            (frame, start, mask)
            for frame, start, count in stretches
            if not (mask := frame.resident(start, count)).all()
        ]
        if not absent:
            return 0
        size = self._load_bytes(absent, urgent=urgent)
        for frame, start, mask in absent:
            for load in self._covering(frame, start, mask, size):
                if load.has_unqueued_reads or (urgent and self._hurries(load, session)):
                    entering[load] = None
                load.waiters[waiter] = load.waiters.get(waiter, 0) + 1
                joined += 1
        if not entering:
            return joined
        if urgent:
            enter(list(entering), self._urgent, session=session, sweep_bytes=self._limits.sweep_bytes)
        else:  # nobody computes with a part of a block: no more of them is begun than the tier reads
            enter(list(entering), self._ahead, session=session, sweep_bytes=0)
        return joined

    def _load_bytes(self, absent: Sequence[tuple[Frame, int, Mask]], *, urgent: bool) -> int:
        """Return how much a load reads of a part: large ones cost the least Python a byte, but a request has
        at least as many as the tier has threads, and a fetch must not wait for much that nobody waits for.
        """
        most = self._limits.load_bytes if urgent else self._limits.load_bytes // 2
        whole = sum(int((~mask).sum()) * largest_stride(frame) for frame, _, mask in absent)
        return min(most, max(LOAD_BYTES_MIN, whole // SHARES))

    def _covering(self, frame: Frame, start: int, mask: Mask, size: int) -> Iterator[Load]:
        """Yield the loads of what of a stretch is not resident, new ones where there are none."""
        per_load = max(1, size // largest_stride(frame))
        index = start
        while index < start + len(mask):
            if mask[index - start]:
                index += 1
                continue
            load = frame.loads.get(index) or self._new_load(frame, index, start, mask, per_load)
            yield load
            index = load.start + load.count

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
        mask: Mask,
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
        for load in self._queued() if among is None else list(dict.fromkeys(among)):
            if load.queue is not None and load.waiters.pop(waiter, 0) and not load.waiters:
                load.quit()
                if not load.submitted:
                    self._close(load)
                elif load.is_over:
                    self._finished(load)

    def _queued(self) -> list[Load]:
        return list(dict.fromkeys(load for load, _ in (*self._urgent, *self._ahead)))

    def next(self) -> list[tuple[Load, int, FrameRead]]:
        """Return reads to submit now, slots in hand; loads without room fail as throttled."""
        ready: list[tuple[Load, int, FrameRead]] = []
        while (self._urgent or self._ahead) and self._reading < self._limits.loads_in_flight_max:
            load, position = (self._urgent or self._ahead).popleft()
            load.asked += 1
            if load.asked == len(load.frame.parts):
                load.queue = None
            if load.frame.dead or load.frame.location is None:
                key = key_at(load.frame.keys, load.start)
                reason = self._catalog.ledger.reason(key, space=load.frame.fingerprint)
                self._give_up(load, reason)
            elif not load.submitted and not self._allocate(load):
                self._give_up(load, MissReason.THROTTLED)
            else:
                self._has_progress |= not self._under_way  # waiting begins with the first of them
                self._under_way[load] = None
                self._reading += not load.overdue
                load.pending += 1
                load.since = 0.0
                ready.append((load, position, self._read(load, position)))
        return ready

    def _give_up(self, load: Load, reason: MissReason) -> None:
        """End a load that cannot go on; what the tier has at hand of it comes to nothing."""
        load.quit()
        if load.pending:
            self._tell(load, 0, reason)
        elif load.submitted:
            self._finished(load, reason)
        else:
            self._finish(load, 0, reason)

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

    def _read(self, load: Load, position: int) -> FrameRead:
        frame, part = load.frame, load.frame.parts[position]
        assert frame.location is not None
        return FrameRead(
            frame.location,
            frame.count,
            frame.parts,
            position,
            load.start,
            frame.keys[load.start * HASH_BYTES : (load.start + load.count) * HASH_BYTES],
            self._catalog.memory.images(load.slots[position], stride_pages=part.stride_pages),
        )

    def expire(self, monotonic: float) -> None:
        """Nobody waits for ever: a load that is overdue ends for its waiters as tier_down, and so do all that
        are queued when nothing at all has come back for as long.

        The slots of a load under way stay its own until the tier lets go of them: it may still write there.
        """
        if self._has_progress or not self._under_way:
            self._has_progress, self._progress_at = False, monotonic
        for load in self._under_way:
            load.since = load.since or monotonic
            if load.pending and monotonic - load.since >= self._limits.load_seconds_max:
                if not load.overdue:
                    self._reading -= load.pending
                load.overdue = True
                load.quit()
                self._tell(load, 0, MissReason.TIER_DOWN)
        if monotonic - self._progress_at >= self._limits.load_seconds_max:
            for load in self._queued():
                self._give_up(load, MissReason.TIER_DOWN)

    def came(self, load: Load, position: int, result: ReadResult) -> None:
        """Take what became of a read in; its load is over with the last of them."""
        load.pending -= 1
        load.since = 0.0
        self._reading -= not load.overdue
        self._has_progress = True
        load.results[position] = result
        if len(load.frame.parts) > 1 and result.good:
            for waiter in load.waiters:
                waiter.arrived(load, position)
        if load.is_over:
            self._finished(load)

    def _finished(self, load: Load, stopped: MissReason | None = None) -> None:
        """Install what arrived intact in all parts and tell the waiters; drop what did not."""
        del self._under_way[load]
        results = [load.results[position] for position in sorted(load.results)]
        worst = min(results, key=lambda result: result.good)
        good, reason = worst.good, worst.reason if worst.good < load.count else None
        if len(results) < len(load.frame.parts):
            good, reason = 0, stopped or MissReason.EVICTED
        if load.frame.dead:
            good, reason = 0, MissReason.DELETED
        self._install(load, results, good)
        for slots in load.slots if good < load.count else ():
            # Of several parts, readers may have been told of some: what was told under a lease stays with it.
            self._catalog.condemn(load.frame, slots[good:].copy())
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
        """Reads that wait for their turn."""
        return len(self._urgent) + len(self._ahead)
