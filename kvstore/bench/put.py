"""put: what it costs to hand a prompt to the store, against copying the same bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from kvstore.bench import prompt, rows
from kvstore.bench.harness import Bench, timed
from kvstore.bench.prompt import BLOCK_BYTES, BLOCKS, Prompt, copy_blocks
from kvstore.bench.rows import Row
from kvstore.cli.connection import Daemon
from kvstore.client import Client, ClientLimits, OpenNamespace
from kvstore.errors import DeadlineExceeded

ARENA_BYTES = 192 << 20
"""Room for two rounds: after the warm-up both processes have every page of it mapped."""
DRAIN_SECONDS = 30.0


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group: every round puts blocks that nobody has stored before."""
    source = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=2)
    into = prompt.warm_buffer(BLOCKS, BLOCK_BYTES)
    seeds = itertools.count()
    with bench.daemon(arena_bytes=ARENA_BYTES) as child, Daemon(child.address) as admin:
        for spec, limits in ((rows.PUT, ClientLimits()), (rows.PUT_ONE_THREAD, ClientLimits(copy_threads=1))):
            with Client(child.address, limits=limits) as client:
                namespace = client.open(prompt.block_major("put"))

                def put(namespace: OpenNamespace = namespace) -> float:
                    fresh = Prompt.draw(namespace, BLOCKS, seed=next(seeds))
                    taken = timed(lambda: fresh.store(source))
                    # The write-behind of this round must not run beside the baseline, nor fill the arena.
                    drain(admin)
                    namespace.delete(fresh.keys)
                    return taken

                timings = bench.alternate(
                    spec.name, warm_up=4, put=put, copy=lambda: timed(lambda: copy_blocks(source, into))
                )
            note = f"{limits.copy_threads} copy threads; write-behind drained between rounds"
            yield timings.row(spec, "put", "copy", note=note)


def drain(admin: Daemon) -> None:
    """Wait until nothing waits for the disk.

    Errors: DeadlineExceeded.
    """
    deadline = time.monotonic() + DRAIN_SECONDS
    while admin.status().get("gauges", {}).get("kvstore_write_queue_bytes", 0):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the write queue was not empty after {DRAIN_SECONDS:g} s")
        time.sleep(0.01)
