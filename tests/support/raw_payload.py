"""A payload connection spoken byte by byte: what a test sends is what arrives."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.rpc import wire
from kvstore.rpc.packets import (
    HEADER_BYTES,
    Header,
    Kind,
    error_from_body,
    greet,
    header_of,
    packet,
    read_exactly,
)
from kvstore.rpc.v1 import data_pb2 as pb

SECONDS = 20.0
"""A wait that no test reaches."""
LIMIT = 1 << 30
Address = str | Path | tuple[str, int]


def connected(address: Address) -> socket.socket:
    """Return a socket that nobody has greeted on."""
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout=SECONDS)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(SECONDS)
        sock.connect(str(address))
    except BaseException:
        sock.close()
        raise
    return sock


def has_ended(sock: socket.socket) -> bool:
    """Wait for the next byte or the end, and say which it is."""
    try:
        return not sock.recv(1)
    except ConnectionResetError:
        return True


class Raw:
    """One greeted connection; a context manager that closes it."""

    def __init__(self, address: Address, *, token: str = "") -> None:
        self.sock = connected(address)
        try:
            greet(self.sock, pb.PURPOSE_PAYLOAD, token=token)
        except BaseException:
            self.sock.close()
            raise

    @classmethod
    def over(cls, sock: socket.socket) -> Self:
        """Return a connection that was greeted by other means."""
        made = cls.__new__(cls)
        made.sock = sock
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a packet."""
        self.sock.sendall(packet(kind, body))

    def chunk(self, data: bytes, *, part: int = 0, block: int = 0, offset: int = 0) -> None:
        """Send a chunk."""
        self.sock.sendall(Header(Kind.CHUNK, len(data), part, block, offset).pack() + data)

    def receive(self) -> tuple[Header, bytes]:
        """Return the next packet.

        Errors: the error in it; TierUnavailable when the connection has ended.
        """
        header = header_of(read_exactly(self.sock, HEADER_BYTES), limit=LIMIT)
        body = bytes(read_exactly(self.sock, header.size))
        if header.kind is Kind.ERROR:
            raise error_from_body(body)
        return header, body

    def has_ended(self) -> bool:
        """Wait for the next byte or the end, and say which it is."""
        return has_ended(self.sock)

    def begin_put(self, header: pb.PutRequest) -> pb.PutReply:
        """Send a put's header and return the first answer."""
        self.send(Kind.PUT, header.header.SerializeToString())
        return self.put_reply()

    def put_reply(self) -> pb.PutReply:
        """Return the answer to a put."""
        header, body = self.receive()
        assert header.kind is Kind.PUT_REPLY
        return pb.PutReply.FromString(body)

    def put(self, requests: Iterable[pb.PutRequest]) -> pb.PutReply:
        """Send what a framed put of gRPC sends, if it is wanted; return the last answer."""
        messages = iter(requests)
        reply = self.begin_put(next(messages))
        if not any(run.outcome == pb.PUT_OUTCOME_RESERVED for run in reply.outcomes):
            return reply
        for message in messages:
            piece = message.chunk
            self.chunk(piece.data, part=piece.part, block=piece.block, offset=piece.offset)
        self.send(Kind.END)
        return self.put_reply()

    def begin_fetch(self, lease: int, *, payload: bool = True) -> None:
        """Ask for what a lease covers."""
        self.send(Kind.FETCH, pb.FetchRequest(lease=lease, payload=payload).SerializeToString())

    def fetch(self, lease: int) -> dict[int, bytes]:
        """Return the blocks of a lease."""
        self.begin_fetch(lease)
        return self.blocks()

    def blocks(self) -> dict[int, bytes]:
        """Receive the answer to a fetch."""
        found: dict[int, bytes] = {}
        while True:
            header, body = self.receive()
            if header.kind is Kind.END:
                return found
            if header.kind is Kind.CHUNK:
                found[header.block] = found.get(header.block, b"") + body


def outcomes(reply: pb.PutReply) -> list[tuple[str, int]]:
    """Return the outcomes of a put."""
    return [(run.outcome.value, run.count) for run in wire.outcomes_from_wire(reply.outcomes)]
