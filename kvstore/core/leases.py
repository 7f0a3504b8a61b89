"""Leases: deadline-bound promises not to move a match's blocks, and the count of what was delivered under
them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np

from kvstore.api import Extent, MatchAnswer, MatchRequest, Progress, TierRun
from kvstore.core.asked import Asked, AskedFor
from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.limits import Limits
from kvstore.core.loads import Load, Loads
from kvstore.core.matching import Found, Item, extents, tier_runs
from kvstore.core.shares import Share
from kvstore.errors import InvalidArgument, LeaseExpired, Overloaded
from kvstore.types import DIGEST_BYTES, HASH_BYTES, LEASE_SECONDS_MAX, MissReason, ReleaseOutcome, Tier

OnProgress = Callable[[Progress], None]
DEADLINES_SLACK = 1024


class Lease:
    """A granted match: its stretches of frames, what of them is still loading, and who listens."""

    def __init__(
        self,
        number: int,
        *,
        state: NamespaceState,
        request: MatchRequest,
        items: list[Item],
        side: list[Item],
        tiers: tuple[TierRun, ...],
        retention_class: str,
        asked: Asked,
        deadline: float,
        table: LeaseTable,
    ) -> None:
        self.number = number
        self.state = state
        self.session = request.session
        self.owner = request.owner
        self.parts = request.parts
        self.blocks = sum(item.count for item in items)
        self.keys = request.keys[: self.blocks * HASH_BYTES]
        self.items = items
        self.side = side
        self.all_items = items + side
        """Stretches of the required parts, then of the side parts."""
        self.tiers = tiers
        self.retention_class = retention_class
        self.asked = asked
        self.deadline = deadline
        self.granted_at = 0.0
        self.limit = self.blocks
        self.reason: MissReason | None = None
        self.boundaries: tuple[int, ...] = ()
        self.waiting = 0
        self.delivered = [0]
        self.listeners: list[OnProgress] = []
        self._table = table

    def arrived(self, load: Load, position: int) -> None:
        """A part of a load came back: pass it on."""
        self._table.tell(self, self._table.arriving(self, load, position))

    def loaded(self, load: Load, good: int, reason: MissReason | None) -> None:
        """A load came back: pass on what is readable now, unless each part was when it came, or shorten the
        lease.
        """
        self.waiting -= 1
        fresh: list[Item] = []
        for item in self.all_items:
            if item.frame is not load.frame:
                continue
            begin = max(item.start, load.start)
            end = min(item.start + item.count, load.start + load.count)
            ready = min(end, load.start + good)
            if ready > begin and len(load.frame.parts) == 1:
                fresh.append(Item(item.frame, begin, ready - begin, item.first + begin - item.start))
            if end > max(begin, ready) and reason is not None:
                self._shorten(item.first + max(begin, ready) - item.start, reason)
        self._table.tell(self, extents(fresh, parts=self.parts, limit=self.limit))

    def _shorten(self, limit: int, reason: MissReason) -> None:
        if limit < self.limit:
            self.limit, self.reason = limit, reason


class LeaseTable:
    """All living leases. Tokens are unguessable numbers handed in by `new_number`; any process may present
    one.
    """

    def __init__(
        self,
        catalog: Catalog,
        loads: Loads,
        limits: Limits,
        asked: AskedFor,
        *,
        new_number: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._loads = loads
        self._limits = limits
        self._asked = asked
        self._new_number = new_number
        self._leases: dict[int, Lease] = {}
        self._owners: dict[tuple[bytes, str], dict[int, Lease]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._share = Share("leases", limit=limits.session_leases_max)

    def frozen(self, state: NamespaceState, request: MatchRequest) -> Lease | None:
        """Return the oldest living lease of the same owner whose blocks start this request: its answer
        stands, unless some of its blocks have left the index since, or are less exact than asked for.
        """
        owned = self._owners.get((state.fingerprint, request.owner), {}) if request.owner else {}
        for lease in owned.values():
            if request.keys.startswith(lease.keys) and not any(
                (request.exact_only and item.frame.provenance)
                or self._catalog.is_gone(item.frame, item.start, item.count)
                for item in lease.items
            ):
                return lease
        return None

    def grant(
        self,
        state: NamespaceState,
        request: MatchRequest,
        found: Found,
        *,
        asked: Asked,
        earlier: Lease | None,
        monotonic: float,
    ) -> Lease:
        """Hold what a match found. Leases that repeat an `earlier` answer were looked up once, and count as
        one delivery.

        Errors: Overloaded at the limit, InvalidArgument on a bad duration.
        """
        if len(self._leases) >= self._limits.leases_max:
            raise Overloaded(f"leases: {len(self._leases)} are held, the limit is {self._limits.leases_max}")
        self._share.check(request.session)
        if request.load:
            self._loads.check(request.session)
        seconds = checked_seconds(request.lease_seconds)
        name = self._catalog.retention.held_by(request.retention_class or self._class_of(found)).name
        lease = Lease(
            self._new_number(),
            state=state,
            request=request,
            items=found.items,
            side=found.side,
            tiers=tier_runs(found.items),
            retention_class=name,
            asked=asked,
            deadline=monotonic + seconds,
            table=self,
        )
        lease.boundaries, lease.reason, lease.granted_at = found.boundaries, found.reason, monotonic
        if earlier is not None:
            lease.delivered = earlier.delivered
        for item in lease.all_items:
            self._catalog.hold(item.frame, item.start + item.count)
        self._leases[lease.number] = lease
        self._share.take(lease.session)
        if len(self._deadlines) > 2 * len(self._leases) + DEADLINES_SLACK:
            self._deadlines = [(other.deadline, number) for number, other in self._leases.items()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (lease.deadline, lease.number))
        if request.owner:
            self._owners.setdefault((state.fingerprint, request.owner), {})[lease.number] = lease
        return lease

    @staticmethod
    def _class_of(found: Found) -> str:
        return found.items[-1].frame.retention_class if found.items else ""

    def load(self, lease: Lease) -> None:
        """Start to bring what is not resident to host, also what was found bad there since."""
        if lease.waiting:
            return
        within = [(item, min(item.count, lease.limit - item.first)) for item in lease.all_items]
        lease.waiting = self._loads.want(
            [(item.frame, item.start, count) for item, count in within if count > 0],
            lease,
            urgent=True,
            session=lease.session,
        )

    def answer(self, lease: Lease, *, monotonic: float) -> MatchAnswer:
        """Return the reply to the match that took this lease."""
        ready = self._is_ready(lease)
        return MatchAnswer(
            blocks=lease.blocks,
            boundaries=lease.boundaries,
            reason=lease.reason,
            lease=lease.number,
            lease_seconds=lease.deadline - monotonic,
            tiers=lease.tiers,
            ready=ready,
            extents=self._readable(lease),
        )

    def _readable(self, lease: Lease) -> tuple[Extent, ...]:
        """Return what lies in host memory, and what has come of loads that are not over."""
        found = extents(lease.all_items, parts=lease.parts, limit=lease.limit)
        if not lease.waiting:
            return found
        for load in {id(one): one for i in lease.all_items for one in i.frame.loads.values()}.values():
            for position in load.results if lease in load.waiters else ():
                found += self.arriving(lease, load, position)
        return found

    def arriving(self, lease: Lease, load: Load, position: int) -> tuple[Extent, ...]:
        """Return where the blocks of a lease lie that one part of a load has brought."""
        part, result = load.frame.parts[position], load.results[position]
        if lease.parts and part.index not in lease.parts:
            return ()
        width = DIGEST_BYTES * len(part.segments)
        found: list[Extent] = []
        for item in lease.all_items:
            begin = max(item.start, load.start) - load.start
            end = min(item.start + min(item.count, lease.limit - item.first) - load.start, result.good)
            if item.frame is load.frame and end > begin:
                slots = load.slots[position][begin:end]
                found.append(
                    Extent(
                        part.index,
                        item.first + load.start + begin - item.start,
                        slots,
                        self._catalog.memory.generations[slots],
                        np.frombuffer(result.lengths, np.uint32)[begin:end],
                        result.digests[begin * width : end * width],
                    )
                )
        return tuple(found)

    @staticmethod
    def _is_ready(lease: Lease) -> bool:
        """Say whether all of it can be read, right after it was granted."""
        return (
            not lease.waiting
            and all(run.tier is Tier.HOST for run in lease.tiers)
            and all(item.frame.resident(item.start, item.count).all() for item in lease.side)
        )

    def watch(self, number: int, on_progress: OnProgress | None) -> Progress:
        """Return all that is readable under a lease now, and promise news to the listener while loads are
        under way.

        Errors: LeaseExpired.
        """
        lease = self.get(number)
        self.load(lease)
        if lease.waiting and on_progress is not None:
            lease.listeners.append(on_progress)
        return Progress(number, self._readable(lease), not lease.waiting, lease.limit, lease.reason)

    def listen(self, lease: Lease, on_progress: OnProgress | None) -> None:
        """Promise news to a listener."""
        if on_progress is not None and lease.waiting:
            lease.listeners.append(on_progress)

    def tell(self, lease: Lease, news: tuple[Extent, ...]) -> None:
        """Send news of a lease to its listeners, once the lock is released."""
        done = not lease.waiting
        if lease.listeners and (news or done):
            progress = Progress(lease.number, news, done, lease.limit, lease.reason)
            for listener in lease.listeners:
                self._catalog.plan.calls.append(_call(listener, progress))
        if done:
            lease.listeners.clear()

    def get(self, number: int) -> Lease:
        """Return a living lease.

        Errors: LeaseExpired.
        """
        lease = self._leases.get(number)
        if lease is None:
            raise ended_lease(number)
        return lease

    def renew(self, number: int, *, lease_seconds: float, monotonic: float) -> bool:
        """Move a lease's deadline; says whether it still lived."""
        lease = self._leases.get(number)
        if lease is None:
            return False
        lease.deadline = max(lease.deadline, monotonic + checked_seconds(lease_seconds))
        return True

    def release(self, number: int, *, used: int, outcome: ReleaseOutcome, monotonic: float) -> bool:
        """End a lease and count what it delivered; a lease that has ended is no error."""
        lease = self._leases.get(number)
        if lease is None:
            return False
        bad, used = used, max(0, min(used, lease.limit))
        if outcome is not ReleaseOutcome.UNUSED:
            self._count(lease, used, monotonic)
        if outcome is ReleaseOutcome.CORRUPT:
            self._reported_corrupt(lease, bad)
        self._end(lease)
        return True

    def _count(self, lease: Lease, used: int, monotonic: float) -> None:
        tokens, start, deepest = lease.state.namespace.block_tokens, 0, Tier.HOST
        lease.asked.delivered = max(lease.asked.delivered or 0, used)
        counted, lease.delivered[0] = lease.delivered[0], max(lease.delivered[0], used)
        for run in lease.tiers:
            blocks = min(start + run.count, used) - max(start, counted)
            start += run.count
            if blocks > 0:
                labels = {"tier": str(run.tier), "class": lease.retention_class}
                self._catalog.events.add("kvstore_hit_tokens_total", blocks * tokens, **labels)
                self._asked.delivered(lease.asked, run.tier, blocks, tokens=tokens, monotonic=monotonic)
                deepest = run.tier if run.tier is not Tier.HOST else deepest
        self._catalog.events.observe("kvstore_fetch_seconds", monotonic - lease.granted_at, tier=str(deepest))

    def _reported_corrupt(self, lease: Lease, block: int) -> None:
        self._catalog.events.add("kvstore_corrupt_total", tier=str(Tier.HOST))
        for item in lease.items:
            if item.first <= block < item.first + item.count:
                self._catalog.distrust(item.frame, item.start + block - item.first)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.number]
        self._share.give(lease.session)
        self._disown(lease)
        self._loads.leave(lease, among=[load for i in lease.all_items for load in i.frame.loads.values()])
        lease.listeners.clear()
        for item in lease.all_items:
            self._catalog.unhold(item.frame, item.start + item.count)

    def _disown(self, lease: Lease) -> None:
        owned = self._owners.get((lease.state.fingerprint, lease.owner))
        if owned is not None:
            owned.pop(lease.number, None)
            if not owned:
                del self._owners[(lease.state.fingerprint, lease.owner)]

    def expire(self, monotonic: float) -> int:
        """End the leases whose deadline has passed; nothing of them is counted as delivered."""
        ended = 0
        while self._deadlines and self._deadlines[0][0] <= monotonic:
            _, number = heapq.heappop(self._deadlines)
            lease = self._leases.get(number)
            if lease is not None and lease.deadline > monotonic:
                heapq.heappush(self._deadlines, (lease.deadline, number))
            elif lease is not None:
                self._tell_expired(lease)
                self._end(lease)
                ended += 1
        if ended:
            self._catalog.events.add("kvstore_leases_expired_total", ended)
        return ended

    def _tell_expired(self, lease: Lease) -> None:
        news = Progress(lease.number, (), True, 0, MissReason.EXPIRED)
        for listener in lease.listeners:
            self._catalog.plan.calls.append(_call(listener, news))

    def end_session(self, session: int) -> None:
        """A client is gone: it holds nothing any more."""
        for lease in [lease for lease in self._leases.values() if lease.session == session]:
            self._end(lease)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)


def ended_lease(number: int) -> LeaseExpired:
    """Return the error of a lease that is not there, or not there for who asks."""
    return LeaseExpired(
        f"lease {number:#x} has ended or never existed; leases live at most {LEASE_SECONDS_MAX:.0f} s"
    )


def checked_seconds(seconds: float) -> float:
    """Return a lease duration clipped to the maximum.

    Errors: InvalidArgument when it is not positive.
    """
    if not seconds > 0:
        raise InvalidArgument(f"lease_seconds must be positive, got {seconds}")
    return min(seconds, LEASE_SECONDS_MAX)


def _call(listener: OnProgress, progress: Progress) -> Callable[[], None]:
    return lambda: listener(progress)
