"""Mooncake store over TCP: a master, a process that lends memory, and this one, which lends none."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Any

from mooncake.store import MooncakeDistributedStore

from scripts.peers.work import free_port, running, serve

MEMORY_BYTES = 512 << 20
BUFFER_BYTES = 256 << 20
START_SECONDS = 60.0


class Mooncake:
    """Batches of blocks between a registered buffer and the store."""

    def __init__(self, master: str) -> None:
        self._store = connect(master, memory_bytes=0)

    def register(self, into: Any) -> None:
        self._checked(self._store.register_buffer(into.ctypes.data, into.nbytes), "register")

    def put(self, names: list[str], source: Any) -> None:
        if self._is_new(source):
            self.register(source)
        self._store.remove_all()
        self._each(self._store.batch_put_from(names, _addresses(source), _sizes(source)), "put")

    def get(self, names: list[str], into: Any) -> None:
        came = self._store.batch_get_into(names, _addresses(into), _sizes(into))
        if came != _sizes(into):
            raise ValueError(f"get: {sorted(set(came))[:3]}")

    def look_up(self, names: list[str]) -> int:
        return sum(found == 1 for found in self._store.batch_is_exist(names))

    def _is_new(self, source: Any) -> bool:
        known = getattr(self, "_source", None)
        self._source = source.ctypes.data
        return bool(known != self._source)

    @staticmethod
    def _checked(code: int, what: str) -> None:
        if code:
            raise ValueError(f"{what}: code {code}")

    def _each(self, codes: list[int], what: str) -> None:
        self._checked(next((code for code in codes if code), 0), what)


def _addresses(rows: Any) -> list[int]:
    return [rows.ctypes.data + index * rows.strides[0] for index in range(len(rows))]


def _sizes(rows: Any) -> list[int]:
    return [rows.shape[1]] * len(rows)


def connect(master: str, *, memory_bytes: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    end = time.monotonic() + START_SECONDS
    while code := store.setup(
        f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", memory_bytes, BUFFER_BYTES, "tcp", "", master
    ):
        if time.monotonic() > end:
            raise ConnectionError(f"setup: code {code}")
        time.sleep(0.5)
    return store


def lend(master: str) -> None:
    """Lend memory to the store until the input ends."""
    store = connect(master, memory_bytes=MEMORY_BYTES)
    print("lent", flush=True)
    sys.stdin.read()
    store.close()


def main() -> None:
    if sys.argv[1] == "lend":
        lend(sys.argv[2])
        return
    blocks, block_bytes = map(int, sys.argv[1:3])
    port = free_port()
    master = f"127.0.0.1:{port}"
    options = [f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running([os.environ["PEER_PROGRAM"], *options]))
        command = [sys.executable, "-m", "scripts.peers.mooncake_worker", "lend", master]
        lender = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        stack.callback(lender.wait)
        stack.callback(lender.kill)
        assert lender.stdout is not None
        while line := lender.stdout.readline():
            if line.strip().endswith(b"lent"):
                break
        serve(Mooncake(master), blocks=blocks, block_bytes=block_bytes)


if __name__ == "__main__":
    main()
