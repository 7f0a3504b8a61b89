"""The event loop's side of the daemon: listeners, health, reflection, the tick, and an end in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.clock import Clock, SystemClock
from kvstore.errors import TierUnavailable
from kvstore.rpc.packets import SOCKET_SUFFIX
from kvstore.rpc.v1 import admin_pb2, admin_pb2_grpc, data_pb2, data_pb2_grpc
from kvstore.service.access import TRUSTED, CallerOf, CallerWith, TokenCallers, trusted
from kvstore.service.admin import AdminServicer
from kvstore.service.byte_listener import ByteListener, bind_byte_port, server_tls
from kvstore.service.byte_port import BytePort
from kvstore.service.framed import Framed
from kvstore.service.gate import Gate, State
from kvstore.service.limits import Budget
from kvstore.service.listen import TokenCheck, bind_plain, bind_tcp, bind_unix, new_server
from kvstore.service.plain_socket import PlainSocket
from kvstore.service.servicer import DataServicer
from kvstore.service.session import Offer, SessionNumbers, Sessions
from kvstore.service.store import Store
from kvstore.service.tokens import Tokens
from kvstore.service.verbs import Verbs
from kvstore.settings import Settings

_log = logging.getLogger(__name__)
WORKERS = 4
"""Threads for framed copies, digests and administration."""
STOP_GRACE_SECONDS = 0.5
SERVICES = (
    data_pb2.DESCRIPTOR.services_by_name["Data"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)


class Fence(NamedTuple):
    """How a listener knows its callers: of a call, of a token on a plain socket; and who passes at all."""

    caller_of: CallerOf
    caller_with: CallerWith
    check: TokenCheck | None


OPEN = Fence(trusted, lambda token, peer: TRUSTED, None)
"""Of a listener that trusts whoever reaches it."""


class Serving:
    """Two listeners over one store: the unix socket, which may offer the mapping, and TCP, which never does.
    Beside the first there is a plain socket for the sessions and the payload of clients that know it,
    beside the other the byte port, for payload.

    Whoever needs a token is fenced in by it (kvstore.service.access), on either.

    Threads: everything but `stop_soon` on the event loop.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        gate: Gate,
        about: Callable[[], dict[str, Any]],
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._gate = gate
        self._about = about
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="kvstore-worker")
        self._numbers = SessionNumbers()
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._plain: PlainSocket | None = None
        self._sockets: list[Path] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock = clock or SystemClock()
        self._tokens: Tokens | None = None
        self._reloading: asyncio.Future[bool] | None = None
        self.budget = Budget("framed puts", bytes_max=settings.server.put_bytes_max)
        self.payload = BytePort(
            self._verbs(),
            generations=store.arena.generations,
            events=store.events,
            budget=self.budget,
            streams_max=settings.server.streams_max,
            idle_seconds=settings.server.stream_idle_seconds,
            message_bytes_max=settings.server.message_bytes_max,
        )
        self._byte_listener: ByteListener | None = None
        self.tcp_address = ""
        self.byte_port = 0

    async def start(self) -> None:
        """Bind and serve; the gate stays shut until `open_gate`.

        Errors: TierUnavailable, SettingsError.
        """
        self._loop = asyncio.get_running_loop()
        self._gate.on_change = self._health_follows
        server = self._settings.server
        await self._set_health(self._gate.state)
        path = self._store.socket
        needs_tokens = bool(server.tcp_address) or server.socket_tokens
        self._tokens = await asyncio.to_thread(Tokens, server) if needs_tokens else None
        fence = self._fence()
        inside = fence if server.socket_tokens else OPEN
        local = new_server(server, check=inside.check)
        sessions = self._add_services(local, self._offer(local=inside is OPEN), inside.caller_of)
        bind_unix(local, path, server)
        self._sockets.append(path)
        self._servers.append(local)
        self._plain = self._bind_plain(path, sessions, inside)
        if server.tcp_address:
            remote = new_server(server, check=fence.check)
            self.tcp_address = bind_tcp(remote, server)
            self._listen_for_payload(fence)
            offer = self._offer(local=False, byte_port=self.byte_port)
            self._add_services(remote, offer, fence.caller_of)
            self._servers.append(remote)
        for each in self._servers:
            await each.start()
        if self._plain is not None:
            self._plain.start()
        if self._byte_listener is not None:
            self._byte_listener.start()

    def _listen_for_payload(self, fence: Fence) -> None:
        """Bind the byte port beside the TCP port, if there is to be one."""
        server = self._settings.server
        if (listening := bind_byte_port(server, self.tcp_address)) is not None:
            self.byte_port = int(listening.getsockname()[1])
            self._byte_listener = ByteListener(
                listening, self.payload, caller_with=fence.caller_with, tls=server_tls(server)
            )

    def _fence(self) -> Fence:
        if self._tokens is None:
            return OPEN
        server = self._settings.server
        callers = TokenCallers(
            self._tokens,
            per_second=server.token_requests_per_second,
            streams_max=server.connection_streams_max,
            clock=self._clock,
            events=self._store.events,
        )
        return Fence(callers.of, callers.with_token, TokenCheck(self._tokens, self._store.events))

    def _bind_plain(self, path: Path, sessions: Sessions, fence: Fence) -> PlainSocket | None:
        """Bind the plain socket beside gRPC's; without it local clients use gRPC for their sessions."""
        place = path.with_name(path.name + SOCKET_SUFFIX)
        try:
            listening = bind_plain(place, self._settings.server)
        except TierUnavailable as error:
            _log.warning("no plain socket, local sessions go over gRPC", extra={"cause": str(error)})
            return None
        self._sockets.append(place)
        return PlainSocket(
            listening,
            sessions,
            self.payload,
            caller_with=fence.caller_with,
            message_bytes_max=self._settings.server.message_bytes_max,
            events=self._store.events,
        )

    def reload_tokens(self) -> None:
        """Read the tokens again, on a thread of its own: files are read."""
        if self._tokens is not None:
            self._reloading = asyncio.ensure_future(asyncio.to_thread(self._tokens.reload))

    def _add_services(self, server: grpc.aio.Server, offer: Offer, caller_of: CallerOf) -> Sessions:
        store, gate, verbs = self._store, self._gate, self._verbs()
        framed = Framed(
            verbs,
            workers=self._workers,
            generations=store.arena.generations,
            events=store.events,
            budget=self.budget,
            idle_seconds=self._settings.server.stream_idle_seconds,
        )
        sessions = Sessions(verbs, offer=offer, numbers=self._numbers, events=store.events)
        data = DataServicer(verbs, framed, sessions=sessions, events=store.events, caller_of=caller_of)
        admin = AdminServicer(
            store.ladder,
            administrator=store.administrator,
            gate=gate,
            events=store.events,
            workers=self._workers,
            boot_id=store.boot_id,
            about=self._about,
        )
        data_pb2_grpc.add_DataServicer_to_server(data, server)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return sessions

    def _verbs(self) -> Verbs:
        return Verbs(self._store.ladder, gate=self._gate, boot_id=self._store.boot_id)

    def _offer(self, *, local: bool, byte_port: int = 0) -> Offer:
        server, store = self._settings.server, self._store
        return Offer(
            arena_path=str(store.arena.path) if local else "",
            arena_bytes=store.arena.size_bytes if local else 0,
            arena_id=store.arena.arena_id if local else 0,
            lock_path=str(store.locks.path) if local else "",
            byte_port=byte_port,
            message_bytes_max=server.message_bytes_max,
            requests_max=server.session_requests_max,
            queue_max=server.session_queue_max,
            hello_seconds=server.stream_idle_seconds,
        )

    def _health_follows(self, state: State) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._set_health(state), self._loop)

    async def _set_health(self, state: State) -> None:
        is_serving = state is State.SERVING
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if is_serving else answer.NOT_SERVING
        for service in ("", *SERVICES):
            await self._health.set(service, status)

    async def stop(self) -> None:
        """End all streams and remove the socket."""
        ends = [server.stop(STOP_GRACE_SECONDS) for server in self._servers]
        if self._plain is not None:
            ends.append(self._plain.stop(STOP_GRACE_SECONDS))
        await asyncio.gather(*ends, asyncio.to_thread(self._stop_payload))
        self.remove_socket()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _stop_payload(self) -> None:
        if self._byte_listener is not None:
            self._byte_listener.stop()
        self.payload.stop(grace_seconds=STOP_GRACE_SECONDS)

    def remove_socket(self) -> None:
        """Remove the socket files that are still there; idempotent."""
        while self._sockets:
            self._sockets.pop().unlink(missing_ok=True)


class Signals:
    """SIGTERM and SIGINT: the first asks for an end in order, the second for one at once. SIGHUP: reload."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.on_hangup: Callable[[], None] = lambda: None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard, number)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def _hung_up(self) -> None:
        _log.info("signal", extra={"signal": "SIGHUP", "pid": os.getpid()})
        self.on_hangup()

    def _heard(self, number: signal.Signals) -> None:
        _log.info("signal", extra={"signal": number.name, "pid": os.getpid()})
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()
