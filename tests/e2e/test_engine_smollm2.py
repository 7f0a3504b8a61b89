"""The bundled engine with a real model: logits of transformers, one answer wherever a prefix comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvstore.cli.engine_text import GgufCodec
from kvstore.engine.assembly import INVARIANT_ROWS, EngineOptions, load_model
from kvstore.engine.attention import Span, StepAttention
from kvstore.engine.model import Model, Rows
from kvstore.engine.pair import PrefillDecode
from kvstore.engine.pool import KvPool
from kvstore.engine.request import Request, Sampling
from kvstore.engine.scheduler import Budget
from kvstore.engine.windows import WindowRows
from kvstore.models import find_model
from tests.e2e.engine_setup import SECONDS, ask, engine, worker
from tests.e2e.served import Home, Served

OPTIONS = EngineOptions(pool_bytes=128 << 20, sequences_max=4, match_seconds=5.0, threads=1)
BLOCK = OPTIONS.block_tokens
CHUNKED = replace(OPTIONS, budget=Budget(busy_seconds=0.1, idle_seconds=0.1))
"""With the costs that tests claim, a chunk is one block."""
NEW = 12
LOGITS_TOLERANCE = 1e-4
"""Logits reach about 38. They were equal bit for bit where this was written; other CPUs may round."""
PROMPTS_TEXT = (
    "Write a letter to a friend who has just moved to another town, and tell what became of the garden. ",
    "Explain to a child why the moon looks different every night, and what it has to do with the sun. ",
    "List what a cook should buy for a dinner of six people, and say in which order to prepare it. ",
    "Describe how a lock on a canal lifts a ship, one step after the other, and who operates it. ",
)
pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return load_model(find_model("smollm2"), OPTIONS)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    codec = GgufCodec.read(find_model("smollm2"))
    return [codec.chat([{"role": "user", "content": text * 8}])[: 3 * BLOCK - 10] for text in PROMPTS_TEXT]


@pytest.fixture
def home() -> Iterator[Home]:
    home = Home()
    yield home
    home.remove()


def test_logits_are_those_of_transformers(model: Model, prompts: list[list[int]]) -> None:
    file = find_model("smollm2")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ids, count = torch.tensor(prompts[0]), len(prompts[0])
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    pool = KvPool(
        model.config,
        block_tokens=BLOCK,
        page_count=8,
        scratch_count=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention = StepAttention(model.config, pool, [Span(0, count, range(1, 9), WindowRows())], torch.float32)
    own = model.forward(Rows(ids, torch.arange(count), torch.arange(count)), attention)
    assert expected.abs().max() > 10
    assert (own - expected).abs().max() <= LOGITS_TOLERANCE
    assert (own.argmax(-1) == expected.argmax(-1)).all()


def test_steps_of_enough_rows_make_logits_independent_of_the_batch(
    model: Model, prompts: list[list[int]]
) -> None:
    """Bit for bit, alone, with others, and resumed from the pool."""
    seen: dict[int, list[torch.Tensor]] = {}

    def request(prompt: list[int], number: int) -> Request:
        def record(_: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            seen.setdefault(number, []).append(logits.clone())
            return logits

        return Request(prompt=tuple(prompt), max_new_tokens=6, sampling=Sampling(mask=record))

    with engine(model, None, replace(OPTIONS, rows_min=INVARIANT_ROWS)) as one:
        one.submit(request(prompts[0], 0)).result(timeout=SECONDS)
        together = [one.submit(request(prompt, 1 + number)) for number, prompt in enumerate(prompts)]
        hits = [answer.result(timeout=SECONDS).usage.hit for answer in together]
    assert hits == [2 * BLOCK, 0, 0, 0]
    assert torch.equal(torch.stack(seen[0]), torch.stack(seen[1]))


def test_one_answer_wherever_its_prefix_comes_from(
    model: Model, prompts: list[list[int]], home: Home
) -> None:
    """Cold, from host, from SSD and from another process; whole or in chunks; alone or together."""
    known = 2 * BLOCK
    with engine(model, None, OPTIONS) as alone:
        expected = [ask(alone, prompt, NEW).ids for prompt in prompts]
    with Served(home):
        with engine(model, home, CHUNKED) as cold:
            together = [
                cold.submit(Request(prompt=tuple(prompt), max_new_tokens=NEW)) for prompt in prompts[:3]
            ]
            assert [one.result(timeout=SECONDS).ids for one in together] == expected[:3]
            cold.flush()
        with engine(model, home, OPTIONS) as warm:
            host = [ask(warm, prompt, NEW) for prompt in prompts[:3]]
    with (
        Served(home),
        worker(home, "smollm2", "prefill", pool="128MiB") as (_, prefill),
        worker(home, "smollm2", "decode", pool="128MiB") as (_, decode),
    ):
        with engine(model, home, CHUNKED) as warm:
            ssd = [ask(warm, prompt, NEW) for prompt in prompts[:3]]
        apart = PrefillDecode([prefill], [decode])
        split = apart.submit(Request(prompt=tuple(prompts[3]), max_new_tokens=NEW)).result(timeout=SECONDS)
        handed = decode.submit(Request(prompt=tuple(prompts[3]), max_new_tokens=NEW)).result(timeout=SECONDS)
    assert [answer.ids for answer in host] == expected[:3]
    assert [answer.ids for answer in ssd] == expected[:3]
    assert split.ids == handed.ids == expected[3]
    assert [answer.usage.hits for answer in host] == [{"host": known}] * 3
    assert [answer.usage.hits for answer in ssd] == [{"ssd": known}] * 3
    assert split.usage.hits == {}, "the prefill worker computed it"
    assert split.usage.computed == len(prompts[3]) + len(prompts[3]) + 1 - known + NEW - 2
