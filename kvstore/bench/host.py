"""host: what a hit in host memory costs, against copying the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.bench import prompt, rows
from kvstore.bench.harness import Bench, timed
from kvstore.bench.prompt import BLOCK_BYTES, BLOCKS, Prompt, copy_blocks
from kvstore.bench.rows import Row
from kvstore.client import Client, ClientLimits

ARENA_BYTES = 384 << 20


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group."""
    source = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=1)
    into = prompt.warm_buffer(BLOCKS, BLOCK_BYTES)
    with bench.daemon(arena_bytes=ARENA_BYTES) as child:
        with Client(child.address, limits=ClientLimits(copy_threads=1)) as client:
            yield _plain(bench, client, source, into)
        with Client(child.address) as client:
            yield _verified(bench, client, source, into)
        with Client(child.address, limits=ClientLimits(copy_threads=1)) as client:
            yield _layered(bench, client, source, into)


def _plain(bench: Bench, client: Client, source: prompt.Array, into: prompt.Array) -> Row:
    stored = Prompt.draw(client.open(prompt.block_major("host")), BLOCKS, seed=1)
    stored.store(source, retention_class=prompt.HOST_ONLY)
    timings = bench.alternate(
        "host_hit",
        hit=lambda: timed(lambda: stored.fetch(into, verify=False)),
        copy=lambda: timed(lambda: copy_blocks(source, into)),
    )
    return timings.row(rows.HOST_HIT, "hit", "copy")


def _verified(bench: Bench, client: Client, source: prompt.Array, into: prompt.Array) -> Row:
    stored = Prompt.draw(client.open(prompt.block_major("host")), BLOCKS, seed=1)
    timings = bench.alternate(
        "host_hit_verified",
        hit=lambda: timed(lambda: stored.fetch(into, verify=True)),
        copy=lambda: timed(lambda: copy_blocks(source, into)),
    )
    threads = ClientLimits().copy_threads
    return timings.row(rows.HOST_HIT_VERIFIED, "hit", "copy", note=f"{threads} copy threads")


def _layered(bench: Bench, client: Client, source: prompt.Array, into: prompt.Array) -> Row:
    stored = Prompt.draw(client.open(prompt.layer_major("host-layered")), BLOCKS, seed=1)
    stored.store(source, retention_class=prompt.HOST_ONLY)
    layers = prompt.layer_buffers(BLOCKS)
    timings = bench.alternate(
        "host_hit_layered",
        hit=lambda: timed(lambda: stored.fetch(layers, verify=False)),
        copy=lambda: timed(lambda: copy_blocks(source, into)),
    )
    return timings.row(rows.HOST_HIT_LAYERED, "hit", "copy", note="three segments in 11 layer ranges")
