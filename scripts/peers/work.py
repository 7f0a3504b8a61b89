"""What the workers of all peers share: the bytes, the buffers, and the orders that come line by line.

A worker runs in its peer's own environment, with numpy beside it. It answers each order with seconds, or with
`error` and a reason.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str]) -> Iterator[None]:
    """Run a peer's server while the body lasts; what it prints is of no interest."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        server.terminate()
        server.wait()


class Peer(Protocol):
    """A store that holds blocks by name."""

    def put(self, names: list[str], source: Any) -> None:
        """Store one row under each name. Shapes: [blocks, bytes]."""
        ...

    def get(self, names: list[str], into: Any) -> None:
        """Bring the rows into a private buffer that is warm."""
        ...

    def look_up(self, names: list[str]) -> int:
        """Return how many of these names are there."""
        ...


def serve(peer: Peer, *, blocks: int, block_bytes: int) -> None:
    """Obey orders until the input ends: put, get, look_up, and check, which looks at what a get brought."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the peer prints is not an answer
    source = np.random.default_rng(7).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    into = buffer_of(peer, blocks, block_bytes)
    names = [f"block-{number:06d}" for number in range(blocks)]
    answers.write("ready\n")
    for line in sys.stdin:
        try:
            answers.write(f"{_obey(peer, line.strip(), names, source, into):.9f}\n")
        except Exception as error:
            traceback.print_exc()
            answers.write(f"error {type(error).__name__}: {error}\n")


def _obey(peer: Peer, order: str, names: list[str], source: Any, into: Any) -> float:
    if order == "check":
        if not np.array_equal(source, into):
            raise ValueError("other bytes came back than were stored")
        return 0.0
    if order == "get":
        into[:, 0] = ~source[:, 0]  # so that a get that does nothing is found out
    began = time.perf_counter()
    if order == "put":
        peer.put(names, source)
    elif order == "get":
        peer.get(names, into)
    elif (found := peer.look_up(names)) < len(names):
        raise ValueError(f"{found} of {len(names)} blocks found")
    return time.perf_counter() - began


def buffer_of(peer: Peer, blocks: int, block_bytes: int) -> Any:
    """Return a warm private buffer; one that the peer knows where it wants to."""
    into = np.empty((blocks, block_bytes), np.uint8)
    into.fill(1)
    register = getattr(peer, "register", None)
    if register is not None:
        register(into)
    return into
