"""The put path: reserve slots, take commits, publish what is complete, quarantine what a late writer may
still touch.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from kvstore.api import CommitRequest, OutcomeRun, PartBlocks, ReserveAnswer, ReserveRequest, U32Array
from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.frames import Frame, Node, Slice
from kvstore.core.limits import Limits
from kvstore.core.loose import WHOLE
from kvstore.core.newcomers import Newcomers
from kvstore.core.puts import (
    PendingPut,
    Presence,
    Published,
    PutChecks,
    PutPart,
    Reservation,
    Stretch,
    flat_node,
    frame_of,
    insert_loose,
    outcome_runs,
    reserved_extents,
    reserved_outcomes,
    runs_of,
    write_time,
)
from kvstore.core.quarantine import Quarantine
from kvstore.core.retention import Touch
from kvstore.core.shares import Share
from kvstore.core.writeback import WriteBack
from kvstore.errors import LeaseExpired, Overloaded
from kvstore.tiers.base import FrameKind
from kvstore.types import HASH_BYTES, PART_WAIT_SECONDS, RESERVATION_SECONDS, PutOutcome


class Putting:
    """All puts under way. Guarded by the ladder's lock."""

    def __init__(
        self,
        catalog: Catalog,
        writeback: WriteBack,
        limits: Limits,
        *,
        new_number: Callable[[], int],
        client_alive: Callable[[int], bool],
    ) -> None:
        self._catalog = catalog
        self._writeback = writeback
        self._limits = limits
        self._new_number = new_number
        self._checks = PutChecks(limits)
        self._presence = Presence(catalog)
        self._newcomers = Newcomers(catalog, writeback)
        self._reservations: dict[int, Reservation] = {}
        self._puts: dict[tuple[bytes, bytes], PendingPut] = {}
        self._remembered: OrderedDict[int, Published] = OrderedDict()
        usable = catalog.slabs.usable_pages
        self._count = Share("reservations", limit=limits.session_reservations_max)
        self._pages = Share("reserved pages", limit=int(usable * limits.session_reserved_share))
        self._quarantine = Quarantine(catalog, self._pages, client_alive=client_alive)

    # Reserve

    def reserve(
        self, state: NamespaceState, request: ReserveRequest, *, monotonic: float, now: float
    ) -> ReserveAnswer:
        """Hand out slots for what is absent; what is present is renewed.

        Errors: InvalidArgument, Overloaded, RunsAsleep.
        """
        names = self._checks.names(request)
        pieces = self._checks.reserve(state, request, names)
        self._presence.need(state, request)
        if len(self._reservations) >= self._limits.reservations_max:
            raise Overloaded(
                f"reservations: {len(self._reservations)} are open, "
                f"the limit is {self._limits.reservations_max}"
            )
        self._count.check(request.session)
        self._pages.check(request.session)
        put = self._join_or_start(state, request, names, pieces, monotonic=monotonic, now=now)
        fresh = [self._add_part(put, piece, now=now) for piece in pieces]
        pages = sum(part.mask * np.int64(part.data.part.stride_pages) for part in fresh)
        self._allocate(put, fresh, room=self._pages.leading(request.session, np.asarray(pages)), now=now)
        outcomes = reserved_outcomes(put, fresh)
        if not any(part.mask.any() for part in fresh):
            for part in fresh:
                del put.parts[part.data.part.index]
            self._forget_if_empty(put)
            return ReserveAnswer(reservation=0, outcomes=outcomes)
        return self._grant(put, fresh, request.session, outcomes, monotonic)

    def _join_or_start(
        self,
        state: NamespaceState,
        request: ReserveRequest,
        names: list[bytes],
        pieces: list[PartBlocks],
        *,
        monotonic: float,
        now: float,
    ) -> PendingPut:
        known = self._puts.get((state.fingerprint, request.put_id)) if request.put_id else None
        if known is not None:
            self._checks.joins(known, request, pieces)
            return known
        self._supersede(state, names, monotonic=monotonic)
        held_by = self._catalog.retention.named(request.retention_class).name
        deadline = monotonic + RESERVATION_SECONDS
        put = PendingPut(state, request, names, retention_class=held_by, deadline=deadline)
        above, stretches = self._presence.look(put)
        self._renew(put, above, stretches, now=now)
        return put

    def _supersede(self, state: NamespaceState, names: list[bytes], *, monotonic: float) -> None:
        """Drop the puts of these blocks that wait in vain for a rank: one that lost its connection for a
        moment must not keep the blocks away until the reservation ends.
        """
        if state.pending.keys().isdisjoint(names):
            return
        rivals = {id(put): put for name in names if (put := state.pending.get(name))}
        for put in rivals.values():
            started = put.deadline - RESERVATION_SECONDS
            if not put.writers and monotonic >= started + PART_WAIT_SECONDS:
                self._drop_incomplete(put)

    def _renew(self, put: PendingPut, above: Node | None, stretches: list[Stretch], *, now: float) -> None:
        """Touch what is present, and hold it: the put's own ancestors must not be evicted to make room for
        it.
        """
        state = put.state
        if state.flat:
            nodes = {
                id(n): n
                for i in np.flatnonzero(~put.absent).tolist()
                if (n := flat_node(state, put.names[i]))
            }
            for node in nodes.values():
                self._catalog.touch_path(node, by=put.retention_class, now=now, how=Touch.WRITE)
                self._writeback.enqueue(node)
            return
        last = above if not stretches else None
        if last is not None:
            self._catalog.touch_path(last, by=put.retention_class, now=now, how=Touch.BELOW)
        for _, node, matched in stretches:
            if matched < node.count:
                state.runs.split(node, matched)
            self._catalog.touch_path(node, by=put.retention_class, now=now, how=Touch.WRITE, above=above)
            self._writeback.enqueue(node)
            last = node
        put.above = last
        for item in state.runs.path(last):
            for piece in item.slices:
                end = piece.start + piece.count
                self._catalog.hold(piece.frame, end)
                put.held.append((piece.frame, end))

    def _add_part(self, put: PendingPut, piece: PartBlocks, *, now: float) -> PutPart:
        part = put.state.namespace.layout.parts[piece.part]
        put_part = PutPart(part, self._presence.wanted(put, piece))
        for node in self._presence.side_nodes(put, piece):
            self._catalog.touch_path(node, by=put.retention_class, now=now, how=Touch.WRITE)
            self._writeback.enqueue(node)
        put.parts[piece.part] = put_part
        return put_part

    def _allocate(self, put: PendingPut, fresh: list[PutPart], *, room: int, now: float) -> None:
        for part in fresh:
            places = np.flatnonzero(part.mask[:room])
            slots = self._newcomers.allocate(put, part.data.part, places, now=now)
            part.data.slots[places[: len(slots)]] = slots
            if len(slots) < len(places):
                room = min(room, int(places[len(slots)]))
        for part in fresh:
            surplus = part.data.slots[room:]
            self._catalog.free_slots(surplus[surplus != 0])
            part.data.slots[room:] = 0
            part.mask[room:] = False
            part.data.generations[:] = self._catalog.memory.generations[part.data.slots]

    def _grant(
        self,
        put: PendingPut,
        fresh: list[PutPart],
        session: int,
        outcomes: tuple[OutcomeRun, ...],
        monotonic: float,
    ) -> ReserveAnswer:
        number = self._new_number()
        pages = sum(int(part.mask.sum()) * part.data.part.stride_pages for part in fresh)
        parts = [part.data.part.index for part in fresh]
        reservation = Reservation(number, put, parts, session, put.deadline, pages)
        self._reservations[number] = reservation
        self._count.take(session)
        self._pages.take(session, pages)
        put.put_id = put.put_id or b"#" + number.to_bytes(8, "little")
        self._puts[(put.state.fingerprint, put.put_id)] = put
        put.writers += 1
        required = {part.index for part in put.state.required}
        for part in fresh:
            part.reservation = number
            if part.data.part.index in required:
                registered = list(itertools.compress(put.names, part.mask.tolist()))
                put.registered += registered
                put.state.pending.update(dict.fromkeys(registered, put))
        extents = tuple(extent for part in fresh for extent in reserved_extents(part))
        return ReserveAnswer(
            reservation=number, outcomes=outcomes, extents=extents, seconds=put.deadline - monotonic
        )

    # Commit

    def commit(self, request: CommitRequest, *, now: float) -> Published:
        """Publish a writer's blocks, or note that other parts are still missing. Idempotent.

        Errors: InvalidArgument; LeaseExpired for a reservation that never existed.
        """
        remembered = self._remembered.get(request.reservation)
        if remembered is not None:
            self.abort(request.reservation)
            return remembered
        reservation = self._reservations.get(request.reservation)
        if reservation is None:
            raise LeaseExpired(f"reservation {request.reservation:#x} has ended or never existed")
        self._checks.commit(reservation, request)
        put = reservation.put
        for index in reservation.parts:
            part = put.parts[index]
            part.committed = request.blocks
            surplus = part.data.slots[request.blocks :]
            self._catalog.free_slots(surplus[surplus != 0])
            part.data.slots[request.blocks :] = 0
            part.mask[request.blocks :] = False
        self._over(reservation)
        self._pages.give(reservation.session, reservation.pages)
        put.writers -= 1
        result = self._publish(put, reservation, now=now) if put.complete else self._pending(put, reservation)
        self._remember(reservation.number, result)
        return result

    def _pending(self, put: PendingPut, reservation: Reservation) -> Published:
        return Published(self._final(put, reservation, PutOutcome.PART_PENDING), [])

    def _final(self, put: PendingPut, reservation: Reservation, stored: PutOutcome) -> tuple[OutcomeRun, ...]:
        parts = [put.parts[index] for index in reservation.parts]
        return outcome_runs(
            put.count,
            (PutOutcome.IN_FLIGHT, put.in_flight),
            *((PutOutcome.THROTTLED, part.wanted) for part in parts),
            *((stored, part.mask) for part in parts),
        )

    def _remember(self, number: int, result: Published) -> None:
        self._remembered[number] = result
        while len(self._remembered) > self._limits.remembered_commits_max:
            self._remembered.popitem(last=False)

    # Publish

    def _publish(self, put: PendingPut, reservation: Reservation, *, now: float) -> Published:
        required = tuple(part.index for part in put.state.required)
        nodes: list[Node] = []
        if not put.published and set(required) <= put.parts.keys():
            nodes += self._publish_required(put, required, put.visible_blocks, now=now)
        put.published = True
        for index, part in put.parts.items():
            if index not in required and part.committed is not None:
                nodes += self._publish_side(put, index, part, now=now)
        frames = self._settle_nodes(put, nodes, now=now)
        outcomes = self._final(put, reservation, PutOutcome.STORED_HOST)
        self._count_stored(outcomes)
        # A side part that is committed later is published by itself.
        put.parts = {index: part for index, part in put.parts.items() if part.committed is None}
        self._close(put)
        return Published(outcomes, frames)

    def _count_stored(self, outcomes: tuple[OutcomeRun, ...]) -> None:
        for run in outcomes:
            self._catalog.events.add("kvstore_stored_blocks_total", run.count, outcome=str(run.outcome))

    def _publish_required(
        self, put: PendingPut, required: tuple[int, ...], visible: int, *, now: float
    ) -> list[Node]:
        mask = np.logical_and.reduce([put.parts[index].mask for index in required])
        mask[visible:] = False
        # While no rank held these blocks, another put may have brought them.
        there, _, _ = self._presence.present(put)
        mask &= ~there
        for index in required:
            part = put.parts[index]
            part.wanted &= ~there
            surplus = part.data.slots[part.mask & ~mask]
            self._catalog.free_slots(surplus[surplus != 0])
            part.mask &= mask
        nodes: list[Node] = []
        written_at = write_time(self._catalog, put.state, put.keys, now)
        for first, end in runs_of(mask):
            frame = frame_of(put, required, first, end, kind=FrameKind.MAIN, written_at=written_at)
            if put.state.flat:
                nodes.append(insert_loose(put, frame, WHOLE, now=now))
            else:
                nodes += self._insert_run(put, frame, first, now)
        return nodes

    def _insert_run(self, put: PendingPut, frame: Frame, first: int, now: float) -> list[Node]:
        """Hang a frame into the tree; it lies in several nodes at once when orphans waited for its blocks."""
        runs = put.state.runs
        if first:
            _, stretches = runs.walk_behind(put.parent, put.keys[: first * HASH_BYTES])
            for _, node, matched in stretches[-1:]:
                if matched < node.count:
                    runs.split(node, matched)
        runs.insert(
            frame.parent, [Slice(frame, 0, frame.count)], retention_class=put.retention_class, since=now
        )
        return list(frame.nodes)

    def _publish_side(self, put: PendingPut, index: int, part: PutPart, *, now: float) -> list[Node]:
        nodes = []
        there = self._presence.side_blocks(put, index, part.mask)
        surplus = part.data.slots[there]
        self._catalog.free_slots(surplus[surplus != 0])
        part.mask &= ~there
        written_at = write_time(self._catalog, put.state, put.keys, now)
        for first, end in runs_of(part.mask):
            frame = frame_of(put, (index,), first, end, kind=FrameKind.SIDE, written_at=written_at)
            nodes.append(insert_loose(put, frame, index, now=now))
        return nodes

    def _settle_nodes(self, put: PendingPut, nodes: list[Node], *, now: float) -> list[Frame]:
        waiting: list[Frame] = []
        for node in nodes:
            self._catalog.policy.add(node)
        for node in nodes:
            self._catalog.touch_path(
                node, by=put.retention_class, now=now, how=Touch.WRITE, above=node.parent
            )
            waiting += [frame for frame in self._writeback.enqueue(node) if frame not in waiting]
        for node in nodes:
            if node.count and not node.loose:
                self._catalog.join_path(put.state, node)
        sides = [node for node in nodes if node.slices[0].frame.kind is FrameKind.SIDE]
        bases = self._writeback.bases(put, sides) if sides else []
        return list(dict.fromkeys([*waiting, *bases])) if bases is not None else []

    def _close(self, put: PendingPut) -> None:
        pending = put.state.pending
        for name in put.registered:
            if pending.get(name) is put:  # a later rank of another put may have registered the same block
                del pending[name]
        put.registered.clear()
        if self._puts.get((put.state.fingerprint, put.put_id)) is put:
            del self._puts[(put.state.fingerprint, put.put_id)]
        for frame, end in put.held:
            self._catalog.unhold(frame, end)
        put.held.clear()

    def _forget_if_empty(self, put: PendingPut) -> None:
        if not put.parts and not put.published:
            self._close(put)

    # Give up

    def abort(self, number: int) -> bool:
        """The writer gives up and touches its slots no more: they are free at once, quarantined ones too."""
        if self._quarantine.free(number):
            return True
        reservation = self._reservations.get(number)
        if reservation is None:
            return False
        self._over(reservation)
        self._pages.give(reservation.session, reservation.pages)
        for slots in self._withdraw(reservation):
            self._catalog.free_slots(slots)
        return True

    def _over(self, reservation: Reservation) -> None:
        del self._reservations[reservation.number]
        self._count.give(reservation.session)

    def _withdraw(self, reservation: Reservation) -> list[U32Array]:
        """Take a reservation's parts out of its put and return their slots; a put that misses parts for
        good is dropped.
        """
        put = reservation.put
        put.writers -= 1
        slots = [
            part.data.slots[part.data.slots != 0]
            for i in reservation.parts
            if (part := put.parts.pop(i, None))
        ]
        if not put.published and not put.writers:
            for part in put.parts.values():
                self._catalog.free_slots(part.data.slots[part.data.slots != 0])
            put.parts.clear()
            self._close(put)
        return slots

    def expire(self, *, monotonic: float) -> None:
        """End overdue reservations; their slots wait in quarantine while the client may still write."""
        for reservation in [r for r in self._reservations.values() if r.deadline <= monotonic]:
            self._end(reservation)
        for put in [p for p in self._puts.values() if p.deadline <= monotonic]:
            self._drop_incomplete(put)

    def _drop_incomplete(self, put: PendingPut) -> None:
        """Every writer of a put has committed or gone, and required parts never came: all of it goes."""
        for part in put.parts.values():
            self._catalog.free_slots(part.data.slots[part.data.slots != 0])
        put.parts.clear()
        self._close(put)
        self._catalog.events.add("kvstore_puts_incomplete_total")

    def _end(self, reservation: Reservation) -> None:
        self._over(reservation)
        slots = self._withdraw(reservation)
        self._catalog.events.add("kvstore_reservations_expired_total")
        outcome = (OutcomeRun(PutOutcome.EXPIRED, reservation.put.count),)
        self._remember(reservation.number, Published(outcome, []))
        self._quarantine.put(
            reservation.number, session=reservation.session, slots=slots, pages=reservation.pages
        )

    def end_session(self, session: int) -> None:
        """A client is gone: its reservations end now."""
        for reservation in [r for r in self._reservations.values() if r.session == session]:
            self._end(reservation)
        self.sweep_quarantine()

    def sweep_quarantine(self) -> None:
        """Free the slots of clients that are dead for certain."""
        self._quarantine.sweep()

    @property
    def quarantined_slots(self) -> int:
        """Slots that wait until their writer is certainly gone."""
        return self._quarantine.slots

    def __len__(self) -> int:
        return len(self._reservations)
