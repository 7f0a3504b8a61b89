"""One client process of the storm: random verbs from several threads; checks every byte it gets."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvstore.client import Client, OpenNamespace, Transport
from kvstore.copying import Bytes
from kvstore.errors import DeadlineExceeded, ShuttingDown, TierUnavailable
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.types import HASH_BYTES, AckTier

BYTES = 20_000
LAYOUT = Layout.single(dtype="u8", bytes_max=BYTES, layers=4, segments=4)
NAMESPACE = Namespace(model="storm", weights="v1", layout=LAYOUT, block_tokens=16)
BLOCKS = 30
PROMPTS = 10
SLACK_SECONDS = 5.0
"""What a deadline may be missed by on a machine that does many things at once."""


def block(key: bytes) -> Bytes:
    """Return the bytes that belong to a key."""
    return np.random.default_rng(int.from_bytes(key[:8], "little")).integers(0, 256, BYTES, dtype=np.uint8)


def blocks_of(keys: bytes) -> list[Bytes]:
    """Return the bytes that belong to packed keys."""
    return [block(keys[i : i + HASH_BYTES]) for i in range(0, len(keys), HASH_BYTES)]


class Thread(threading.Thread):
    """One thread's share; `counts` is its report."""

    def __init__(self, namespace: OpenNamespace, *, seed: int, seconds: float) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._namespace = namespace
        self._random = random.Random(seed)
        self._end = time.monotonic() + seconds
        self._into = np.zeros((BLOCKS, BYTES), np.uint8)

    def run(self) -> None:
        """Do random things until the end."""
        while time.monotonic() < self._end:
            tokens = np.random.default_rng(self._random.randrange(PROMPTS)).integers(0, 1000, 16 * BLOCKS)
            keys = self._namespace.hashes(tokens)[: HASH_BYTES * self._random.randint(1, BLOCKS)]
            verb = self._random.choices([self._put, self._get, self._match, self._ticket, self._delete],
                                        [35, 45, 10, 7, 3])[0]  # fmt: skip
            start = time.monotonic()
            try:
                verb(keys)
            except Exception as error:
                self.counts[f"raised {error!r}"[:200]] += 1
            if time.monotonic() - start > 1.0 + SLACK_SECONDS:
                self.counts["late"] += 1

    def _put(self, keys: bytes) -> None:
        ack = self._random.choice([AckTier.HOST, AckTier.SSD])
        source = np.stack(blocks_of(keys))
        put = self._namespace.put(self._namespace.root, keys, source, ack=ack, deadline_seconds=1.0)
        self.counts["put"] += put.stored

    def _get(self, keys: bytes) -> None:
        got = self._namespace.get(keys, self._into, deadline_seconds=1.0)
        self._check(keys, got.blocks)

    def _ticket(self, keys: bytes) -> None:
        got = self._namespace.submit_get(keys, self._into, deadline_seconds=1.0).result()
        self._check(keys, got.blocks)

    def _match(self, keys: bytes) -> None:
        match = self._namespace.match(keys)
        if self._random.random() < 0.7:  # the rest is forgotten: the session's end gives it back
            self._namespace.release(match, used=0)

    def _delete(self, keys: bytes) -> None:
        try:
            self._namespace.delete(keys[-HASH_BYTES:], deadline_seconds=1.0)
        except (TierUnavailable, ShuttingDown, DeadlineExceeded):
            self.counts["delete not possible"] += 1

    def _check(self, keys: bytes, blocks: int) -> None:
        self.counts["got"] += blocks
        for want, have in zip(blocks_of(keys)[:blocks], self._into, strict=False):
            self.counts["lies"] += not np.array_equal(want, have)


def main(address: str, seed: str, seconds: str) -> None:
    """Run the threads and report."""
    transport = [Transport.MAPPED, Transport.FRAMED][int(seed) % 2]
    with Client(address, transport=transport) as client:
        namespace = client.open(NAMESPACE)
        threads = [Thread(namespace, seed=100 * int(seed) + i, seconds=float(seconds)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sys.stdout.write(json.dumps(sum((thread.counts for thread in threads), Counter())))


if __name__ == "__main__":
    main(*sys.argv[1:])
