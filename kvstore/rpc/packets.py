"""Packets: messages and payload on a plain socket beside gRPC, each behind a header of 24 bytes.

A connection begins with one greeting from each end, which says what it is for: a session, whose packets
are the messages of the Session stream, or payload. gRPC takes 0.25 to 0.4 ms for a message and its answer,
several times that beside a copy which empties the caches, and moves 0.3 to 1 GB/s of payload; a plain
socket takes 0.05 to 0.3 ms and moves what a socket can.

Header, little-endian u32 each: kind, size of the body, part, block, offset, 0. The middle three are of
payload.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum
from typing import NamedTuple

from kvstore.errors import InvalidArgument, KVStoreError, TierUnavailable
from kvstore.rpc.channel import PROTOCOL
from kvstore.rpc.status import error_from_wire
from kvstore.rpc.v1 import data_pb2 as pb

HEADER_BYTES = 24
GREETING_BYTES_MAX = 16 << 10
SOCKET_SUFFIX = ".bytes"
"""What the path of the plain unix socket adds to that of gRPC's."""
_HEADER = struct.Struct("<6I")


class Kind(IntEnum):
    """What the body of a packet is."""

    GREETING = 1
    ERROR = 2
    """pb.Error; whoever sends it closes the connection, unless it answers a PUT or a FETCH."""
    SESSION = 3
    """pb.SessionRequest to the daemon, pb.SessionReply from it."""
    FETCH = 4
    """pb.FetchRequest; answered by PROGRESS and CHUNK, and an END or ERROR."""
    PROGRESS = 5
    """pb.ProgressEvent."""
    CHUNK = 6
    """Payload: bytes of one block of one part from an offset on. What a PROGRESS names comes in its order,
    right behind it."""
    PUT = 7
    """pb.PutRequest.Header; answered by ERROR, or a PUT_REPLY with what the reservation came to. If blocks
    of it are RESERVED, their CHUNKs and an END follow, answered by a last PUT_REPLY or ERROR."""
    PUT_REPLY = 8
    """pb.PutReply."""
    END = 9
    """No body."""


_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """What is in front of a body of `size` bytes."""

    kind: Kind
    size: int
    part: int = 0
    block: int = 0
    offset: int = 0

    def pack(self) -> bytes:
        """Return the 24 bytes."""
        return _HEADER.pack(*self, 0)


def header_of(data: bytes | bytearray | memoryview, *, limit: int) -> Header:
    """Return the header in 24 bytes.

    Errors: InvalidArgument on an unknown kind or a body above `limit` bytes: what follows cannot be read.
    """
    kind, size, part, block, offset, _ = _HEADER.unpack(data)
    known = _KINDS.get(kind)
    if known is None:
        raise InvalidArgument(f"packet: kind {kind} is not known")
    if size > limit:
        raise InvalidArgument(f"packet: the limit is {limit} bytes, got {size}")
    return Header(known, size, part, block, offset)


def packet(kind: Kind, body: bytes = b"") -> bytes:
    """Return a packet with a message as its body."""
    return Header(kind, len(body)).pack() + body


def read_exactly(sock: socket.socket, size: int) -> bytearray:
    """Return the next `size` bytes.

    Errors: TierUnavailable when the other end closed; OSError, TimeoutError among them.
    """
    data = bytearray(size)
    read_into(sock, memoryview(data))
    return data


def read_into(sock: socket.socket, target: memoryview) -> None:
    """Fill `target`, a view of bytes.

    Errors: as `read_exactly`.
    """
    while target:
        count = sock.recv_into(target)
        if not count:
            raise TierUnavailable("packets: the other end closed the connection")
        target = target[count:]


def greet(sock: socket.socket, purpose: pb.Purpose, *, token: str = "") -> None:
    """Greet a daemon and hear its greeting, within the socket's timeout.

    Errors: what the daemon says; TierUnavailable; OSError, TimeoutError among them.
    """
    greeting = pb.Greeting(protocol=PROTOCOL, purpose=purpose, token=token)
    sock.sendall(packet(Kind.GREETING, greeting.SerializeToString()))
    try:
        header = header_of(read_exactly(sock, HEADER_BYTES), limit=GREETING_BYTES_MAX)
    except InvalidArgument as error:
        raise TierUnavailable(f"greeting: the daemon's answer cannot be read: {error}") from error
    body = bytes(read_exactly(sock, header.size))
    if header.kind is Kind.ERROR:
        raise error_from_body(body)
    if header.kind is not Kind.GREETING:
        raise TierUnavailable(f"greeting: the daemon answered with a packet of kind {header.kind.name}")


def error_from_body(body: bytes) -> KVStoreError:
    """Return the error in the body of an ERROR packet."""
    return error_from_wire(pb.Error.FromString(body))
