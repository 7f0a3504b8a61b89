"""LMCache's own server process, spoken to with its own messages over TCP on loopback.

The client here is leaner than the one in LMCache: it sends all requests before it reads the first answer, and
receives into the buffer where the bytes are wanted.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.protocol import ClientCommand, ClientMetaMessage, ServerMetaMessage, ServerReturnCode

from scripts.peers.work import free_port, running, serve

START_SECONDS = 60.0


class LmCache:
    """One message a block, one connection."""

    def __init__(self, port: int) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, names: list[str], source: Any) -> None:
        for name, row in zip(names, source, strict=True):
            self._socket.sendall(_message(ClientCommand.PUT, name, len(row)))
            self._socket.sendall(row)
        if self.look_up(names[-1:]) != 1:  # a put is not answered; this is, behind it
            raise ValueError("the last block is not there")

    def get(self, names: list[str], into: Any) -> None:
        ask = threading.Thread(target=self._ask, args=(ClientCommand.GET, names))
        ask.start()
        for row in into:
            if self._answer().length != len(row):
                raise ValueError("a block is not there")
            self._receive(memoryview(row))
        ask.join()

    def look_up(self, names: list[str]) -> int:
        ask = threading.Thread(target=self._ask, args=(ClientCommand.EXIST, names))
        ask.start()
        found = sum(bool(self._answer().code == ServerReturnCode.SUCCESS) for _ in names)
        ask.join()
        return found

    def _ask(self, command: ClientCommand, names: list[str]) -> None:
        self._socket.sendall(b"".join(_message(command, name, 0) for name in names))

    def _answer(self) -> ServerMetaMessage:
        packed = bytearray(ServerMetaMessage.packlength())
        self._receive(memoryview(packed))
        return ServerMetaMessage.deserialize(bytes(packed))

    def _receive(self, into: memoryview) -> None:
        while into.nbytes:
            came = self._socket.recv_into(into)
            if not came:
                raise ConnectionResetError("the server has gone")
            into = into[came:]


def _message(command: ClientCommand, name: str, length: int) -> bytes:
    key = CacheEngineKey("bench", 1, 0, int(name.rpartition("-")[2]) + 1, torch.uint8)
    shape = torch.Size([length, 0, 0, 0])
    message = ClientMetaMessage(command, key, length, MemoryFormat.BINARY, torch.uint8, shape)
    return bytes(message.serialize())


def main() -> None:
    blocks, block_bytes = map(int, sys.argv[1:3])
    port = free_port()
    with running([sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]):
        serve(LmCache(port), blocks=blocks, block_bytes=block_bytes)


if __name__ == "__main__":
    main()
