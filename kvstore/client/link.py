"""One live connection: the session, what hello granted, the mapped arena and the client's lock."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvstore import __version__
from kvstore.api import OpenAnswer
from kvstore.arena import Arena
from kvstore.client.deadline import Deadline
from kvstore.client.dial import Target
from kvstore.client.limits import Transport
from kvstore.client.payload import Payload
from kvstore.client.session import Outcome, Session
from kvstore.client.streams import GrpcStream, PacketStream, dial_plain
from kvstore.errors import KVStoreError, PermissionRefused, TierUnavailable
from kvstore.locks import ClientLock
from kvstore.rpc.channel import PROTOCOL
from kvstore.rpc.stubs import DataStub, data_stub
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import Release, release_to_wire
from kvstore.types import BlockHash, Fingerprint, ReleaseOutcome

_log = logging.getLogger(__name__)

_PROCESS = os.urandom(4).hex()
"""Tells processes of several containers apart: their ids repeat. The daemon is fair between processes."""
RootKey = tuple[Fingerprint, BlockHash]
"""A namespace as one tenant sees it: different secrets share the fingerprint, not the chain root."""


class Link:
    """A connection from hello to its end. After a restart of the daemon there is another one.

    Whoever copies to or from the arena does so inside `use`: the mapping and the lock outlive the session
    until the last copy is done, so that a slot is never given away under a late writer.
    Threads: any.
    """

    def __init__(self, target: Target, *, plain: PacketStream | None, on_end: Callable[[], None]) -> None:
        self._target = target
        self.copy_threads = target.limits.copy_threads
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self._arena: Arena | None = None
        self._writable: Arena | None = None
        self._client_lock: ClientLock | None = None
        self.opened: dict[RootKey, OpenAnswer] = {}
        self.transport = Transport.FRAMED
        self.server = ""
        self.payload = Payload(target)
        self._channel: grpc.Channel | None = None
        self._stub: DataStub | None = None
        self.session = Session(
            plain or GrpcStream(self.stub(), metadata=target.metadata),
            requests_max=target.limits.requests_max,
            on_orphan=self._give_back,
            on_end=on_end,
        )

    @staticmethod
    def dial(target: Target, deadline: Deadline, *, on_end: Callable[[], None]) -> Link:
        """Return a link whose session takes the plain socket where there is one.

        Errors: what the daemon refuses the connection with; DeadlineExceeded, TierUnavailable.
        """
        return Link(target, plain=dial_plain(target, deadline), on_end=on_end)

    def stub(self) -> DataStub:
        """Return the gRPC service, for what does not go over the session; its channel is made on first use.

        Errors: TierUnavailable when the link is over; InvalidArgument when a TLS file cannot be read.
        """
        with self._lock:
            if self._retired:
                raise TierUnavailable("link: the connection this came from is over")
            if self._stub is None:
                self._channel = self._target.channel()
                self._stub = data_stub(self._channel)
            return self._stub

    def greet(self, deadline: Deadline) -> None:
        """Say hello, map the arena if it is offered and wanted, and lock this client's byte.

        Errors: DeadlineExceeded, TierUnavailable, PermissionRefused, InvalidArgument on another protocol.
        """
        wants = self._target.is_unix and self._target.transport is not Transport.FRAMED
        name = f"kvstore-client {__version__} pid={os.getpid()} process={_PROCESS}"
        hello = pb.HelloRequest(protocol=PROTOCOL, client=name, want_mapping=wants)
        reply = self.session.ask(pb.SessionRequest(hello=hello), deadline.left())
        if reply.hello.protocol != PROTOCOL:
            raise TierUnavailable(
                f"hello: this client speaks protocol {PROTOCOL}, the daemon answered {reply.hello.protocol}"
            )
        self.session.boot_id = reply.boot_id
        self.server = reply.hello.server
        self.payload.offer(reply.hello.byte_port)
        if reply.hello.arena_path and wants:
            self._map(reply.hello)
        elif self._target.transport is Transport.MAPPED:
            raise PermissionRefused(f"{self._target.address}: the daemon offers no mapping on this transport")

    def _map(self, hello: pb.HelloReply) -> None:
        try:
            self._arena = Arena.map(hello.arena_path, expected_id=hello.arena_id)
            self._client_lock = ClientLock.hold(hello.lock_path, hello.session)
            self.transport = Transport.MAPPED
        except TierUnavailable as error:
            self._close_mapping()
            if self._target.transport is Transport.MAPPED:
                raise
            _log.warning("arena not mapped, payload goes through framed streams", extra={"cause": str(error)})

    @property
    def boot_id(self) -> int:
        """Which run of the daemon this is."""
        return self.session.boot_id

    @property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """The metadata of calls beside the session."""
        return self._target.metadata or None

    def invoke(self, method: Callable[..., Any], request: object, *, deadline: Deadline) -> Any:
        """Begin a call beside the session.

        Errors: TierUnavailable when the link is over; what goes wrong later is the call's own.
        """
        try:
            return method(request, timeout=deadline.left(), metadata=self.metadata)
        except ValueError as error:
            # What gRPC raises on a channel that was closed a moment ago.
            raise TierUnavailable(f"link: the connection is over: {error}") from error

    @contextlib.contextmanager
    def use(self) -> Iterator[Link]:
        """Keep the mapping and the lock for as long as a copy takes.

        Errors: TierUnavailable when the link is over.
        """
        with self._lock:
            if self._retired:
                raise TierUnavailable("link: the connection this came from is over")
            self._users += 1
        try:
            yield self
        finally:
            if self._leave():
                self._close_mapping()

    def _leave(self) -> bool:
        with self._lock:
            self._users -= 1
            return self._retired and not self._users

    def arena(self) -> Arena:
        """Return the arena, mapped read-only.

        Errors: TierUnavailable when there is none.
        """
        if self._arena is None:
            raise TierUnavailable("link: the arena is not mapped")
        return self._arena

    def writable_arena(self) -> Arena:
        """Return the arena, mapped writable on first use: who only reads never could write.

        Errors: TierUnavailable when the file does not let this user write.
        """
        arena = self.arena()
        with self._lock:
            if self._writable is None:
                self._writable = Arena.map(arena.path, expected_id=arena.arena_id, writable=True)
            return self._writable

    def release(self, release: Release) -> None:
        """Give a lease back, one-way."""
        self.session.release(release_to_wire(release))

    def abort(self, reservation: int) -> None:
        """Give a reservation back, without waiting for the answer."""
        request = pb.SessionRequest(abort=pb.AbortRequest(reservation=reservation))
        # A session that is over has given it back already.
        with contextlib.suppress(KVStoreError):
            self.session.submit(request, _ignore)

    def retire(self) -> None:
        """End the session, close the channel and let the mapping go with its last user."""
        with self._lock:
            if self._retired:
                return
            self._retired = True
            is_last = not self._users
        self.payload.close()
        self.session.close()
        if self._channel is not None:
            self._channel.close()
        if is_last:
            self._close_mapping()

    def _close_mapping(self) -> None:
        for arena in (self._arena, self._writable):
            if arena is not None:
                arena.close()
        if self._client_lock is not None:
            self._client_lock.release()

    def _give_back(self, reply: pb.SessionReply) -> None:
        """A reply that came after its deadline: what it grants goes back at once."""
        kind = reply.WhichOneof("answer")
        if kind == "match" and reply.match.lease:
            self.release(Release(reply.match.lease, 0, ReleaseOutcome.UNUSED))
        elif kind == "reserve" and reply.reserve.reservation:
            self.abort(reply.reserve.reservation)


def _ignore(outcome: Outcome) -> None:
    pass
