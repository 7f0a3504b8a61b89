"""steps: where the time of a hit and of a put goes, each step as a share of a plain copy of the same bytes.

Every round begins with the copy, as the rows of host and put do in turn: it empties the caches of what both
processes need for the steps, as the work of an engine does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvstore.bench import prompt, rows
from kvstore.bench.harness import Bench, timed, timed_of
from kvstore.bench.prompt import BLOCK_BYTES, BLOCKS, Prompt, copy_blocks
from kvstore.bench.rows import Row
from kvstore.client import Client, ClientLimits, OpenNamespace
from kvstore.errors import TierUnavailable

ARENA_BYTES = 384 << 20


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group."""
    source = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=1)
    into = prompt.warm_buffer(BLOCKS, BLOCK_BYTES)
    with (
        bench.daemon(arena_bytes=ARENA_BYTES) as child,
        Client(child.address, limits=ClientLimits(copy_threads=1)) as client,
    ):
        namespace = client.open(prompt.block_major("steps"))
        yield from _hit(bench, namespace, source, into)
        yield from _put(bench, namespace, source, into)


def _hit(bench: Bench, namespace: OpenNamespace, source: prompt.Array, into: prompt.Array) -> Iterator[Row]:
    stored = Prompt.draw(namespace, BLOCKS, seed=0)
    stored.store(source, retention_class=prompt.HOST_ONLY)

    def once() -> dict[str, float]:
        copied = timed(lambda: copy_blocks(source, into))
        with_match, match = timed_of(lambda: namespace.match(stored.keys))
        fetched = timed(lambda: namespace.fetch(match, into, verify=False))
        released = timed(lambda: namespace.release(match, used=BLOCKS))
        if match.blocks < BLOCKS:
            raise TierUnavailable(f"match found {match.blocks} of {BLOCKS} blocks: {match.reason}")
        return {"copied": copied, "match": with_match, "fetch": fetched, "release": released}

    timings = bench.together("steps of a hit", once)
    for spec, step in ((rows.HIT_MATCH, "match"), (rows.HIT_FETCH, "fetch"), (rows.HIT_RELEASE, "release")):
        yield timings.row(spec, step, "copied")


def _put(bench: Bench, namespace: OpenNamespace, source: prompt.Array, into: prompt.Array) -> Iterator[Row]:
    seeds = itertools.count(1)

    def once() -> dict[str, float]:
        fresh = Prompt.draw(namespace, BLOCKS, seed=next(seeds))
        copied = timed(lambda: copy_blocks(source, into))
        with_reserve, lent = timed_of(
            lambda: namespace.reserve(namespace.root, fresh.keys, retention_class=prompt.HOST_ONLY)
        )
        with_fill, digests = timed_of(lambda: namespace.fill(lent, source))
        with_commit, put = timed_of(lambda: namespace.commit(lent, digests))
        if put.present < BLOCKS:
            raise TierUnavailable(f"put stored {put.present} of {BLOCKS} blocks: {put.reason}")
        namespace.delete(fresh.keys)
        return {"copied": copied, "reserve": with_reserve, "fill": with_fill, "commit": with_commit}

    timings = bench.together("steps of a put", once)
    for spec, step in ((rows.PUT_RESERVE, "reserve"), (rows.PUT_FILL, "fill"), (rows.PUT_COMMIT, "commit")):
        yield timings.row(spec, step, "copied")
