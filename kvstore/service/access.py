"""Who calls and what they may reach: the tenant's fence in front of the verbs.

A caller who is fenced in cannot tell what is another tenant's from what is not there: both get one answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc.aio

from kvstore.api import NO_SESSION
from kvstore.clock import Clock
from kvstore.core.ladder import Ladder
from kvstore.errors import LeaseExpired, Overloaded, PermissionRefused, UnknownNamespace
from kvstore.events import Events
from kvstore.namespace import Namespace
from kvstore.service.limits import Bucket, Places
from kvstore.service.tokens import Grant, Role, Tokens, digest_of
from kvstore.types import Fingerprint

_log = logging.getLogger(__name__)
TENANT_NAMESPACES_MAX = 128
STREAMS_SHARE = -(1 << 32)
"""The one share of all framed puts on the unix socket: such a stream does not say whose it is."""
Context = grpc.aio.ServicerContext[Any, Any]


class Caller:
    """One who is trusted with everything: a client on the unix socket.

    Threads: any.
    """

    may_map = True
    withdrawn = False
    """Whether the token turned out to be no longer valid."""
    share = NO_SESSION
    """In whose share counts what is taken outside a session; below 0: that of a token."""

    def admit(self, *, ends_work: bool = False) -> None:
        """Let a request in. Here always."""

    def may_open(self, ladder: Ladder, namespace: Namespace) -> None:
        """Refuse a namespace that is not the caller's."""

    def may_use(self, ladder: Ladder, fingerprint: Fingerprint) -> None:
        """Refuse a namespace that is not open, or not the caller's."""

    def holds_lease(self, ladder: Ladder, lease: int) -> bool:
        """Say whether the caller may speak of a lease: not of another tenant's."""
        return True

    def holds_prefetch(self, ladder: Ladder, prefetch: int) -> bool:
        """Say whether the caller may speak of a prefetch: not of another tenant's."""
        return True

    def stream(self) -> AbstractContextManager[None]:
        """Hold one of the caller's places for framed streams."""
        return nullcontext()


TRUSTED = Caller()


class TokenCaller(Caller):
    """One who presented a token. May not touch slots itself: what a slot held before is not its business."""

    may_map = False

    def __init__(self, grant: Grant, callers: TokenCallers, *, peer: str) -> None:
        self._grant = grant
        self._callers = callers
        self._peer = peer
        self._version = callers.tokens.version
        self._bucket = callers.bucket(grant)
        self.share = callers.share(grant)

    @property
    def _tenant(self) -> str | None:
        """The tenant that fences the caller in; None for an administrator."""
        return None if self._grant.role is Role.ADMIN else self._grant.tenant

    def admit(self, *, ends_work: bool = False) -> None:
        """Let a request in if the token is still valid and within its rate.

        Errors: PermissionRefused, Overloaded.
        """
        tokens = self._callers.tokens
        if self._version != tokens.version:
            self._version, grant = tokens.version, tokens.find(self._grant.digest)
            if grant != self._grant:
                self._version, self.withdrawn = 0, True
                raise PermissionRefused("token: it is no longer valid")
        self._bucket.take(may_refuse=not ends_work)

    def may_open(self, ladder: Ladder, namespace: Namespace) -> None:
        """Refuse a namespace of another tenant, and one too many of one's own: all tenants share the table.

        Errors: PermissionRefused, Overloaded.
        """
        if self._tenant is None:
            return
        if namespace.tenant != self._tenant:
            raise PermissionRefused(f"open: this token is of tenant {self._tenant!r}, not of the namespace's")
        ours = {other.fingerprint for other in ladder.namespaces() if other.tenant == self._tenant}
        if len(ours) >= TENANT_NAMESPACES_MAX and namespace.fingerprint not in ours:
            raise Overloaded(
                f"open: the limit is {TENANT_NAMESPACES_MAX} namespaces of a tenant, got one more"
            )

    def may_use(self, ladder: Ladder, fingerprint: Fingerprint) -> None:
        """Refuse a namespace that is not open, or another tenant's, with the same words.

        Errors: PermissionRefused.
        """
        if self._tenant is None:
            return
        try:
            allowed = ladder.namespace(fingerprint).tenant == self._tenant
        except UnknownNamespace:
            allowed = False
        if not allowed:
            raise PermissionRefused(f"namespace {fingerprint.hex()[:16]}: not open here for this token")

    def holds_lease(self, ladder: Ladder, lease: int) -> bool:
        """Say whether a lease is of the caller's tenant; one that has ended is nobody's and tells nothing."""
        if self._tenant is None:
            return True
        try:
            return ladder.lease_namespace(lease).tenant == self._tenant
        except LeaseExpired:
            return True

    def holds_prefetch(self, ladder: Ladder, prefetch: int) -> bool:
        """Say whether a prefetch is of the caller's tenant, or nobody's any more."""
        return self._tenant is None or ladder.prefetch_tenant(prefetch) in (None, self._tenant)

    def stream(self) -> AbstractContextManager[None]:
        """Hold one of the places that this token has on this connection.

        Errors: Overloaded.
        """
        return self._callers.streams.place((self._grant.digest, self._peer))


class TokenCallers:
    """Makes a caller of each call; what is counted by token is kept here."""

    def __init__(
        self, tokens: Tokens, *, per_second: float, streams_max: int, clock: Clock, events: Events
    ) -> None:
        self.tokens = tokens
        self._events = events
        self.streams = Places("streams of this connection", each_max=streams_max)
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[bytes, Bucket] = {}
        self._shares: dict[bytes, int] = {}

    def bucket(self, grant: Grant) -> Bucket:
        """Return the rate of a token, shared by all its calls; there are as many as tokens in the file."""
        with self._lock:
            if len(self._buckets) > 2 * len(self.tokens):
                self._buckets.clear()
            if grant.digest not in self._buckets:
                self._buckets[grant.digest] = Bucket("token", per_second=self._per_second, clock=self._clock)
            return self._buckets[grant.digest]

    def share(self, grant: Grant) -> int:
        """Return the number of a token's share; it stays with the token."""
        with self._lock:
            return self._shares.setdefault(grant.digest, -1 - len(self._shares))

    def of(self, context: Context) -> Caller:
        """Return who calls.

        Errors: PermissionRefused: the token was withdrawn since the call was let in.
        """
        metadata: Any = context.invocation_metadata()
        grant = self.tokens.of(metadata or ())
        if grant is None:
            raise PermissionRefused("token: it is no longer valid")
        return TokenCaller(grant, self, peer=str(context.peer()))

    def with_token(self, token: str, peer: str) -> Caller:
        """Return who presents a token on a plain socket.

        Errors: PermissionRefused.
        """
        grant = self.tokens.find(digest_of(token.encode()))
        if grant is None:
            self._events.add("kvstore_rpc_refusals_total")
            _log.warning("connection without a valid token", extra={"peer": peer})
            raise PermissionRefused("a valid token is needed on this address")
        return TokenCaller(grant, self, peer=peer)


CallerOf = Callable[[Context], Caller]
CallerWith = Callable[[str, str], Caller]
"""Who presents a token (empty: none) from a peer; raises PermissionRefused."""


def trusted(context: Context) -> Caller:
    """Return the caller of a listener whose clients are trusted."""
    return TRUSTED


def own_leases(caller: Caller, ladder: Ladder, leases: Iterable[int]) -> Sequence[int]:
    """Return those leases that a caller may speak of."""
    return [lease for lease in leases if caller.holds_lease(ladder, lease)]
