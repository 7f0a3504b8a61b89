"""match: what it costs to ask for a long prompt, against the least that any call to the daemon costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.bench import prompt, rows
from kvstore.bench.harness import Bench, timed
from kvstore.bench.prompt import Prompt
from kvstore.bench.rows import Row, RowSpec
from kvstore.cli.connection import Daemon
from kvstore.client import Client
from kvstore.layout import Layout
from kvstore.namespace import Namespace

BLOCK_BYTES = 4096
BLOCKS_LONG = 7800
ARENA_BYTES = 384 << 20
CALLS, CALLS_QUICK = 40, 20


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group. Blocks are small: a match moves none of their bytes."""
    layout = Layout.single(dtype="bench", bytes_max=BLOCK_BYTES, layers=4, segments=4)
    identity = Namespace(model="bench-match", weights="none", layout=layout, block_tokens=prompt.BLOCK_TOKENS)
    with (
        bench.daemon(arena_bytes=ARENA_BYTES) as child,
        Daemon(child.address) as admin,
        Client(child.address) as client,
    ):
        namespace = client.open(identity)
        for spec, blocks in ((rows.MATCH_600, prompt.BLOCKS), (rows.MATCH_7800, BLOCKS_LONG)):
            asked = Prompt.draw(namespace, blocks, seed=blocks)
            asked.store(prompt.random_bytes(blocks, BLOCK_BYTES, seed=3), retention_class=prompt.HOST_ONLY)
            yield _row(bench, spec, asked, admin)


def _row(bench: Bench, spec: RowSpec, asked: Prompt, admin: Daemon) -> Row:
    calls = CALLS_QUICK if bench.is_quick else CALLS

    def mean_of(action: Callable[[], object]) -> float:
        return timed(lambda: [action() for _ in range(calls)]) / calls

    empty_rpc = health_pb2_grpc.HealthStub(admin.channel).Check
    nothing = health_pb2.HealthCheckRequest()
    timings = bench.alternate(
        spec.name,
        match=lambda: mean_of(asked.match_once),
        empty=lambda: mean_of(lambda: empty_rpc(nothing)),
    )
    return timings.row(spec, "match", "empty", note=f"{calls} calls a round")
