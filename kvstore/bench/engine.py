"""engine: what the store does for the bundled engine, and what that engine is worth without it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from engine_adapters.transformers import smollm2
from kvstore.bench import rows
from kvstore.bench.harness import Bench, Timings, milliseconds, timed
from kvstore.bench.put import drain
from kvstore.bench.rows import Row
from kvstore.cli.connection import Daemon
from kvstore.cli.demo_ideal import ModelSizes
from kvstore.client import Client
from kvstore.engine.assembly import EngineOptions, build_engine, load_model
from kvstore.engine.engine import Engine
from kvstore.engine.model import Model
from kvstore.engine.request import Answer, Request
from kvstore.models import find_model

TOKENS, TOKENS_QUICK = 4096, 2048
TOKENS_WITHOUT_STORE = 1024
BLOCK_TOKENS = 64
HIT_SHARE = 0.96
ROUNDS_MAX, ROUNDS_QUICK = 5, 3
"""One cold prefill of 4,096 tokens takes about twenty seconds on one core."""
PROMPTS = 3
DECODED, DECODE_PROMPT = 32, 256
COMPARED = 8
PATIENCE_SECONDS = 1.0
"""What is measured is a hit: a slow lookup makes the first token late, and does not become a miss."""
ARENA_FITS = 1.3
"""Prompts that host memory holds in the SSD round: the one before last is on SSD alone."""


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group, one thread throughout."""
    torch.set_num_threads(1)
    bench.tell("loading the model")
    model = load_model(find_model("smollm2"), EngineOptions())
    tokens = TOKENS_QUICK if bench.is_quick else TOKENS
    yield from _hits(bench, model, tokens)
    yield from _without_store(bench, model, TOKENS_WITHOUT_STORE)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random prompts in turn, each a stored prefix and a suffix that is new every time."""

    tokens: int
    vocabulary: int

    @property
    def known(self) -> int:
        """Tokens of a prompt that are stored: whole blocks, about 96 %."""
        return int(self.tokens * HIT_SHARE) // BLOCK_TOKENS * BLOCK_TOKENS

    def prefix(self, number: int) -> tuple[int, ...]:
        """Return the stored part of prompt `number`."""
        return self._draw(self.known, number % PROMPTS)

    def whole(self, number: int) -> tuple[int, ...]:
        """Return a prompt whose beginning is stored."""
        return self.prefix(number) + self._draw(self.tokens - self.known, 1000 + number)

    def fresh(self, number: int) -> tuple[int, ...]:
        """Return a prompt that nobody has seen."""
        return self._draw(self.tokens, 2000 + number)

    def _draw(self, count: int, seed: int) -> tuple[int, ...]:
        return tuple(random.Random(seed).choices(range(self.vocabulary), k=count))


def _hits(bench: Bench, model: Model, tokens: int) -> Iterator[Row]:
    prompts = Prompts(tokens, len(model.weights.embedding))
    block_bytes = BLOCK_TOKENS * model.config.row_width * 4 * model.config.layers
    stored_bytes = prompts.known // BLOCK_TOKENS * block_bytes
    loads: list[Answer] = []
    for spec, arena_bytes in (
        (rows.ENGINE_PREFILL_HOST, int(stored_bytes * (PROMPTS + 1))),
        (rows.ENGINE_PREFILL_SSD, int(stored_bytes * ARENA_FITS)),
    ):
        # The pool holds one prompt: the next one finds nothing of its own there.
        with (
            bench.daemon(arena_bytes=max(arena_bytes, 64 << 20)) as child,
            Daemon(child.address) as admin,
            Client(child.address) as client,
            _engine(model, client, tokens=tokens) as engine,
        ):
            for number in range(PROMPTS):
                bench.tell(f"{spec.name}: storing prompt {number + 1} of {PROMPTS}")
                _ask(engine, prompts.prefix(number))
                _settle(engine, admin)
            answers: list[Answer] = []
            timings = _alternate(bench, spec.name, engine, admin, prompts, answers)
            bench.tell(f"{spec.name}: comparing an answer")
            same = _comparison(engine, model, prompts)
        yield _effective(spec, timings, answers, _sizes(model), prompts, note=same)
        loads += answers if spec is rows.ENGINE_PREFILL_HOST else []
    yield _hidden(loads)


def _settle(engine: Engine, admin: Daemon) -> None:
    """Wait until all is on SSD: what still waits for the disk cannot make room for what is read."""
    engine.flush()
    drain(admin)


def _alternate(
    bench: Bench, label: str, engine: Engine, admin: Daemon, prompts: Prompts, answers: list[Answer]
) -> Timings:
    # Numbers of their own: a stored prompt is not to come twice in a row, or host memory still has it.
    warm_turn, cold_turn = itertools.count(), itertools.count()
    few = _fewer(bench)

    def warm() -> float:
        _settle(engine, admin)
        answers.append(_ask(engine, prompts.whole(next(warm_turn))))
        return answers[-1].usage.first_token_seconds

    def cold() -> float:
        return _ask(engine, prompts.fresh(next(cold_turn)), save=False).usage.first_token_seconds

    return few.alternate(label, warm_up=1, warm=warm, cold=cold)


def _fewer(bench: Bench) -> Bench:
    return replace(bench, rounds=min(bench.rounds, ROUNDS_QUICK if bench.is_quick else ROUNDS_MAX))


def _comparison(engine: Engine, model: Model, prompts: Prompts) -> str:
    """Say whether an answer that begins with a hit is the one that computing everything gives."""
    prompt = prompts.whole(PROMPTS)
    answer = _ask(engine, prompt, new=COMPARED)
    with _engine(model, None, tokens=prompts.tokens) as alone:
        plain = _ask(alone, prompt, new=COMPARED)
    verdict = "the same" if answer.ids == plain.ids else "NOT the same"
    return f"behind {answer.usage.hit} hit tokens {COMPARED} ids {verdict} as without"


def _ask(engine: Engine, prompt: tuple[int, ...], *, new: int = 1, save: bool = True) -> Answer:
    request = Request(prompt=prompt, max_new_tokens=new, save_prompt=save, save_answer=False)
    return engine.submit(request).result()


def _engine(model: Model, client: Client | None, *, tokens: int) -> closing[Engine]:
    block_bytes = BLOCK_TOKENS * model.config.row_width * 4 * model.config.layers
    pages = tokens // BLOCK_TOKENS + 4
    options = EngineOptions(
        pool_bytes=pages * block_bytes,
        block_tokens=BLOCK_TOKENS,
        match_seconds=PATIENCE_SECONDS,
        threads=1,
    )
    return closing(build_engine(model, client, options))


def _sizes(model: Model) -> ModelSizes:
    config, weights = model.config, model.weights
    matrices = [(one.qkv, one.output, one.gate_up, one.down) for one in weights.layers]
    return ModelSizes(
        layers=config.layers,
        heads=config.heads,
        head_dim=config.head_dim,
        layer_parameters=sum(matrix.numel() for layer in matrices for matrix in layer),
        head_parameters=weights.head.numel(),
    )


def _effective(
    spec: rows.RowSpec,
    timings: Timings,
    answers: list[Answer],
    sizes: ModelSizes,
    prompts: Prompts,
    *,
    note: str,
) -> Row:
    measured = timings.median("cold") / timings.median("warm")
    ideal = sizes.speed_up(tokens=prompts.tokens, known=prompts.known)
    found: Counter[str] = sum((Counter(answer.usage.hits) for answer in answers), Counter())
    stored = prompts.known * len(answers)
    shares = ", ".join(f"{tier} {count / stored:.0%}" for tier, count in found.items()) or "nowhere"
    detail = (
        f"{prompts.tokens} tokens, {prompts.known} stored: {milliseconds(timings.median('warm'))} against "
        f"{milliseconds(timings.median('cold'))}, {measured:.1f}x of ideally {ideal:.1f}x; "
        f"found in {shares}; {note}"
    )
    return Row(spec, measured / ideal, detail)


def _hidden(answers: list[Answer]) -> Row:
    loading = sum(answer.usage.load_seconds for answer in answers)
    waited = sum(answer.usage.load_wait_seconds for answer in answers)
    detail = f"{milliseconds(loading)} of loads in {len(answers)} prompts, {milliseconds(waited)} waited for"
    return Row(rows.ENGINE_HIDDEN, 1 - waited / loading if loading else None, detail)


def _without_store(bench: Bench, model: Model, tokens: int) -> Iterator[Row]:
    bench.tell("loading transformers' model")
    theirs, _ = smollm2.load(bench.tell)
    prompts = Prompts(tokens, len(model.weights.embedding))
    few = _fewer(bench)
    turn = itertools.count()

    def prefill_theirs() -> float:
        ids = torch.tensor([prompts.fresh(next(turn))])
        with torch.no_grad():
            return timed(lambda: theirs(ids, use_cache=True, logits_to_keep=1))

    def decode_theirs() -> float:
        ids = torch.tensor([prompts.fresh(next(turn))[:DECODE_PROMPT]])
        with torch.no_grad():
            past = theirs(ids, use_cache=True, logits_to_keep=1)
            token = past.logits[:, -1:].argmax(-1)

            def decode() -> None:
                nonlocal token
                for _ in range(DECODED - 1):
                    out = theirs(token, past_key_values=past.past_key_values, use_cache=True)
                    token = out.logits[:, -1:].argmax(-1)

            return timed(decode)

    with _engine(model, None, tokens=tokens) as engine:

        def prefill_own() -> float:
            return _ask(engine, prompts.fresh(next(turn))).usage.first_token_seconds

        def decode_own() -> float:
            usage = _ask(engine, prompts.fresh(next(turn))[:DECODE_PROMPT], new=DECODED).usage
            return usage.seconds - usage.first_token_seconds

        timings = few.alternate("prefill", warm_up=1, own=prefill_own, theirs=prefill_theirs)
        yield timings.row(rows.ENGINE_VS_HF_PREFILL, "own", "theirs", note=f"{tokens} tokens")
        timings = few.alternate("decode", warm_up=1, own=decode_own, theirs=decode_theirs)
        note = f"{DECODED - 1} tokens behind {DECODE_PROMPT}"
        yield timings.row(rows.ENGINE_VS_HF_DECODE, "own", "theirs", note=note)
