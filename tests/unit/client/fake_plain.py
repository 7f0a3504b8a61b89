"""The plain socket of a fake daemon: its sessions as packets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.rpc.packets import GREETING_BYTES_MAX, HEADER_BYTES, Kind, header_of, packet, read_exactly
from kvstore.rpc.status import error_to_wire
from kvstore.rpc.v1 import data_pb2 as pb

BYTES_MAX = 64 << 20
Serve = Callable[[Iterator[pb.SessionRequest], Any], Iterator[pb.SessionReply]]


class GreetedContext:
    """What a session asks of its call: who is there."""

    def __init__(self, token: str) -> None:
        self._token = token

    def invocation_metadata(self) -> list[tuple[str, str]]:
        """Return the token as gRPC would carry it."""
        return [("authorization", f"Bearer {self._token}")] if self._token else []


class FakePlain:
    """Listens at a path and serves every session on a thread of its own."""

    def __init__(self, path: str, serve: Serve) -> None:
        self._serve = serve
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen()
        self._sockets: list[socket.socket] = []
        self.greetings: list[pb.Greeting] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Close everything."""
        for sock in (self._listening, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._listening.accept()
                self._sockets.append(accepted)
                threading.Thread(target=self._talk, args=(accepted,), daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        with suppress(OSError, KVStoreError), sock:
            greeting = pb.Greeting.FromString(read_body(sock, Kind.GREETING, limit=GREETING_BYTES_MAX))
            if greeting.purpose != pb.PURPOSE_SESSION:  # payload has a fake of its own, fake_port
                refusal = error_to_wire(InvalidArgument("greeting: for sessions alone"))
                sock.sendall(packet(Kind.ERROR, refusal.SerializeToString()))
                return
            self.greetings.append(greeting)
            sock.sendall(packet(Kind.GREETING, greeting.SerializeToString()))
            for reply in self._serve(requests_of(sock), GreetedContext(greeting.token)):
                sock.sendall(packet(Kind.SESSION, reply.SerializeToString()))
            sock.shutdown(socket.SHUT_RDWR)


def read_body(sock: socket.socket, kind: Kind, *, limit: int = BYTES_MAX) -> bytes:
    """Return the body of the next packet, which must be of a kind."""
    header = header_of(read_exactly(sock, HEADER_BYTES), limit=limit)
    assert header.kind is kind, header
    return bytes(read_exactly(sock, header.size))


def requests_of(sock: socket.socket) -> Iterator[pb.SessionRequest]:
    """Yield a client's requests until it closes."""
    with suppress(KVStoreError):
        while True:
            yield pb.SessionRequest.FromString(read_body(sock, Kind.SESSION))
