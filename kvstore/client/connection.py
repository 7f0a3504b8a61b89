"""Keeps one link to the daemon: connects on first use, then again in the background, namespaces included."""

from __future__ import annotations

import logging
import threading

from kvstore.api import OpenAnswer
from kvstore.client.breaker import Breaker
from kvstore.client.deadline import Deadline
from kvstore.client.dial import Target
from kvstore.client.fallback import BreakerOpen, miss_reason
from kvstore.client.link import Link, RootKey
from kvstore.client.session import OnProgress
from kvstore.clock import Clock
from kvstore.errors import DeadlineExceeded, KVStoreError, TierUnavailable
from kvstore.namespace import Namespace
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import open_answer_from_wire, open_to_wire

_log = logging.getLogger(__name__)


class Connection:
    """What one process has of the daemon, gone or there; a forked child makes its own.

    `namespaces` is the client's own table, read again at every connect.
    Threads: any; one thread of its own connects.
    """

    def __init__(self, target: Target, clock: Clock, namespaces: dict[RootKey, Namespace]) -> None:
        limits = target.limits
        self._target = target
        self._clock = clock
        self.breaker = Breaker(
            clock,
            failures=limits.breaker_failures,
            seconds=limits.breaker_seconds,
            seconds_max=limits.breaker_seconds_max,
        )
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._why_not: KVStoreError = TierUnavailable(f"{target.address}: not connected yet")
        self._attempts = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._namespaces = namespaces

    @property
    def current(self) -> Link | None:
        """The live link, None while there is none."""
        return self._link

    def link(self, deadline: Deadline) -> Link:
        """Return the live link; only the very first attempt to connect is waited for.

        Errors: TierUnavailable when the daemon is gone; what the daemon refused the connection with.
        """
        link = self._link
        if link is not None:
            return link
        with self._changed:
            if self._closed:
                raise TierUnavailable("client: closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-connect", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._link or self._attempts or self._closed, deadline.left())
            if self._link is None:
                # One object for many raisers: without its old traceback, or that grows through an outage.
                raise self._why_not.with_traceback(None)
            return self._link

    def link_with(self, key: RootKey, deadline: Deadline) -> Link:
        """Return the live link with a namespace open on it.

        Errors: as `link`; what the daemon refuses the namespace with.
        """
        link = self.link(deadline)
        if key not in link.opened:
            self.open_on(link, key, deadline)
        return link

    def open_on(self, link: Link, key: RootKey, deadline: Deadline) -> OpenAnswer:
        """Open a known namespace on a link.

        Errors: LayoutMismatch, InvalidArgument and what `ask` raises.
        """
        reply = self.ask(link, self._open_request(key), deadline)
        link.opened[key] = answer = open_answer_from_wire(reply.open)
        return answer

    def ask(
        self,
        link: Link,
        request: pb.SessionRequest,
        deadline: Deadline,
        *,
        on_progress: OnProgress | None = None,
    ) -> pb.SessionReply:
        """Send a request over a link and wait for its reply, through the breaker.

        Errors: BreakerOpen, DeadlineExceeded, TierUnavailable when the session ends, what the daemon says.
        """
        self.admit()
        try:
            reply = link.session.ask(request, deadline.left(), on_progress=on_progress)
        except DeadlineExceeded:
            self.breaker.fail()
            raise
        except KVStoreError:
            self.note(link)
            raise
        self.breaker.succeed()
        return reply

    def admit(self) -> None:
        """Let a request pass the breaker.

        Errors: BreakerOpen.
        """
        if not self.breaker.admit():
            raise BreakerOpen(f"{self._target.address}: the daemon did not answer lately, it is not asked")

    def note(self, link: Link) -> None:
        """Tell the breaker of an outcome that is no passed deadline: an answer, or the session's end."""
        if link.session.end is None:
            self.breaker.succeed()
        else:
            self.breaker.fail()

    def close(self) -> None:
        """Disconnect for good; idempotent."""
        with self._changed:
            self._closed = True
            link, self._link = self._link, None
            self._why_not = TierUnavailable("client: closed")
            self._changed.notify_all()
            thread = self._thread
        if link is not None:
            link.retire()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._target.limits.connect_seconds)

    def _run(self) -> None:
        limits = self._target.limits
        pause = limits.reconnect_seconds
        while not self._closed:
            try:
                link = self._connect()
            except Exception as error:
                self._failed(
                    error
                    if isinstance(error, KVStoreError)
                    else TierUnavailable(f"connecting failed: {error!r}")
                )
                self._rest(pause)
                pause = min(2 * pause, limits.reconnect_seconds_max)
                continue
            self._serve(link)
            pause = limits.reconnect_seconds
            self._rest(pause)

    def _connect(self) -> Link:
        deadline = Deadline(self._clock, self._target.limits.connect_seconds)
        link = Link.dial(self._target, deadline, on_end=self._wake)
        try:
            link.greet(deadline)
            for key in list(self._namespaces):
                self._open_again(link, key, deadline)
        except BaseException:
            link.retire()
            raise
        return link

    def _open_request(self, key: RootKey) -> pb.SessionRequest:
        return pb.SessionRequest(open=open_to_wire(self._namespaces[key], root=key[1]))

    def _open_again(self, link: Link, key: RootKey, deadline: Deadline) -> None:
        try:
            reply = link.session.ask(self._open_request(key), deadline.left())
        except KVStoreError as error:
            if miss_reason(error) is not None:
                raise
            # A refusal concerns this namespace alone: its next verb asks again and raises what it hears.
            model = self._namespaces[key].model
            _log.warning("namespace refused", extra={"model": model, "cause": str(error)})
        else:
            link.opened[key] = open_answer_from_wire(reply.open)

    def _serve(self, link: Link) -> None:
        """Publish a link and stay until it ends."""
        with self._changed:
            self._attempts += 1
            self._link = None if self._closed else link
            self.breaker.succeed()
            self._changed.notify_all()
            _log.info(
                "connected",
                extra={"address": self._target.address, "transport": link.transport, "server": link.server},
            )
            self._changed.wait_for(lambda: self._closed or link.session.end is not None)
            self._link = None
            if not self._closed:
                self._why_not = TierUnavailable(f"{self._target.address}: {link.session.end}")
                _log.warning("connection lost", extra={"cause": str(link.session.end)})
        link.retire()

    def _failed(self, error: KVStoreError) -> None:
        with self._changed:
            told = str(self._why_not)
            if not self._closed:
                self._why_not = _about(self._target.address, error)
            if self._attempts == 0 or str(self._why_not) != told:
                _log.warning("not connected", extra={"cause": str(self._why_not)})
            self._attempts += 1
            self._changed.notify_all()

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _about(address: str, error: KVStoreError) -> KVStoreError:
    """An attempt that failed for the daemon's absence is absence to every verb."""
    if miss_reason(error) is None:
        return error
    return TierUnavailable(f"{address}: {error}")
