"""`kvstore engine trace`: requests of a trace through prefill and decode, beside what the simulator says."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.child import ChildDaemon
from kvstore.cli.engine_picture import draw
from kvstore.cli.output import (
    EXIT_FINE,
    EXIT_PROBLEM,
    Sheet,
    count_text,
    duration_text,
    emit_json,
    percent_text,
    progress,
)
from kvstore.cli.traces import JsonOption, TraceArgument, read_trace
from kvstore.errors import InvalidArgument
from kvstore.models import find_model
from kvstore.trace.blocks import TraceRequest
from kvstore.trace.simulator import Simulator

if TYPE_CHECKING:
    from kvstore.engine.assembly import EngineOptions
    from kvstore.engine.engine import Engine
    from kvstore.engine.model import Model
    from kvstore.engine.pair import PrefillDecode

PREFILL_WORKERS = 2
PATIENCE_SECONDS = 5.0
"""A lookup may take so long here: what is measured is what is found, not who gave up."""
FIRST_TAIL = 1 << 62
"""Seeds of what follows the blocks of a prompt; no id of a trace is as large."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One request. Units: tokens; seconds to its first token."""

    tokens: int
    simulated_hit: int
    hits: dict[str, int]
    with_store_seconds: float
    without_store_seconds: float
    is_same_answer: bool

    @property
    def hit(self) -> int:
        """Tokens that were found, in any tier."""
        return sum(self.hits.values())


