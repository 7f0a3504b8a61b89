"""The plain unix socket beside gRPC's: connections say in their greeting what they are for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from kvstore.errors import InvalidArgument, KVStoreError, Overloaded
from kvstore.events import Events
from kvstore.rpc.packets import GREETING_BYTES_MAX, HEADER_BYTES, header_of
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.access import Caller, CallerWith
from kvstore.service.byte_port import BytePort
from kvstore.service.greetings import greeting_back, greeting_in
from kvstore.service.session import Sessions
from kvstore.service.streams import PacketStream, error_packet

_log = logging.getLogger(__name__)
GREETING_SECONDS = 10.0
GREETINGS_MAX = 256
"""Connections that have not said yet what they want."""
ACCEPT_PAUSE_SECONDS = 0.1
PEER = "unix"
"""Who holds streams for payload: each of those has a connection of its own, so they count together."""


class PlainSocket:
    """Accepts, greets, and hands over: sessions stay on the loop, payload goes to threads.

    Threads: the event loop.
    """

    def __init__(
        self,
        listening: socket.socket,
        sessions: Sessions,
        payload: BytePort,
        *,
        caller_with: CallerWith,
        message_bytes_max: int,
        events: Events,
    ) -> None:
        self._listening = listening
        self._sessions = sessions
        self._payload = payload
        self._caller_with = caller_with
        self._limit = message_bytes_max
        self._events = events
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._greeting = 0

    def start(self) -> None:
        """Accept from now on."""
        self._accepting = self._begin(self._accept())

    async def stop(self, grace_seconds: float) -> None:
        """Accept no more, and end what still runs after a while; also before `start`."""
        if self._accepting is not None:
            self._accepting.cancel()
        self._listening.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # no descriptor left: others will be closed
                _log.warning("a connection was not accepted", extra={"error": str(error)})
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            accepted.setblocking(False)
            self._begin(self._welcome(accepted))

    async def _welcome(self, accepted: socket.socket) -> None:
        with ExitStack() as stack:
            stack.callback(accepted.close)
            try:
                purpose, caller = await self._greeted(accepted)
            except KVStoreError as error:
                refusal = error_packet(error, self._events)
                with suppress(OSError):  # nobody there to hear it
                    accepted.send(refusal)
                return
            except OSError as error:  # TimeoutError among them
                _log.debug("no greeting", extra={"error": repr(error)})
                return
            stack.pop_all()  # who serves it closes it
        if purpose == pb.PURPOSE_PAYLOAD:
            self._payload.serve(accepted, caller, peer=PEER)
        else:
            await self._serve(accepted, caller)

    async def _greeted(self, accepted: socket.socket) -> tuple[pb.Purpose, Caller]:
        """Exchange greetings; return what the connection is for, and whose it is.

        Errors: InvalidArgument, PermissionRefused, Overloaded; OSError, TimeoutError among them.
        """
        if self._greeting >= GREETINGS_MAX:
            raise Overloaded(f"greeting: the limit is {GREETINGS_MAX} connections before it, got one more")
        self._greeting += 1
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                greeting = await _greeting_of(accepted)
                if greeting.purpose not in (pb.PURPOSE_SESSION, pb.PURPOSE_PAYLOAD):
                    raise InvalidArgument(f"greeting: purpose {greeting.purpose} is not served here")
                is_session = greeting.purpose == pb.PURPOSE_SESSION
                peer = f"{PEER}:{next(self._numbers)}" if is_session else PEER
                caller = self._caller_with(greeting.token, peer)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(accepted, greeting_back(greeting.purpose))
                return greeting.purpose, caller
        finally:
            self._greeting -= 1

    async def _serve(self, accepted: socket.socket, caller: Caller) -> None:
        make = partial(PacketStream, message_bytes_max=self._limit, events=self._events)
        _, stream = await asyncio.get_running_loop().connect_accepted_socket(make, accepted)
        try:
            await self._sessions.serve(stream, lambda: caller)
        except Exception:
            _log.exception("session failed")
        finally:
            stream.close()


async def _greeting_of(accepted: socket.socket) -> pb.Greeting:
    header = header_of(await _read(accepted, HEADER_BYTES), limit=GREETING_BYTES_MAX)
    return greeting_in(header, await _read(accepted, header.size))


async def _read(accepted: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(accepted, size - len(data))
        if not more:
            raise ConnectionResetError("closed before its greeting")
        data += more
    return data
