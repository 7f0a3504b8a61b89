"""Redis through redis-py with the hiredis parser, over a unix socket; nothing is written to disk."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import redis

from scripts.peers.work import running, serve

START_SECONDS = 20.0


class Redis:
    """One SET or GET a block, all of them in one round trip."""

    def __init__(self, socket: Path) -> None:
        self._redis = redis.Redis(unix_socket_path=str(socket))
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                self._redis.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def put(self, names: list[str], source: Any) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for name, row in zip(names, source, strict=True):
                pipe.set(name, memoryview(row))
            pipe.execute()

    def get(self, names: list[str], into: Any) -> None:
        for row, value in zip(into, self._redis.mget(names), strict=True):
            np.copyto(row, np.frombuffer(value, np.uint8))

    def look_up(self, names: list[str]) -> int:
        return int(self._redis.exists(*names))


def main() -> None:
    blocks, block_bytes = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "redis.sock")
        options = ["--port", "0", "--unixsocket", str(socket), "--dir", folder]
        options += ["--save", "", "--appendonly", "no"]
        with running([os.environ["PEER_PROGRAM"], *options]):
            serve(Redis(socket), blocks=blocks, block_bytes=block_bytes)


if __name__ == "__main__":
    main()
