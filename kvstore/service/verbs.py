"""The verbs as the wire knows them: message in, ladder called, message out.

Most are quick and run on the event loop; `leaves_loop` names those that do not. None loops over keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.api import NO_SESSION, CommitAnswer, Progress, ReserveRequest
from kvstore.core.ladder import Ladder
from kvstore.core.leases import ended_lease
from kvstore.errors import InvalidArgument, PermissionRefused, TierUnavailable
from kvstore.layout import Layout
from kvstore.rpc import wire
from kvstore.rpc.packing import LEASES_MAX, count_of, fingerprint_of, keys_of, seconds_of, text_of
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.access import TRUSTED, Caller, own_leases
from kvstore.service.class_changes import pause
from kvstore.service.gate import Gate
from kvstore.types import Fingerprint

LIST_RUNS = 100
OnProgress = Callable[[Progress], None]
OnDurable = Callable[[CommitAnswer], None]


@dataclass(frozen=True, slots=True)
class Deleted:
    """How many blocks left, and whether none of them can return."""

    blocks: int
    durable: bool


OnDeleted = Callable[[Deleted], None]
LONG_VERBS = frozenset({"open", "delete", "list"})


def leaves_loop(verb: str, message: Any) -> bool:
    """Say whether a verb is done on a worker: it waits for the disk, hashes tokens or walks a namespace."""
    return verb in LONG_VERBS or (verb == "reserve" and bool(message.token_ids))


class Verbs:
    """One method per verb. Every one asks the gate first, then whether the caller may; errors of
    kvstore.errors leave to the caller.

    Threads: the event loop and worker threads; callbacks arrive on the tiers' threads.
    """

    def __init__(self, ladder: Ladder, *, gate: Gate, boot_id: int) -> None:
        self.ladder = ladder
        self.gate = gate
        self.boot_id = boot_id

    def layout_of(self, fingerprint: bytes) -> Layout:
        """Return the layout of an open namespace.

        Errors: UnknownNamespace.
        """
        return self.ladder.namespace(Fingerprint(fingerprint)).layout

    def _admit(self, caller: Caller) -> None:
        self.gate.admit()
        caller.admit()

    def _admit_ending(self, caller: Caller) -> None:
        self.gate.admit_ending()
        caller.admit(ends_work=True)

    def _namespace(self, value: bytes, field: str, caller: Caller) -> Fingerprint:
        fingerprint = fingerprint_of(value, field)
        caller.may_use(self.ladder, fingerprint)
        return fingerprint

    def open(self, message: pb.OpenRequest, *, caller: Caller = TRUSTED) -> pb.OpenReply:
        """Open a namespace; a new one is made durable first."""
        self._admit(caller)
        namespace = wire.open_from_wire(message)
        caller.may_open(self.ladder, namespace)
        answer = self.ladder.open(namespace, root=wire.root_from_wire(message) or b"")
        return wire.open_answer_to_wire(answer, boot_id=self.boot_id)

    def match(
        self,
        message: pb.MatchRequest,
        *,
        session: int = NO_SESSION,
        on_progress: OnProgress | None = None,
        caller: Caller = TRUSTED,
    ) -> pb.MatchReply:
        """Do the releases that ride along, then match."""
        count_of(message.release, "match.release", limit=LEASES_MAX)
        for release in message.release:
            self._release(release, caller)
        self._admit(caller)
        request = wire.match_from_wire(message, session=session or caller.share)
        caller.may_use(self.ladder, request.namespace)
        answer = self.ladder.match(request, on_progress)
        return wire.match_answer_to_wire(
            answer, layout=self.layout_of(request.namespace), boot_id=self.boot_id
        )

    def touch(self, message: pb.TouchRequest, *, caller: Caller = TRUSTED) -> pb.TouchReply:
        """Keep a prefix alive."""
        self._admit(caller)
        blocks = self.ladder.touch(
            self._namespace(message.namespace, "touch.namespace", caller),
            keys_of(message.keys, "touch.keys"),
            retention_class=text_of(message.retention_class, "touch.retention_class"),
        )
        return pb.TouchReply(blocks=blocks, boot_id=self.boot_id)

    def prefetch(
        self, message: pb.PrefetchRequest, *, session: int = NO_SESSION, caller: Caller = TRUSTED
    ) -> pb.PrefetchReply:
        """Promote ahead of a fetch."""
        self._admit(caller)
        answer = self.ladder.prefetch(
            self._namespace(message.namespace, "prefetch.namespace", caller),
            keys_of(message.keys, "prefetch.keys"),
            deadline_seconds=seconds_of(message.deadline_seconds, "prefetch.deadline_seconds"),
            retention_class=text_of(message.retention_class, "prefetch.retention_class"),
            session=session or caller.share,
        )
        return wire.prefetch_answer_to_wire(answer, boot_id=self.boot_id)

    def cancel(self, message: pb.CancelRequest, *, caller: Caller = TRUSTED) -> pb.CancelReply:
        """Cancel a prefetch."""
        self._admit_ending(caller)
        found = caller.holds_prefetch(self.ladder, message.prefetch) and self.ladder.cancel(message.prefetch)
        return pb.CancelReply(found=found, boot_id=self.boot_id)

    def renew(self, message: pb.RenewRequest, *, caller: Caller = TRUSTED) -> pb.RenewReply:
        """Prolong leases."""
        self._admit_ending(caller)
        seconds = seconds_of(message.lease_seconds, "renew.lease_seconds")
        count_of(message.leases, "renew.leases", limit=LEASES_MAX)
        ours = own_leases(caller, self.ladder, message.leases)
        living = set(ours) - set(self.ladder.renew(ours, lease_seconds=seconds))
        ended = [lease for lease in message.leases if lease not in living]
        return pb.RenewReply(ended=ended, boot_id=self.boot_id)

    def release(self, message: pb.ReleaseRequest, *, caller: Caller = TRUSTED) -> pb.ReleaseReply:
        """End a lease."""
        self._admit_ending(caller)
        return pb.ReleaseReply(found=self._release(message, caller), boot_id=self.boot_id)

    def delete(self, message: pb.DeleteRequest, *, on_deleted: OnDeleted, caller: Caller = TRUSTED) -> None:
        """Delete blocks and what follows them, or all of a namespace; the answer comes when they cannot
        return.
        """
        self._admit(caller)
        namespace = self._namespace(message.namespace, "delete.namespace", caller)
        keys = None if message.all else keys_of(message.keys, "delete.keys")

        def hear(blocks: int, durable: bool) -> None:
            on_deleted(Deleted(blocks, durable))

        self.ladder.delete(namespace, keys, hear, pause=pause)

    def deleted(self, outcome: Deleted) -> pb.DeleteReply:
        """Return the answer to a delete.

        Errors: TierUnavailable when the disk refused, or did not answer in time.
        """
        if not outcome.durable:
            raise TierUnavailable(
                f"delete: {outcome.blocks} blocks are gone, but the disk has not confirmed it: a restart may "
                "bring them back; it is asked again every few seconds, repeat the delete to wait for it"
            )
        return pb.DeleteReply(blocks=outcome.blocks, boot_id=self.boot_id)

    def list(self, message: pb.ListRequest, *, caller: Caller = TRUSTED) -> pb.ListReply:
        """List runs, a page at a time."""
        self._admit(caller)
        answer = self.ladder.list(
            self._namespace(message.namespace, "list.namespace", caller),
            cursor=text_of(message.cursor, "list.cursor"),
            limit=message.limit or LIST_RUNS,
        )
        return wire.list_answer_to_wire(answer, boot_id=self.boot_id)

    def reserve(
        self, message: pb.ReserveRequest, *, session: int = NO_SESSION, caller: Caller = TRUSTED
    ) -> pb.ReserveReply:
        """Lend slots to a writer who says on a session that it lives.

        What a writer without one leaves behind could never be lent again: nobody knows when it is gone.
        """
        self._admit(caller)
        _needs_mapping("reserve", caller)
        if session == NO_SESSION:
            raise InvalidArgument(
                "reserve: needs a session, whose end gives the slots back; got a single call"
            )
        request = wire.reserve_from_wire(message, session=session)
        answer = self.ladder.reserve(request)
        return wire.reserve_answer_to_wire(
            answer, layout=self.layout_of(request.namespace), boot_id=self.boot_id
        )

    def commit(
        self, message: pb.CommitRequest, *, on_durable: OnDurable, caller: Caller = TRUSTED
    ) -> pb.CommitReply | None:
        """Publish what was written; None when the answer comes through `on_durable`."""
        self._admit_ending(caller)
        _needs_mapping("commit", caller)
        answer = self.ladder.commit(wire.commit_from_wire(message), on_durable)
        return None if answer is None else wire.commit_answer_to_wire(answer, boot_id=self.boot_id)

    def abort(self, message: pb.AbortRequest, *, caller: Caller = TRUSTED) -> pb.AbortReply:
        """Give a reservation back."""
        self._admit_ending(caller)
        _needs_mapping("abort", caller)
        return pb.AbortReply(found=self.ladder.abort(message.reservation), boot_id=self.boot_id)

    def admit_put(self, request: ReserveRequest, caller: Caller) -> None:
        """Let in a framed put.

        Errors: PermissionRefused, Overloaded.
        """
        caller.admit()
        caller.may_use(self.ladder, request.namespace)

    def admit_fetch(self, lease: int, caller: Caller) -> None:
        """Let in a framed fetch.

        Errors: LeaseExpired, also for a lease of another tenant; PermissionRefused, Overloaded.
        """
        caller.admit()
        if not caller.holds_lease(self.ladder, lease):
            raise ended_lease(lease)

    def _release(self, message: pb.ReleaseRequest, caller: Caller) -> bool:
        release = wire.release_from_wire(message)
        if not caller.holds_lease(self.ladder, release.lease):
            return False
        return self.ladder.release(release.lease, used=release.used, outcome=release.outcome)


def _needs_mapping(verb: str, caller: Caller) -> None:
    """Keep slots from who cannot write to them: what they commit would be what a slot held before."""
    if not caller.may_map:
        raise PermissionRefused(f"{verb}: for clients that map the arena; use put on this transport")
