"""framed: payload for clients that do not map the arena, against a plain socket."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

from kvstore.bench import prompt, rows
from kvstore.bench.harness import Bench, timed
from kvstore.bench.prompt import Array, Prompt
from kvstore.bench.rows import Row
from kvstore.cli.connection import Daemon
from kvstore.client import Client, ClientLimits
from kvstore.layout import Layout
from kvstore.namespace import Namespace

PIECE_BYTES, PIECES = 1 << 20, 64
ARENA_BYTES = 192 << 20


def run(bench: Bench) -> Iterator[Row]:
    """Measure the row of the group."""
    layout = Layout.single(dtype="bench", bytes_max=PIECE_BYTES, layers=1, segments=1)
    space = Namespace(model="bench-framed", weights="none", layout=layout, block_tokens=16)
    source = prompt.random_bytes(PIECES, PIECE_BYTES, seed=9)
    into = prompt.warm_buffer(PIECES, PIECE_BYTES)
    token = secrets.token_hex(16)
    tcp = {"server.tcp_address": "127.0.0.1:0", "server.token": token, "server.plaintext_loopback": "true"}
    with bench.daemon(arena_bytes=ARENA_BYTES, settings=tcp) as child, ExitStack() as stack:
        mapped = stack.enter_context(Client(child.address))
        with Daemon(child.address) as daemon:
            address = daemon.status()["tcp_address"]
        limits = ClientLimits(plaintext_on_loopback=True)
        remote = stack.enter_context(Client(address, token=token, limits=limits))
        Prompt.draw(mapped.open(space), PIECES, seed=1).store(source, retention_class=prompt.HOST_ONLY)
        stored = Prompt.draw(remote.open(space), PIECES, seed=1)
        plain = stack.enter_context(closing(Loopback(source)))
        timings = bench.alternate(
            "framed",
            fetch=lambda: timed(lambda: stored.fetch(into, verify=False)),
            socket=lambda: timed(lambda: plain.receive(into)),
        )
    note = f"{PIECES} pieces of 1 MiB, TCP without TLS; digests not checked"
    yield timings.row(rows.FRAMED, "fetch", "socket", note=note)


class Loopback:
    """Sends the rows of an array over TCP to this very process whenever they are asked for."""

    def __init__(self, source: Array) -> None:
        self._source = source
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._receiving = socket.create_connection(server.getsockname())
            self._sending, _ = server.accept()
        self._thread = threading.Thread(target=self._send, name="bench-loopback", daemon=True)
        self._thread.start()

    def receive(self, into: Array) -> None:
        """Ask for everything and put it in place."""
        self._receiving.sendall(b"?")
        for row in into:
            left = memoryview(row)
            while left:
                left = left[self._receiving.recv_into(left) :]

    def close(self) -> None:
        """End the connection and the thread."""
        self._receiving.close()
        self._thread.join()
        self._sending.close()

    def _send(self) -> None:
        while self._sending.recv(1):
            for row in self._source:
                self._sending.sendall(memoryview(row))
