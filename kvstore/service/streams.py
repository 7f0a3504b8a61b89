"""What carries a session's messages: a gRPC stream, or packets on a plain socket (kvstore.rpc.packets)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

import grpc.aio
from google.protobuf.message import DecodeError

from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.events import Events
from kvstore.rpc.packets import HEADER_BYTES, Header, Kind, header_of, packet
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import error_to_wire
from kvstore.service.parsing import Malformed

UNREAD_MAX = 16
"""Requests that have come and wait for the session; beyond that the socket is not read."""
Context = grpc.aio.ServicerContext[Any, Any]


class Stream(Protocol):
    """The daemon's end of a session."""

    async def read(self) -> object:
        """Return the next request, `Malformed` for what is none, anything else at the end.

        Errors: InvalidArgument when what comes cannot even be told apart.
        """
        ...

    async def write(self, reply: pb.SessionReply) -> None:
        """Send a reply and wait until more may be sent.

        Errors: ConnectionError when the stream is gone.
        """
        ...

    async def refuse(self, error: KVStoreError) -> None:
        """End the stream and say why."""
        ...


def counted_error(error: BaseException, events: Events) -> pb.Error:
    """Return the message of an error that a client is told, and count it."""
    message = error_to_wire(error)
    code = pb.ErrorCode.Name(message.code).removeprefix("ERROR_CODE_").lower()
    events.add("kvstore_rpc_errors_total", code=code)
    return message


def error_packet(error: BaseException, events: Events) -> bytes:
    """Return the packet that tells a client of an error, and count it."""
    return packet(Kind.ERROR, counted_error(error, events).SerializeToString())


class GrpcStream:
    """The stream of the Session method."""

    def __init__(self, context: Context, refuse: Callable[[KVStoreError], Coroutine[Any, Any, Any]]) -> None:
        self.read = context.read
        self._context = context
        self._refuse = refuse

    async def write(self, reply: pb.SessionReply) -> None:
        """Send a reply."""
        try:
            await self._context.write(reply)
        except (grpc.aio.BaseError, grpc.aio.AbortError, asyncio.InvalidStateError) as error:
            raise ConnectionError(f"the stream is gone: {error!r}") from error

    async def refuse(self, error: KVStoreError) -> None:
        """End the call with the status of an error."""
        await self._refuse(error)


class PacketStream(asyncio.Protocol):
    """A plain socket behind its greeting.

    Threads: the event loop.
    """

    def __init__(self, *, message_bytes_max: int, events: Events) -> None:
        self._limit = message_bytes_max
        self._events = events
        self._buffer = bytearray()
        self._arrived: deque[object] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._is_paused = self._is_over = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take what has come apart into requests."""
        self._buffer += data
        try:
            while (header := self._next_header()) is not None:
                self._arrived.append(_request(header, self._take(header.size)))
        except InvalidArgument as error:
            self._arrived.append(error)
            self._is_over = True
            self._transport.pause_reading()
        if len(self._arrived) >= UNREAD_MAX and not self._is_paused and not self._is_over:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def _next_header(self) -> Header | None:
        """Return the header in front if its body has come."""
        if len(self._buffer) < HEADER_BYTES:
            return None
        with memoryview(self._buffer) as view:
            header = header_of(view[:HEADER_BYTES], limit=self._limit)
        return header if len(self._buffer) >= HEADER_BYTES + header.size else None

    def _take(self, size: int) -> bytes:
        end = HEADER_BYTES + size
        with memoryview(self._buffer) as view:
            body = bytes(view[HEADER_BYTES:end])
        del self._buffer[:end]
        return body

    def connection_lost(self, error: Exception | None) -> None:
        """The client closed, or died."""
        self._is_over = True
        self._writable.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def pause_writing(self) -> None:
        """The client does not read as fast as is written."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client has read."""
        self._writable.set()

    async def read(self) -> object:
        """Return the next request, None at the end."""
        if self._arrived:
            await asyncio.sleep(0)  # others have a turn between two requests of this client
        while not self._arrived:
            if self._is_over:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        request = self._arrived.popleft()
        if self._is_paused and not self._arrived:
            self._is_paused = False
            self._transport.resume_reading()
        if isinstance(request, KVStoreError):
            raise request
        return request

    async def write(self, reply: pb.SessionReply) -> None:
        """Send a reply."""
        if self._transport.is_closing():
            raise ConnectionError("the socket is closed")
        self._transport.write(packet(Kind.SESSION, reply.SerializeToString()))
        await self._writable.wait()

    async def refuse(self, error: KVStoreError) -> None:
        """Send an error and close; a client that does not read will not hear of it."""
        self._transport.write(error_packet(error, self._events))
        self.close()

    def close(self) -> None:
        """Close the socket; what the client has not read by now is dropped."""
        if self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()


def _request(header: Header, body: bytes) -> object:
    if header.kind is not Kind.SESSION:
        raise InvalidArgument(f"session: a packet of kind {header.kind.name}, SESSION was expected")
    try:
        return pb.SessionRequest.FromString(body)
    except DecodeError:
        return Malformed(len(body))
