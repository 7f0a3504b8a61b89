"""The verbs as the wire knows them: message in, ladder called, message out.

Most are quick and run on the event loop; `leaves_loop` names those that do not. None loops over keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.api import NO_SESSION, CommitAnswer, Progress
from kvstore.core.ladder import Ladder
from kvstore.layout import Layout
from kvstore.rpc import wire
from kvstore.rpc.packing import fingerprint_of, keys_of, seconds_of, text_of
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.gate import Gate
from kvstore.types import Fingerprint

LIST_RUNS = 100
OnProgress = Callable[[Progress], None]
OnDurable = Callable[[CommitAnswer], None]
LONG_VERBS = frozenset({"open", "delete", "list"})


def leaves_loop(verb: str, message: Any) -> bool:
    """Say whether a verb is done on a worker: it waits for the disk, hashes tokens or walks a namespace."""
    return verb in LONG_VERBS or (verb == "reserve" and bool(message.token_ids))


class Verbs:
    """One method per verb. Every one asks the gate first; errors of kvstore.errors leave to the caller.

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

    def open(self, message: pb.OpenRequest) -> pb.OpenReply:
        """Open a namespace; a new one is made durable first."""
        self.gate.admit()
        answer = self.ladder.open(wire.open_from_wire(message), root=wire.root_from_wire(message) or b"")
        return wire.open_answer_to_wire(answer, boot_id=self.boot_id)

    def match(
        self,
        message: pb.MatchRequest,
        *,
        session: int = NO_SESSION,
        on_progress: OnProgress | None = None,
    ) -> pb.MatchReply:
        """Do the releases that ride along, then match."""
        for release in message.release:
            self._release(release)
        self.gate.admit()
        request = wire.match_from_wire(message, session=session)
        answer = self.ladder.match(request, on_progress)
        return wire.match_answer_to_wire(
            answer, layout=self.layout_of(request.namespace), boot_id=self.boot_id
        )

    def touch(self, message: pb.TouchRequest) -> pb.TouchReply:
        """Keep a prefix alive."""
        self.gate.admit()
        blocks = self.ladder.touch(
            fingerprint_of(message.namespace, "touch.namespace"),
            keys_of(message.keys, "touch.keys"),
            retention_class=text_of(message.retention_class, "touch.retention_class"),
        )
        return pb.TouchReply(blocks=blocks, boot_id=self.boot_id)

    def prefetch(self, message: pb.PrefetchRequest) -> pb.PrefetchReply:
        """Promote ahead of a fetch."""
        self.gate.admit()
        answer = self.ladder.prefetch(
            fingerprint_of(message.namespace, "prefetch.namespace"),
            keys_of(message.keys, "prefetch.keys"),
            deadline_seconds=seconds_of(message.deadline_seconds, "prefetch.deadline_seconds"),
            retention_class=text_of(message.retention_class, "prefetch.retention_class"),
        )
        return wire.prefetch_answer_to_wire(answer, boot_id=self.boot_id)

    def cancel(self, message: pb.CancelRequest) -> pb.CancelReply:
        """Cancel a prefetch."""
        self.gate.admit_ending()
        return pb.CancelReply(found=self.ladder.cancel(message.prefetch), boot_id=self.boot_id)

    def renew(self, message: pb.RenewRequest) -> pb.RenewReply:
        """Prolong leases."""
        self.gate.admit_ending()
        seconds = seconds_of(message.lease_seconds, "renew.lease_seconds")
        ended = self.ladder.renew(tuple(message.leases), lease_seconds=seconds)
        return pb.RenewReply(ended=ended, boot_id=self.boot_id)

    def release(self, message: pb.ReleaseRequest) -> pb.ReleaseReply:
        """End a lease."""
        self.gate.admit_ending()
        return pb.ReleaseReply(found=self._release(message), boot_id=self.boot_id)

    def delete(self, message: pb.DeleteRequest) -> pb.DeleteReply:
        """Delete blocks and what follows them, or all of a namespace."""
        self.gate.admit()
        namespace = fingerprint_of(message.namespace, "delete.namespace")
        keys = None if message.all else keys_of(message.keys, "delete.keys")
        return pb.DeleteReply(blocks=self.ladder.delete(namespace, keys), boot_id=self.boot_id)

    def list(self, message: pb.ListRequest) -> pb.ListReply:
        """List runs, a page at a time."""
        self.gate.admit()
        answer = self.ladder.list(
            fingerprint_of(message.namespace, "list.namespace"),
            cursor=text_of(message.cursor, "list.cursor"),
            limit=message.limit or LIST_RUNS,
        )
        return wire.list_answer_to_wire(answer, boot_id=self.boot_id)

    def reserve(self, message: pb.ReserveRequest, *, session: int = NO_SESSION) -> pb.ReserveReply:
        """Lend slots to a writer."""
        self.gate.admit()
        request = wire.reserve_from_wire(message, session=session)
        answer = self.ladder.reserve(request)
        return wire.reserve_answer_to_wire(
            answer, layout=self.layout_of(request.namespace), boot_id=self.boot_id
        )

    def commit(self, message: pb.CommitRequest, *, on_durable: OnDurable) -> pb.CommitReply | None:
        """Publish what was written; None when the answer comes through `on_durable`."""
        self.gate.admit_ending()
        answer = self.ladder.commit(wire.commit_from_wire(message), on_durable)
        return None if answer is None else wire.commit_answer_to_wire(answer, boot_id=self.boot_id)

    def abort(self, message: pb.AbortRequest) -> pb.AbortReply:
        """Give a reservation back."""
        self.gate.admit_ending()
        return pb.AbortReply(found=self.ladder.abort(message.reservation), boot_id=self.boot_id)

    def _release(self, message: pb.ReleaseRequest) -> bool:
        release = wire.release_from_wire(message)
        return self.ladder.release(release.lease, used=release.used, outcome=release.outcome)
