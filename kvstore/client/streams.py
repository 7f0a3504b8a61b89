"""What carries a session to the daemon: a plain unix socket where there is one, else a gRPC stream."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from io import BufferedReader
from typing import Protocol, cast

import grpc
from google.protobuf.message import DecodeError

from kvstore.client.deadline import Deadline
from kvstore.client.dial import Target
from kvstore.errors import DeadlineExceeded, InvalidArgument, TierUnavailable
from kvstore.rpc.channel import MESSAGE_BYTES_MAX
from kvstore.rpc.packets import (
    HEADER_BYTES,
    SOCKET_SUFFIX,
    Kind,
    error_from_body,
    greet,
    header_of,
    packet,
)
from kvstore.rpc.stubs import DataStub
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import error_from_call

READ_BYTES = 256 << 10
MOMENT_SECONDS = 0.001
"""A socket's timeout of 0 would mean not to wait at all."""
Outgoing = pb.SessionRequest | bytes
"""A request, or what of one is still to be sent."""


class Stream(Protocol):
    """The client's end of a session."""

    def send_now(self, request: pb.SessionRequest) -> Outgoing | None:
        """Send a request if that needs no waiting; return what is left to be sent."""
        ...

    def start(self, requests: Iterator[Outgoing]) -> None:
        """Send what an iterator yields, on another thread, until it ends."""
        ...

    def replies(self) -> Iterator[pb.SessionReply]:
        """Yield what the daemon says until it ends the stream.

        Errors: what the daemon says; TierUnavailable.
        """
        ...

    def close(self) -> None:
        """End the stream; `replies` ends soon after. Idempotent."""
        ...

    def leave_to_parent(self) -> None:
        """In a forked child: let go of the stream without ending it."""
        ...


class GrpcStream:
    """The Session method of the daemon's gRPC service."""

    def __init__(self, stub: DataStub, *, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = stub
        self._metadata = metadata

    def send_now(self, request: pb.SessionRequest) -> Outgoing | None:
        """Leave all to gRPC's own thread."""
        return request

    def start(self, requests: Iterator[Outgoing]) -> None:
        """Begin the call."""
        whole = cast(Iterator[pb.SessionRequest], requests)  # `send_now` leaves no rests
        self._call = self._stub.Session(whole, metadata=self._metadata or None)

    def replies(self) -> Iterator[pb.SessionReply]:
        """Yield the call's replies."""
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise error_from_call(error) from error

    def close(self) -> None:
        """Cancel the call."""
        self._call.cancel()

    def leave_to_parent(self) -> None:
        """Touch nothing: the channel's sockets stay open in the child."""


class PacketStream:
    """A plain socket: a request leaves on the thread that makes it.

    Threads: any sends; one reads.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._turn = threading.Lock()

    def send_now(self, request: pb.SessionRequest) -> Outgoing | None:
        """Send a request as far as the socket takes it."""
        if not self._turn.acquire(blocking=False):
            return request
        try:
            data = _packed(request)
            return data[self._socket.send(data, socket.MSG_DONTWAIT) :] or None
        except OSError:  # full, or gone: the sender waits, or hears of it
            return request
        finally:
            self._turn.release()

    def start(self, requests: Iterator[Outgoing]) -> None:
        """Send on a thread of its own what cannot go at once."""
        threading.Thread(target=self._send, args=(requests,), name="kvstore-sender", daemon=True).start()

    def _send(self, requests: Iterator[Outgoing]) -> None:
        # A socket that is gone ends the reader too, which tells everybody.
        with contextlib.suppress(OSError):
            for request in requests:
                data = request if isinstance(request, bytes) else _packed(request)
                with self._turn:
                    self._socket.sendall(data)
            self._socket.shutdown(socket.SHUT_WR)

    def replies(self) -> Iterator[pb.SessionReply]:
        """Yield the bodies of packets."""
        try:
            with self._socket, self._socket.makefile("rb", buffering=READ_BYTES) as file:
                reader = cast(BufferedReader, file)
                while (reply := _reply_from(reader)) is not None:
                    yield reply
        except (OSError, InvalidArgument) as error:
            raise TierUnavailable(f"session: the connection broke: {error}") from error

    def close(self) -> None:
        """Shut the socket; the reading side closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def leave_to_parent(self) -> None:
        """Close this process's descriptor: the daemon hears of the parent's end when it comes."""
        if (number := self._socket.detach()) >= 0:
            os.close(number)


def _packed(request: pb.SessionRequest) -> bytes:
    return packet(Kind.SESSION, request.SerializeToString())


def _reply_from(reader: BufferedReader) -> pb.SessionReply | None:
    head = reader.read(HEADER_BYTES)
    if not head:
        return None
    if len(head) < HEADER_BYTES:
        raise TierUnavailable("session: the daemon broke off in a packet")
    header = header_of(head, limit=MESSAGE_BYTES_MAX)
    body = reader.read(header.size)
    if len(body) < header.size:
        raise TierUnavailable("session: the daemon broke off in a packet")
    if header.kind is Kind.ERROR:
        raise error_from_body(body)
    if header.kind is not Kind.SESSION:
        raise TierUnavailable(f"session: the daemon sent a packet of kind {header.kind.name}")
    try:
        return pb.SessionReply.FromString(body)
    except DecodeError as error:
        raise TierUnavailable(f"session: the daemon sent {len(body)} bytes that are no reply") from error


def dial_plain(target: Target, deadline: Deadline) -> PacketStream | None:
    """Return a greeted plain socket beside the daemon's own, None where there is none.

    Errors: what the daemon refuses the greeting with; DeadlineExceeded, TierUnavailable.
    """
    if not target.is_unix:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.left(), MOMENT_SECONDS))
        try:
            sock.connect(target.path + SOCKET_SUFFIX)
        except (FileNotFoundError, ConnectionRefusedError, PermissionError):
            sock.close()
            return None
        greet(sock, pb.PURPOSE_SESSION, token=target.token)
        sock.settimeout(None)
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"{target.address}: no greeting from the daemon in time") from error
        if isinstance(error, OSError):
            raise TierUnavailable(f"{target.address}: {error}") from error
        raise
    return PacketStream(sock)
