"""encryption: what AES-256-GCM costs on the way to SSD and back."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Iterator
from contextlib import ExitStack

from kvstore.bench import prompt, rows
from kvstore.bench.harness import Bench, timed
from kvstore.bench.local_tier import LocalTier
from kvstore.bench.prompt import BLOCK_BYTES, BLOCKS
from kvstore.bench.rows import Row
from kvstore.tiers.ssd.crypto_keys import KEY_BYTES, KeyRing, KeyTable, tenant_key


class Side:
    """A tier with or without keys, and the seconds that each way took."""

    def __init__(self, local: LocalTier) -> None:
        self._local = local
        self.write: list[float] = []
        self.read: list[float] = []

    def there_and_back(self) -> float:
        """Write the frame, synced, and read it; what makes room for the next one is not counted."""
        self.write.append(timed(self._local.write))
        self.read.append(timed(self._local.read_all))
        self._local.forget()
        return self.write[-1] + self.read[-1]


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group."""
    namespace = prompt.block_major("encryption")
    payload = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=6)
    table = KeyTable({namespace.tenant: (tenant_key(1, secrets.token_bytes(KEY_BYTES)),)})
    with ExitStack() as stack:
        sides: list[Side] = []
        for keys in (None, KeyRing(lambda: table)):
            bench.tell("writing a segment")
            directory, memory = stack.enter_context(bench.scratch()), bench.shared_memory
            local = LocalTier(namespace, directory, shared_memory=memory, blocks=BLOCKS, keys=keys)
            stack.enter_context(local).store(payload)
            local.forget()
            sides.append(Side(local))
        plain, encrypted = sides
        timings = bench.alternate(
            "ssd_encrypted", encrypted=encrypted.there_and_back, plain=plain.there_and_back
        )
    gb = BLOCKS * BLOCK_BYTES / 1e9
    ways = {"write": (encrypted.write, plain.write), "read": (encrypted.read, plain.read)}
    note = "; ".join(
        f"{way} {gb / statistics.median(one):.2f} against {gb / statistics.median(other):.2f} GB/s"
        for way, (one, other) in ways.items()
    )
    yield timings.row(rows.SSD_ENCRYPTED, "encrypted", "plain", note=note)
