"""The byte port of a fake daemon: serves what its streams serve, unless a test tells it otherwise."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.api import Extent, Progress
from kvstore.errors import KVStoreError
from kvstore.rpc import wire
from kvstore.rpc.packets import HEADER_BYTES, Header, Kind, header_of, packet, read_exactly
from kvstore.rpc.v1 import data_pb2 as pb
from tests.unit.client.fake_daemon import FakeDaemon

LIMIT = 1 << 30
SUFFIX = ".port"
"""In place of the daemon's own, so that sessions are left to it: tests let the client know."""
Script = Callable[[socket.socket, Header, bytes], bool]
"""Answers one request; says whether the connection goes on."""


class FakePort:
    """Listens beside a fake daemon's socket. `answer` replaces what is answered, `greeting` the greeting."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.path = Path(f"{daemon.address.removeprefix('unix:')}{SUFFIX}")
        self.answer: Script = self.serve
        self.greeting = packet(Kind.GREETING, pb.Greeting(protocol=1).SerializeToString())
        self.greetings: list[pb.Greeting] = []
        self.requests: list[Kind] = []
        self.connections: list[socket.socket] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.path))
        self._listening.listen(16)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        """End everything."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.path.unlink(missing_ok=True)
        self.hang_up()
        for thread in self._threads:
            thread.join()

    def hang_up(self) -> None:
        """End all connections."""
        for sock in self.connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            self.connections.append(sock)
            self._threads.append(threading.Thread(target=self._work, args=(sock,)))
            self._threads[-1].start()

    def _work(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, KVStoreError):
            _, body = receive(sock)
            self.greetings.append(pb.Greeting.FromString(body))
            sock.sendall(self.greeting)
            while True:
                header, body = receive(sock)
                self.requests.append(header.kind)
                if not self.answer(sock, header, body):
                    return

    def serve(self, sock: socket.socket, header: Header, body: bytes) -> bool:
        """Answer as the daemon would."""
        if header.kind is Kind.FETCH:
            self._fetch(sock, pb.FetchRequest.FromString(body))
        else:
            self._put(sock, pb.PutRequest.Header.FromString(body))
        return True

    def _fetch(self, sock: socket.socket, request: pb.FetchRequest) -> None:
        for reply in self.daemon.Fetch(request, None):
            if reply.WhichOneof("message") == "progress":
                sock.sendall(packet(Kind.PROGRESS, reply.progress.SerializeToString()))
            else:
                piece = reply.chunk
                header = Header(Kind.CHUNK, len(piece.data), piece.part, piece.block, piece.offset)
                sock.sendall(header.pack() + piece.data)
        sock.sendall(packet(Kind.END))

    def _put(self, sock: socket.socket, header: pb.PutRequest.Header) -> None:
        reserved = self.daemon.reserve(header.reserve.keys)
        first = pb.PutReply(outcomes=wire.outcomes_to_wire(reserved.outcomes))
        sock.sendall(packet(Kind.PUT_REPLY, first.SerializeToString()))
        if not reserved.reservation:
            return
        reply = self.daemon.Put(self._put_messages(sock, header), None)
        sock.sendall(packet(Kind.PUT_REPLY, reply.SerializeToString()))

    @staticmethod
    def _put_messages(sock: socket.socket, header: pb.PutRequest.Header) -> Iterator[pb.PutRequest]:
        yield pb.PutRequest(header=header)
        while True:
            head, data = receive(sock)
            if head.kind is not Kind.CHUNK:
                return
            piece = pb.PutRequest.Chunk(part=head.part, block=head.block, offset=head.offset, data=data)
            yield pb.PutRequest(chunk=piece)

    def progress(self, *, done: bool = True, blocks: int = 0, extents: tuple[Extent, ...] = ()) -> bytes:
        """Return a packet of news."""
        event = wire.progress_to_wire(Progress(77, extents, done, blocks), layout=self.daemon.layout)
        return packet(Kind.PROGRESS, event.SerializeToString())


def receive(sock: socket.socket) -> tuple[Header, bytes]:
    """Return the next packet."""
    header = header_of(read_exactly(sock, HEADER_BYTES), limit=LIMIT)
    return header, bytes(read_exactly(sock, header.size))


def error(failure: KVStoreError) -> bytes:
    """Return a packet that tells of an error."""
    return packet(Kind.ERROR, wire.error_to_wire(failure).SerializeToString())
