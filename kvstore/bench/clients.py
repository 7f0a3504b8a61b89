"""clients: many processes at once, on host memory's bandwidth and on the daemon's one loop."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from kvstore.bench import prompt, rows
from kvstore.bench.crew import Crew, Deed
from kvstore.bench.harness import Bench, timed
from kvstore.bench.prompt import BLOCK_BYTES, BLOCKS, Prompt
from kvstore.bench.rows import Row
from kvstore.client import Client

ARENA_BYTES = 384 << 20
COPIERS, MATCHERS = 4, 16
HITS = 4
CALLS, CALLS_QUICK = 100, 40
PERCENTILE = 99


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group."""
    source = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=7)
    with bench.daemon(arena_bytes=ARENA_BYTES) as child:
        with Client(child.address) as client:
            namespace = client.open(prompt.block_major("clients"))
            for seed in range(COPIERS):
                Prompt.draw(namespace, BLOCKS, seed=seed).store(source, retention_class=prompt.HOST_ONLY)
        bench.tell(f"starting {MATCHERS} clients")
        with Crew(child.address, [number % COPIERS for number in range(MATCHERS)]) as crew:
            yield _copiers(bench, crew)
            yield _matchers(bench, crew)


def _copiers(bench: Bench, crew: Crew) -> Row:
    def all_of(deed: Deed) -> float:
        return timed(lambda: crew.do(deed, repeat=HITS, workers=COPIERS))

    timings = bench.alternate("clients_4", hit=lambda: all_of(Deed.HIT), copy=lambda: all_of(Deed.COPY))
    return timings.row(rows.CLIENTS_4, "hit", "copy", note=f"{HITS} times each a round, a prompt each")


def _matchers(bench: Bench, crew: Crew) -> Row:
    calls = CALLS_QUICK if bench.is_quick else CALLS
    taken: dict[Deed, list[float]] = {Deed.MATCH: [], Deed.EMPTY: []}

    def tail(deed: Deed) -> float:
        seconds = crew.do(deed, repeat=calls)
        taken[deed] += seconds
        return statistics.quantiles(seconds, n=100)[PERCENTILE - 1]

    timings = bench.alternate("clients_16", match=lambda: tail(Deed.MATCH), empty=lambda: tail(Deed.EMPTY))
    middle = {deed: 1000 * statistics.median(seconds) for deed, seconds in taken.items()}
    note = f"medians {middle[Deed.MATCH]:.3g} and {middle[Deed.EMPTY]:.3g} ms; {calls} calls each a round"
    return timings.row(rows.CLIENTS_16, "match", "empty", note=note)
