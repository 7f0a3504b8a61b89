"""The verbs of an open namespace, blocking and submitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.api import (
    ListAnswer,
    MatchRequest,
    PartBlocks,
    PartDigests,
    PrefetchAnswer,
    ReserveRequest,
)
from kvstore.client import reading, writing
from kvstore.client.buffers import Buffers, Lengths
from kvstore.client.deadline import Deadline
from kvstore.client.fallback import fall_back, readable
from kvstore.client.recompute import Choice
from kvstore.client.results import Fetched, Match, Put, Reservation
from kvstore.client.ticket import Ticket
from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.hashing import Tokens, block_hashes
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import (
    Release,
    list_answer_from_wire,
    prefetch_answer_from_wire,
)
from kvstore.types import HASH_BYTES, AckTier, BlockHash, Fingerprint, MatchMode, ReleaseOutcome, key_count

if TYPE_CHECKING:
    from kvstore.client.client import Client
    from kvstore.client.link import Link, RootKey

KEYS_MAX = 65536
"""Blocks of one match; the daemon's default limit."""
MATCH_SECONDS = 0.020
FETCH_SECONDS = 2.0
PUT_SECONDS = 5.0
VERB_SECONDS = 1.0
LEASE_SECONDS = 30.0


class OpenNamespace:
    """A namespace of one client, in one tenant's keys (`root`).

    Every verb holds its deadline, also with a hung daemon. What the daemon's absence or load prevents is a
    miss value with a reason; mistakes of the caller's (InvalidArgument, LayoutMismatch) are raised.
    Threads: any.
    """

    def __init__(self, client: Client, namespace: Namespace, root: BlockHash, retention_class: str) -> None:
        self.client = client
        self.namespace = namespace
        self.root = root
        self.retention_class = retention_class
        self.fingerprint: Fingerprint = namespace.fingerprint
        self._key: RootKey = (self.fingerprint, root)

    @property
    def layout(self) -> Layout:
        """The namespace's layout."""
        return self.namespace.layout

    @property
    def siblings(self) -> tuple[str, ...]:
        """What differs from namespaces of the same model, as open said: why hits may be missing."""
        link = self.client.runtime.connection.current
        answer = link.opened.get(self._key) if link else None
        return answer.siblings if answer else ()

    def hashes(
        self,
        tokens: Tokens,
        *,
        parent: BlockHash | None = None,
        extra_keys: Mapping[int, Sequence[bytes]] | None = None,
    ) -> bytes:
        """Return the packed keys of the full blocks of `tokens`, from the root unless a parent is given."""
        size = self.namespace.block_tokens
        return block_hashes(parent or self.root, tokens, block_tokens=size, extra_keys=extra_keys)

    def match(
        self,
        keys: bytes,
        *,
        mode: MatchMode = MatchMode.LEASE,
        owner: str = "",
        retention_class: str = "",
        exact_only: bool = False,
        parts: Sequence[int] = (),
        lease_seconds: float = LEASE_SECONDS,
        load: bool = True,
        deadline_seconds: float = MATCH_SECONDS,
    ) -> Match:
        """Return the longest stored prefix, with a lease on it; a daemon that is gone or hung is a miss.

        An answer that comes too late gives its lease back by itself.
        Of longer prompts the first 65,536 blocks are asked.
        """
        request = self._match_request(
            keys, mode, owner, retention_class, exact_only, tuple(parts), lease_seconds, load
        )
        return reading.match(self, request, self.client.deadline(deadline_seconds))

    def fetch(
        self,
        match: Match,
        into: Buffers,
        *,
        first: int = 0,
        blocks: int | None = None,
        deadline_seconds: float = FETCH_SECONDS,
        verify: bool = True,
    ) -> Fetched:
        """Copy a match's blocks out as they become resident; each is checked right after its copy.

        A block that fails the check ends the result before it, and the daemon is told to drop it.
        With `first` a long match is fetched a window at a time, or behind what the caller has already;
        the result counts from there. The mapped transport copies no more than the window.
        Shapes: row i of a buffer takes block first + i.
        """
        deadline = self.client.deadline(deadline_seconds)
        return reading.fetch(self, match, into, first=first, blocks=blocks, deadline=deadline, verify=verify)

    def worth(self, match: Match, *, block_recompute_seconds: float, first: int = 0) -> Choice:
        """Return how many blocks of a match are worth fetching, given what computing one takes; counted in
        kvstore_client_load_decisions_total. Fetch no more than that, and compute the rest.
        """
        return reading.worth(self, match, first=first, block_recompute_seconds=block_recompute_seconds)

    def release(self, match: Match, *, used: int, outcome: ReleaseOutcome = ReleaseOutcome.USED) -> None:
        """Give a lease back; one-way (it may ride on the next match), and harmless when repeated."""
        reading.release(self, match, Release(match.lease, used, outcome))

    def get(
        self,
        keys: bytes,
        into: Buffers,
        *,
        owner: str = "",
        retention_class: str = "",
        deadline_seconds: float = FETCH_SECONDS,
        verify: bool = True,
    ) -> Fetched:
        """Match, fetch and release in one; `tiers` of the result says where the blocks came from."""
        request = self._match_request(
            keys, MatchMode.LEASE, owner, retention_class, False, (), LEASE_SECONDS, True
        )
        return reading.get(
            self, request, into, deadline=self.client.deadline(deadline_seconds), verify=verify
        )

    def put(
        self,
        parent: BlockHash,
        keys: bytes,
        source: Buffers,
        *,
        retention_class: str = "",
        ack: AckTier = AckTier.HOST,
        put_id: bytes = b"",
        parts: Sequence[PartBlocks] = (),
        provenance: int = 0,
        lengths: Lengths | None = None,
        deadline_seconds: float = PUT_SECONDS,
    ) -> Put:
        """Store blocks that follow `parent`; digests are taken of the source while it is copied.

        Shapes: row 0 of a part's buffer is the first block that `parts` names of it.
        """
        request = self._reserve_request(parent, keys, retention_class, put_id, tuple(parts), provenance)
        deadline = self.client.deadline(deadline_seconds)
        return writing.put(self, request, source, lengths=lengths, ack=ack, deadline=deadline)

    def reserve(
        self,
        parent: BlockHash,
        keys: bytes,
        *,
        retention_class: str = "",
        put_id: bytes = b"",
        parts: Sequence[PartBlocks] = (),
        provenance: int = 0,
        deadline_seconds: float = VERB_SECONDS,
    ) -> Reservation:
        """Ask for slots to write, the first step of a put; mapped transport only."""
        request = self._reserve_request(parent, keys, retention_class, put_id, tuple(parts), provenance)
        return writing.reserve(self, request, self.client.deadline(deadline_seconds))

    def fill(
        self,
        reservation: Reservation,
        source: Buffers,
        *,
        parts: Sequence[PartBlocks] = (),
        lengths: Lengths | None = None,
        deadline_seconds: float = PUT_SECONDS,
    ) -> tuple[PartDigests, ...]:
        """Copy blocks into reserved slots, the second step of a put; returns what commit wants to hear.

        Errors: TierUnavailable when the connection is over, DeadlineExceeded; then abort.
        """
        deadline = self.client.deadline(deadline_seconds)
        return writing.fill(self, reservation, source, parts=parts, lengths=lengths, deadline=deadline)

    def commit(
        self,
        reservation: Reservation,
        digests: Sequence[PartDigests],
        *,
        blocks: int | None = None,
        ack: AckTier = AckTier.HOST,
        deadline_seconds: float = PUT_SECONDS,
    ) -> Put:
        """Publish the first `blocks` blocks (default: all) of a reservation, the last step of a put."""
        deadline = self.client.deadline(deadline_seconds)
        return writing.commit(self, reservation, digests, blocks=blocks, ack=ack, deadline=deadline)

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation back; harmless when repeated."""
        if reservation.reservation and reservation.link is not None:
            reservation.link.abort(reservation.reservation)

    def touch(self, keys: bytes, retention_class: str = "", *, deadline_seconds: float = VERB_SECONDS) -> int:
        """Keep a prefix alive that was served from an engine's own memory; return how many blocks it has."""
        message = pb.TouchRequest(namespace=self.fingerprint, keys=keys, retention_class=retention_class)
        try:
            reply = self._ask(pb.SessionRequest(touch=message), self.client.deadline(deadline_seconds))
        except KVStoreError as error:
            fall_back(error, self.client.events)
            return 0
        return reply.touch.blocks

    def prefetch(self, keys: bytes, *, deadline_seconds: float, retention_class: str = "") -> PrefetchAnswer:
        """Bring a prefix to host ahead of its fetch, within `deadline_seconds`; the answer comes at once."""
        message = pb.PrefetchRequest(
            namespace=self.fingerprint,
            keys=keys,
            deadline_seconds=deadline_seconds,
            retention_class=retention_class,
        )
        try:
            reply = self._ask(pb.SessionRequest(prefetch=message), self.client.deadline(VERB_SECONDS))
            with readable("prefetch"):
                return prefetch_answer_from_wire(reply.prefetch)
        except KVStoreError as error:
            reason = fall_back(error, self.client.events)
            return PrefetchAnswer(prefetch=0, blocks=0, resident=0, loading=0, reason=reason)

    def cancel(self, prefetch: PrefetchAnswer, *, deadline_seconds: float = VERB_SECONDS) -> bool:
        """Stop a prefetch; False when it had ended."""
        message = pb.CancelRequest(prefetch=prefetch.prefetch)
        try:
            reply = self._ask(pb.SessionRequest(cancel=message), self.client.deadline(deadline_seconds))
        except KVStoreError as error:
            fall_back(error, self.client.events)
            return False
        return reply.cancel.found

    def renew(
        self, match: Match, lease_seconds: float = LEASE_SECONDS, *, deadline_seconds: float = VERB_SECONDS
    ) -> bool:
        """Prolong a lease; False when it is over, or nobody could be asked."""
        message = pb.RenewRequest(leases=[match.lease], lease_seconds=lease_seconds)
        try:
            reply = self._ask(pb.SessionRequest(renew=message), self.client.deadline(deadline_seconds))
        except KVStoreError as error:
            fall_back(error, self.client.events)
            return False
        return match.lease not in reply.renew.ended

    def delete(self, keys: bytes | None, *, deadline_seconds: float = PUT_SECONDS) -> int:
        """Delete these blocks and all that follow them, or with None the whole namespace; return how many,
        once no restart can bring them back.

        Errors: TierUnavailable, DeadlineExceeded: who deletes must know that it is not done for good.
        """
        message = pb.DeleteRequest(namespace=self.fingerprint, keys=keys or b"", all=keys is None)
        reply = self._ask(pb.SessionRequest(delete=message), self.client.deadline(deadline_seconds))
        return reply.delete.blocks

    def list(
        self, cursor: str = "", limit: int = 100, *, deadline_seconds: float = PUT_SECONDS
    ) -> ListAnswer:
        """Return one page of runs.

        Errors: TierUnavailable, DeadlineExceeded: an empty page would say that nothing is stored.
        """
        message = pb.ListRequest(namespace=self.fingerprint, cursor=cursor, limit=limit)
        reply = self._ask(pb.SessionRequest(list=message), self.client.deadline(deadline_seconds))
        with readable("list"):
            return list_answer_from_wire(reply.list)

    def submit_match(
        self,
        keys: bytes,
        *,
        mode: MatchMode = MatchMode.LEASE,
        owner: str = "",
        retention_class: str = "",
        exact_only: bool = False,
        parts: Sequence[int] = (),
        lease_seconds: float = LEASE_SECONDS,
        load: bool = True,
        deadline_seconds: float = MATCH_SECONDS,
    ) -> Ticket[Match]:
        """Send a match and return at once."""
        request = self._match_request(
            keys, mode, owner, retention_class, exact_only, tuple(parts), lease_seconds, load
        )
        return reading.submit_match(self, request, self.client.deadline(deadline_seconds))

    def submit_fetch(
        self,
        match: Match,
        into: Buffers,
        *,
        blocks: int | None = None,
        deadline_seconds: float = FETCH_SECONDS,
        verify: bool = True,
    ) -> Ticket[Fetched]:
        """Fetch on a worker thread; the buffers belong to it until the ticket resolves."""
        deadline = self.client.deadline(deadline_seconds)
        return self.client.runtime.submit(
            lambda: reading.fetch(self, match, into, blocks=blocks, deadline=deadline, verify=verify),
            lambda error: Fetched(0, fall_back(error, self.client.events)),
            deadline,
        )

    def submit_get(
        self,
        keys: bytes,
        into: Buffers,
        *,
        owner: str = "",
        retention_class: str = "",
        deadline_seconds: float = FETCH_SECONDS,
        verify: bool = True,
    ) -> Ticket[Fetched]:
        """Get on a worker thread; the buffers belong to it until the ticket resolves."""
        deadline = self.client.deadline(deadline_seconds)
        request = self._match_request(
            keys, MatchMode.LEASE, owner, retention_class, False, (), LEASE_SECONDS, True
        )
        return self.client.runtime.submit(
            lambda: reading.get(self, request, into, deadline=deadline, verify=verify),
            lambda error: Fetched(0, fall_back(error, self.client.events)),
            deadline,
        )

    def submit_put(
        self,
        parent: BlockHash,
        keys: bytes,
        source: Buffers,
        *,
        retention_class: str = "",
        ack: AckTier = AckTier.HOST,
        put_id: bytes = b"",
        parts: Sequence[PartBlocks] = (),
        provenance: int = 0,
        lengths: Lengths | None = None,
        deadline_seconds: float = PUT_SECONDS,
    ) -> Ticket[Put]:
        """Put on a worker thread; the source must not change until the ticket resolves."""
        request = self._reserve_request(parent, keys, retention_class, put_id, tuple(parts), provenance)
        deadline = self.client.deadline(deadline_seconds)
        return self.client.runtime.submit(
            lambda: writing.put(self, request, source, lengths=lengths, ack=ack, deadline=deadline),
            lambda error: Put((), fall_back(error, self.client.events)),
            deadline,
        )

    def link(self, deadline: Deadline) -> Link:
        """Return the live link with this namespace open on it; for the modules of this package.

        Errors: TierUnavailable when the daemon is gone; what it refuses.
        """
        return self.client.runtime.connection.link_with(self._key, deadline)

    def is_open_on(self, link: Link) -> bool:
        """Say whether this namespace is open on a link already."""
        return self._key in link.opened

    def _ask(self, request: pb.SessionRequest, deadline: Deadline) -> pb.SessionReply:
        return self.client.runtime.connection.ask(self.link(deadline), request, deadline)

    def _match_request(
        self,
        keys: bytes,
        mode: MatchMode,
        owner: str,
        retention_class: str,
        exact_only: bool,
        parts: tuple[int, ...],
        lease_seconds: float,
        load: bool,
    ) -> MatchRequest:
        key_count(keys)
        return MatchRequest(
            namespace=self.fingerprint,
            # A prefix of a prefix is a right answer; a request beyond the daemon's limit has none.
            keys=keys[: KEYS_MAX * HASH_BYTES],
            mode=mode,
            owner=owner,
            retention_class=retention_class,
            exact_only=exact_only,
            parts=parts,
            lease_seconds=lease_seconds,
            load=load,
        )

    def _reserve_request(
        self,
        parent: BlockHash,
        keys: bytes,
        retention_class: str,
        put_id: bytes,
        parts: tuple[PartBlocks, ...],
        provenance: int,
    ) -> ReserveRequest:
        if not key_count(keys):
            raise InvalidArgument("put: at least one block is needed, got no keys")
        return ReserveRequest(
            namespace=self.fingerprint,
            parent=parent,
            keys=keys,
            put_id=put_id,
            parts=parts,
            retention_class=retention_class or self.retention_class,
            provenance=provenance,
        )
