"""storm: hits from host memory while prompts are prefetched from SSD without a pause.

Against the same hits while a plain program reads as busily: what is left is the store's doing, not
that of disk and memory.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from multiprocessing.synchronize import Event
from pathlib import Path

from kvstore.bench import prompt, rows
from kvstore.bench.harness import Bench, milliseconds, timed
from kvstore.bench.prompt import BLOCK_BYTES, BLOCKS, DEADLINE_SECONDS, Prompt
from kvstore.bench.rows import Row
from kvstore.client import Client
from kvstore.tiers.fs import aligned_buffer
from kvstore.types import AckTier

ARENA_BYTES = 192 << 20
"""Room for the prompt that is hit, and for one and a half of those that come and go."""
PROMPTS = 3
HITS, HITS_QUICK = 20, 8
READERS = 4
READ_BYTES = 1 << 20
JOIN_SECONDS = 30.0
LEASE_SECONDS = 60.0


def run(bench: Bench) -> Iterator[Row]:
    """Measure the row of the group."""
    source = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=9)
    into = prompt.warm_buffer(BLOCKS, BLOCK_BYTES)
    hits = HITS_QUICK if bench.is_quick else HITS
    with bench.daemon(arena_bytes=ARENA_BYTES) as child, Client(child.address) as client:
        namespace = client.open(prompt.block_major("storm"))
        cold = [Prompt.draw(namespace, BLOCKS, seed=seed) for seed in range(PROMPTS)]
        for due in cold:
            bench.tell("storing prompts on SSD")
            due.store(source, ack=AckTier.SSD)
        hot = Prompt.draw(namespace, BLOCKS, seed=PROMPTS)
        hot.store(source, ack=AckTier.SSD)
        taken: dict[str, list[float]] = {"storm": [], "plain": [], "calm": []}

        def hit(name: str) -> float:
            # A storm may push out what others use; what is measured comes back first, and stays.
            kept = namespace.match(hot.keys, lease_seconds=LEASE_SECONDS, deadline_seconds=DEADLINE_SECONDS)
            namespace.fetch(kept, into, deadline_seconds=DEADLINE_SECONDS)
            seconds = [timed(lambda: hot.fetch(into, verify=True)) for _ in range(hits)]
            namespace.release(kept, used=0)
            taken[name] += seconds
            return max(seconds)

        def in_storm() -> float:
            with _prefetching(cold):
                return hit("storm")

        def beside_plain() -> float:
            with _reading(sorted((child.data / "segments").glob("*.seg"))):
                return hit("plain")

        bench.alternate("storm_p99", storm=in_storm, plain=beside_plain, calm=lambda: hit("calm"))
    yield _row(taken)


def _row(taken: dict[str, list[float]]) -> Row:
    high = {name: statistics.quantiles(seconds, n=100)[98] for name, seconds in taken.items()}
    middle = {name: milliseconds(statistics.median(seconds)) for name, seconds in taken.items()}
    detail = (
        f"{milliseconds(high['storm'])} against {milliseconds(high['plain'])}, {milliseconds(high['calm'])} "
        f"without either; medians {middle['storm']}, {middle['plain']}, {middle['calm']}; "
        f"{len(taken['storm'])} hits each, warm-up included"
    )
    return Row(rows.STORM_P99, high["storm"] / high["plain"], detail)


@contextmanager
def _prefetching(prompts: list[Prompt]) -> Iterator[None]:
    """Prefetch prompts in turn while the body runs: each pushes another one out of host memory."""
    over = threading.Event()

    def work() -> None:
        for due in cycle(prompts):
            if over.wait(0.001):
                return
            due.namespace.prefetch(due.keys, deadline_seconds=DEADLINE_SECONDS)

    with _beside(threading.Thread(target=work, name="bench-prefetch"), over.set):
        yield


@contextmanager
def _reading(files: list[Path]) -> Iterator[None]:
    """Read files past the page cache in another process, with as many threads as the daemon."""
    context = multiprocessing.get_context("spawn")
    begun, over = context.Event(), context.Event()
    process = context.Process(target=_read, args=(files, begun, over), daemon=True)
    with _beside(process, over.set):
        begun.wait(JOIN_SECONDS)
        yield


@contextmanager
def _beside(
    worker: threading.Thread | multiprocessing.process.BaseProcess, end: Callable[[], None]
) -> Iterator[None]:
    worker.start()
    try:
        yield
    finally:
        end()
        worker.join(JOIN_SECONDS)


def _read(files: list[Path], begun: Event, over: Event) -> None:
    def work(number: int) -> None:
        buffer = aligned_buffer(READ_BYTES)
        for path in cycle(files):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                for offset in range(number * READ_BYTES, os.fstat(handle).st_size, READERS * READ_BYTES):
                    os.preadv(handle, [buffer], offset)
                    begun.set()
                    if over.is_set():
                        return
            finally:
                os.close(handle)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
