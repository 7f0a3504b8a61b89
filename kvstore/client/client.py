"""The client: one connection per process, shared by any number of namespaces and threads."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvstore.client import fork
from kvstore.client.deadline import Deadline
from kvstore.client.dial import Target
from kvstore.client.fallback import miss_reason
from kvstore.client.limits import ClientLimits, TlsFiles, Transport
from kvstore.client.link import RootKey
from kvstore.client.namespace import OpenNamespace
from kvstore.client.recompute import TierSpeeds
from kvstore.client.runtime import Runtime
from kvstore.clock import Clock, SystemClock
from kvstore.errors import KVStoreError
from kvstore.events import Events
from kvstore.hashing import chain_root
from kvstore.namespace import Namespace
from kvstore.paths import default_address
from kvstore.retention import DEFAULT_CLASS
from kvstore.rpc.v1 import data_pb2 as pb


class Client:
    """Talks to the daemon of this node, or by TCP to another's.

    Nothing is dialled before first use. A daemon that is gone, hung or restarting makes verbs miss, with a
    reason and a counter (kvstore_client_fallbacks_total); the connection comes back by itself.
    Errors: InvalidArgument on an address, token and TLS files that do not go together.
    Threads: any. A forked child gets a connection of its own (kvstore.client.fork has the limits).
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str = "",
        tls: TlsFiles | None = None,
        transport: Transport = Transport.AUTO,
        limits: ClientLimits | None = None,
        clock: Clock | None = None,
        events: Events | None = None,
    ) -> None:
        self.events = events or Events()
        self.limits = limits or ClientLimits()
        self.clock: Clock = clock or SystemClock()
        self.speeds = TierSpeeds(self.clock)
        self._target = Target(
            address=address or default_address(),
            token=token,
            tls=tls,
            transport=Transport(transport),
            limits=self.limits,
        ).checked()
        self._namespaces: dict[RootKey, Namespace] = {}
        self._runtime = Runtime(self._target, self.clock, self._namespaces)
        fork.watch(self)

    def open(
        self, namespace: Namespace, *, tenant_secret: bytes = b"", retention_class: str = DEFAULT_CLASS
    ) -> OpenNamespace:
        """Open a namespace; with the daemon away it is opened when that comes, and verbs miss until then.

        `retention_class` is what puts use unless told otherwise.
        Errors: InvalidArgument, LayoutMismatch (both sides printed), PermissionRefused.
        """
        namespace.checked()
        root = chain_root(namespace.fingerprint, tenant_secret=tenant_secret)
        key = (namespace.fingerprint, root)
        is_new = key not in self._namespaces
        self._namespaces[key] = namespace
        connection = self._runtime.connection
        deadline = self.deadline(self.limits.open_seconds)
        try:
            connection.open_on(connection.link(deadline), key, deadline)
        except KVStoreError as error:
            if miss_reason(error) is None:
                if is_new:
                    self._namespaces.pop(key, None)
                raise
        return OpenNamespace(self, namespace, root, retention_class)

    def ping(self, deadline_seconds: float = 1.0) -> float:
        """Return the seconds of one round trip.

        Errors: TierUnavailable, DeadlineExceeded, PermissionRefused: a ping has no miss value.
        """
        deadline = self.deadline(deadline_seconds)
        connection = self._runtime.connection
        link = connection.link(deadline)
        start = self.clock.monotonic()
        connection.ask(link, pb.SessionRequest(ping=pb.PingRequest()), deadline)
        return self.clock.monotonic() - start

    @property
    def connected(self) -> bool:
        """Say whether there is a live session; false before first use."""
        return self._runtime.connection.current is not None

    @property
    def boot_id(self) -> int:
        """The run of the daemon that is connected, 0 for none."""
        link = self._runtime.connection.current
        return link.boot_id if link else 0

    @property
    def transport(self) -> Transport:
        """How payload travels now; what was asked for while nothing is connected."""
        link = self._runtime.connection.current
        return link.transport if link else self._target.transport

    @property
    def address(self) -> str:
        """The daemon's address."""
        return self._target.address

    @property
    def runtime(self) -> Runtime:
        """The insides of this process; for the namespaces of this client."""
        return self._runtime

    def deadline(self, seconds: float) -> Deadline:
        """Return a deadline on this client's clock."""
        return Deadline(self.clock, seconds)

    def close(self) -> None:
        """Disconnect; leases and reservations end with the session. Idempotent."""
        self._runtime.close()

    def after_fork(self) -> None:
        """Start afresh in a forked child: fresh locks, threads and connection, on first use."""
        self._runtime.leave_to_parent()
        self._namespaces = dict(self._namespaces)
        self._runtime = Runtime(self._target, self.clock, self._namespaces)
        self.events = Events()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
