"""The per-process insides of a client: connection, alarms and worker threads. A fork replaces them all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvstore.client import fork
from kvstore.client.alarms import Alarms
from kvstore.client.connection import Connection
from kvstore.client.deadline import Deadline
from kvstore.client.dial import Target
from kvstore.client.link import RootKey
from kvstore.client.ticket import Ticket
from kvstore.clock import Clock
from kvstore.errors import KVStoreError, Overloaded, TierUnavailable
from kvstore.namespace import Namespace

T = TypeVar("T")


class Runtime:
    """Threads and sockets of one process.

    Threads: any.
    """

    def __init__(self, target: Target, clock: Clock, namespaces: dict[RootKey, Namespace]) -> None:
        self.connection = Connection(target, clock, namespaces)
        self.alarms = Alarms(clock)
        self._limits = target.limits
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None
        self._tickets = 0
        self._closed = False

    def submit(
        self, work: Callable[[], T], missed: Callable[[KVStoreError], T], deadline: Deadline
    ) -> Ticket[T]:
        """Run `work` on a worker thread; its ticket resolves to `missed(error)` if none came free in time.

        Once begun, work runs to its own deadline: the caller's buffers are not free before it ends.
        """
        ticket: Ticket[T] = Ticket()
        with self._lock:
            if self._closed or self._tickets >= self._limits.tickets_max:
                full = f"client: {self._limits.tickets_max} tickets are open, the limit"
                error = TierUnavailable("client: closed") if self._closed else Overloaded(full)
                return _resolved(ticket, lambda: missed(error))
            self._tickets += 1
            if self._workers is None:
                self._workers = ThreadPoolExecutor(self._limits.worker_threads, "kvstore-client")
            future = self._workers.submit(ticket.run, work)
        future.add_done_callback(lambda _: self._finished())

        def expire() -> None:
            if future.cancel():
                ticket.run(lambda: missed(deadline.exceeded("no worker thread came free")))

        self.alarms.set(deadline.left(), expire)
        return ticket

    def close(self) -> None:
        """Disconnect, end what is submitted, stop the threads."""
        with self._lock:
            self._closed = True
            workers = self._workers
        self.connection.close()
        self.alarms.close()
        if workers is not None:
            workers.shutdown(wait=True, cancel_futures=True)

    def leave_to_parent(self) -> None:
        """In a forked child: keep the parent's things from being finalised, and its connection from us."""
        fork.keep(self)
        if (link := self.connection.current) is not None:
            link.session.leave_to_parent()

    def _finished(self) -> None:
        with self._lock:
            self._tickets -= 1


def _resolved(ticket: Ticket[T], work: Callable[[], T]) -> Ticket[T]:
    ticket.run(work)
    return ticket