def trace(
    path: TraceArgument,
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many requests.")] = 16,
    blocks_max: Annotated[
        int, typer.Option("--blocks-max", min=1, help="Leave out what has more blocks than that.")
    ] = 256,
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", min=4, help="Tokens that stand for a block of the trace.")
    ] = 16,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Of an answer.")] = 4,
    model: Annotated[str, typer.Option("--model", "-m", metavar="FILE", help="As for generate.")] = "smollm2",
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it: a .png, .svg or .pdf file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Send a slice of a trace through two prefill workers and a decode worker over a daemon of its own.

    Equal ids of the trace become equal tokens, a block each, and a question of
    16 tokens follows. Every hit must be the simulator's, and every answer that
    of an engine without a store; exit code 1 where one is not.

    Examples:

      kvstore engine trace agentic.jsonl.gz --requests 12 --plot ttft.png
    """
    _, every = read_trace(path, block_size=0, strict=False)
    chosen = [_scaled(one, block_tokens) for one in every if 0 < one.blocks <= blocks_max][:requests]
    if not chosen:
        raise InvalidArgument(f"trace {path}: no request has at most {blocks_max} blocks")
    simulator = Simulator(block_tokens=block_tokens)
    simulated = [simulator.request(one) * block_tokens for one in chosen]
    with progress("requests", total=len(chosen)) as bar:
        results = []
        for result in _measure(chosen, simulated, block_tokens, max_new_tokens, find_model(model)):
            results.append(result)
            bar.to(len(results))
    if plot is not None:
        draw(
            plot,
            [one.tokens for one in results],
            [one.without_store_seconds for one in results],
            [one.with_store_seconds for one in results],
            title=f"{len(results)} requests of {path.name}, {block_tokens} tokens for a block",
        )
    is_fine = _tell(results, is_json=as_json)
    raise typer.Exit(EXIT_FINE if is_fine else EXIT_PROBLEM)


def _scaled(request: TraceRequest, block_tokens: int) -> TraceRequest:
    """Return a request whose blocks have so many tokens, all of them full."""
    return replace(
        request,
        input_tokens=request.blocks * block_tokens,
        weights=(),
        retention_class=request.retention_class or "agent",
    )


def prompt_of(
    request: TraceRequest, *, block_tokens: int, vocabulary: int, tail: int, number: int
) -> tuple[int, ...]:
    """Return a prompt: for each id of a request tokens that follow from it alone, then `tail` of its own."""
    ids = [first + index for first, count in request.runs for index in range(count)]
    drawn = [(block_tokens, one) for one in ids] + [(tail, FIRST_TAIL + number)]
    return tuple(
        token for count, seed in drawn for token in random.Random(seed).choices(range(vocabulary), k=count)
    )


def _measure(
    chosen: Sequence[TraceRequest], simulated: Sequence[int], block_tokens: int, new: int, file: Path
) -> Iterator[Measured]:
    from kvstore.engine.admission import SUFFIX_TOKENS_MIN
    from kvstore.engine.assembly import EngineOptions, build_engine, load_model
    from kvstore.engine.request import Request

    options = EngineOptions(block_tokens=block_tokens, match_seconds=PATIENCE_SECONDS, threads=1)
    loaded = load_model(file, options)
    config = loaded.config
    block_bytes = block_tokens * config.row_width * loaded.weights.dtype.itemsize * config.layers
    longest = max(one.blocks for one in chosen) + 2 + new // block_tokens
    options = replace(options, pool_bytes=2 * (longest + 1) * block_bytes)
    distinct = sum(one.blocks for one in chosen) - sum(simulated) // block_tokens
    with _apart(loaded, options, arena_bytes=2 * distinct * block_bytes + (64 << 20)) as (pair, costs_of):
        for number, (one, hit) in enumerate(zip(chosen, simulated, strict=True)):
            prompt = prompt_of(
                one,
                block_tokens=block_tokens,
                vocabulary=len(loaded.weights.embedding),
                tail=SUFFIX_TOKENS_MIN,
                number=number,
            )
            request = Request(
                prompt=prompt,
                max_new_tokens=new,
                retention_class=one.retention_class,
                save_answer=False,  # the trace brings its own history
            )
            answer = pair.submit(request).result()
            with closing(build_engine(loaded, None, options, costs=costs_of.costs)) as alone:
                plain = alone.submit(request).result()  # an empty pool, and no store
            yield Measured(
                len(prompt),
                hit,
                answer.usage.hits,
                answer.usage.first_token_seconds,
                plain.usage.first_token_seconds,
                answer.ids == plain.ids,
            )


@contextmanager
def _apart(
    model: Model, options: EngineOptions, *, arena_bytes: int
) -> Iterator[tuple[PrefillDecode, Engine]]:
    """Lend prefill and decode workers behind sockets, and one of their engines. They run one after another,
    so that they can share the weights.
    """
    from kvstore.client import Client
    from kvstore.engine.assembly import build_engine
    from kvstore.engine.pair import PrefillDecode
    from kvstore.engine.worker import RemoteWorker, WorkerServer

    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="kvs-")))
        daemon = stack.enter_context(ChildDaemon(directory, arena_bytes=arena_bytes))
        first: Engine | None = None
        workers = []
        for number in range(PREFILL_WORKERS + 1):
            client = stack.enter_context(Client(daemon.address))
            costs = first.costs if first else None
            engine = stack.enter_context(closing(build_engine(model, client, options, costs=costs)))
            first = first or engine
            path = directory / f"{number}.sock"
            server = WorkerServer(engine, path, flushes=number < PREFILL_WORKERS)
            stack.enter_context(closing(server))
            workers.append(RemoteWorker(path))
        assert first is not None
        yield PrefillDecode(workers[:PREFILL_WORKERS], workers[PREFILL_WORKERS:]), first


def _tell(results: Sequence[Measured], *, is_json: bool) -> bool:
    """Show what was measured; say whether every hit was the simulator's and every answer the same."""
    tokens = sum(one.tokens for one in results)
    hit, simulated = sum(one.hit for one in results), sum(one.simulated_hit for one in results)
    wrong = [one for one in results if one.hit != one.simulated_hit]
    other = [one for one in results if not one.is_same_answer]
    warm = [one for one in results if one.simulated_hit]
    speed_up = statistics.median(
        one.without_store_seconds / one.with_store_seconds for one in warm or results
    )
    summary = {
        "requests": len(results),
        "token_hit_rate": hit / tokens,
        "simulated_token_hit_rate": simulated / tokens,
        "requests_with_other_hits": len(wrong),
        "requests_with_other_answers": len(other),
        "speed_up_of_hits_median": speed_up,
    }
    if is_json:
        emit_json(summary | {"rows": [asdict(one) for one in results]})
        return not wrong and not other
    sheet = Sheet()
    sheet.table(
        "Requests",
        ["prompt tokens", "hit", "simulated", "found in", "first token with store", "without"],
        [
            [
                count_text(one.tokens),
                count_text(one.hit),
                count_text(one.simulated_hit),
                ", ".join(f"{tier} {count_text(count)}" for tier, count in one.hits.items()),
                duration_text(one.with_store_seconds),
                duration_text(one.without_store_seconds),
            ]
            for one in results
        ],
    )
    sheet.line(
        f"hit {percent_text(hit, tokens)} of the tokens, simulated {percent_text(simulated, tokens)}; "
        f"{len(wrong)} requests differ, {len(other)} answers differ; "
        f"requests with a hit: first token {speed_up:.1f}x sooner"
    )
    sheet.show()
    return not wrong and not other
