"""The engine without a daemon: the pool as a cache, batches, pressure, cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from kvstore.engine.assembly import EngineOptions, build_engine
from kvstore.engine.costs import StepCosts
from kvstore.engine.engine import Engine
from kvstore.engine.model import Model
from kvstore.engine.request import Answer, Request, Sampling
from kvstore.engine.scheduler import plan
from kvstore.errors import InvalidArgument, ShuttingDown
from tests.support.engine_models import engine_model, tiny_gemma, tiny_llama_pair
from tests.support.tiny_model import tokens

COSTS = StepCosts(step=1e-3, row=1e-3, seen=1e-8)
BLOCK = 16
PROMPTS = [tuple(tokens(60 + 7 * index, seed=100 + index)) for index in range(6)]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_llama_pair()[1]


@pytest.fixture
def build(model: Model) -> Iterator[Callable[..., Engine]]:
    built: list[Engine] = []

    def make(pages: int = 64, own: Model | None = None) -> Engine:
        used = own or model
        config = used.config
        page = BLOCK * config.row_width * 4 * config.layers
        options = EngineOptions(pool_bytes=pages * page, block_tokens=BLOCK, sequences_max=4)
        built.append(build_engine(used, None, options, costs=COSTS))
        return built[-1]

    yield make
    for engine in built:
        engine.close()


def greedy(engine: Engine, prompt: tuple[int, ...], new: int = 20) -> tuple[int, ...]:
    return engine.submit(Request(prompt=prompt, max_new_tokens=new)).result(timeout=60).ids


def test_answers_are_those_of_transformers(build: Callable[..., Engine]) -> None:
    theirs, own = tiny_llama_pair()
    ids = torch.tensor([PROMPTS[5]])
    with torch.no_grad():
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
    assert greedy(build(own=own), PROMPTS[5]) == tuple(expected[0, ids.shape[1] :].tolist())


def test_alone_or_batched_with_a_pool_that_is_large_or_tight(build: Callable[..., Engine]) -> None:
    alone = build()
    expected = [greedy(alone, prompt) for prompt in PROMPTS]
    for pages in (64, 12):
        engine = build(pages=pages)
        answers = [engine.submit(Request(prompt=prompt, max_new_tokens=20)) for prompt in PROMPTS * 2]
        assert [answer.result(timeout=60).ids for answer in answers] == expected * 2


def test_a_tight_pool_preempts_and_loses_nothing(build: Callable[..., Engine]) -> None:
    engine = build(pages=12)
    answers = [engine.submit(Request(prompt=prompt, max_new_tokens=60)) for prompt in PROMPTS[:4]]
    usages = [answer.result(timeout=60).usage for answer in answers]
    assert all(usage.generated == 60 for usage in usages)
    assert sum(usage.preemptions for usage in usages) > 0


def test_a_prefix_is_computed_once_and_an_answer_becomes_prefix(build: Callable[..., Engine]) -> None:
    engine = build()
    prompt = tuple(tokens(100))
    first = engine.submit(Request(prompt=prompt, max_new_tokens=20)).result(timeout=60)
    again = engine.submit(Request(prompt=prompt, max_new_tokens=20)).result(timeout=60)
    turn = engine.submit(Request(prompt=(*prompt, *first.ids, 3, 4), max_new_tokens=4)).result(timeout=60)
    assert first.usage.hits == {}
    assert again.usage.hits == {"hbm": 80}, "16 tokens at least are computed"
    assert turn.usage.hits == {"hbm": 96}
    assert again.usage.computed == 100 - 80 + 19
    assert first.ids == again.ids


def test_a_prompt_whose_last_block_is_known_is_computed_aside(build: Callable[..., Engine]) -> None:
    engine = build()
    longer = tuple(tokens(128))
    greedy(engine, longer)
    answer = engine.submit(Request(prompt=longer[:96], max_new_tokens=20)).result(timeout=60)
    assert answer.usage.preemptions == 0
    assert answer.ids == greedy(build(), longer[:96])


@pytest.mark.parametrize("pages", [64, 14])
def test_window_layers_are_right_and_are_resumed(build: Callable[..., Engine], pages: int) -> None:
    """A second time, a second turn, and four together; also where a tight pool takes pages away."""
    theirs = tiny_gemma()

    def expected(prompt: tuple[int, ...]) -> tuple[int, ...]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            answer = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
            )
        return tuple(answer[0, ids.shape[1] :].tolist())

    engine, prompt = build(pages=pages, own=engine_model(theirs)), PROMPTS[4]
    first = engine.submit(Request(prompt=prompt, max_new_tokens=20)).result(timeout=60)
    again = engine.submit(Request(prompt=prompt, max_new_tokens=20)).result(timeout=60)
    turn = (*prompt, *first.ids, *range(20))
    second = engine.submit(Request(prompt=turn, max_new_tokens=20)).result(timeout=60)
    assert first.ids == again.ids == expected(prompt)
    assert second.ids == expected(turn)
    assert (first.usage.hits, again.usage.hits) == ({}, {"hbm": 64})
    assert second.usage.hits == {"hbm": 96}, "from the end of the answer"
    together = [engine.submit(Request(prompt=one, max_new_tokens=20)) for one in (*PROMPTS[:3], turn)]
    assert [one.result(timeout=60).ids for one in together] == [expected(one) for one in (*PROMPTS[:3], turn)]


def test_a_draw_depends_on_seed_and_position_alone(build: Callable[..., Engine]) -> None:
    engine = build()

    def drawn(seed: int) -> tuple[int, ...]:
        sampling = Sampling(temperature=1.0, top_p=0.9, seed=seed)
        request = Request(prompt=PROMPTS[0], max_new_tokens=20, sampling=sampling)
        return engine.submit(request).result(timeout=60).ids

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_mask_forbids_tokens(build: Callable[..., Engine]) -> None:
    def even(_: object, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[1::2] = -torch.inf
        return logits

    request = Request(prompt=PROMPTS[0], max_new_tokens=20, sampling=Sampling(mask=even))
    assert all(token % 2 == 0 for token in build().submit(request).result(timeout=60).ids)


def test_what_never_fits_is_refused_and_a_closed_engine_says_so(build: Callable[..., Engine]) -> None:
    engine = build(pages=12)
    with pytest.raises(InvalidArgument, match="room for"):
        engine.submit(Request(prompt=tuple(tokens(190)), max_new_tokens=40))
    with pytest.raises(InvalidArgument, match="0 prompt"):
        engine.submit(Request(prompt=()))
    running = engine.submit(Request(prompt=PROMPTS[0], max_new_tokens=100))
    engine.close()
    with pytest.raises(ShuttingDown):
        running.result(timeout=60)
    with pytest.raises(ShuttingDown):
        engine.submit(Request(prompt=PROMPTS[0]))


def test_a_request_that_is_cancelled_leaves_nothing_behind(build: Callable[..., Engine]) -> None:
    engine = build(pages=12)
    dropped = engine.submit(Request(prompt=PROMPTS[5], max_new_tokens=80))
    assert dropped.cancel()
    for prompt in PROMPTS:
        assert len(greedy(engine, prompt)) == 20


def test_a_request_that_is_cancelled_as_it_ends_harms_nobody(build: Callable[..., Engine]) -> None:
    engine = build()
    mine: list[Future[Answer]] = []
    asked = threading.Event()

    def cancel(_: int) -> None:
        assert asked.wait(60)
        mine[0].cancel()

    mine.append(engine.submit(Request(prompt=PROMPTS[0], max_new_tokens=1), on_token=cancel))
    asked.set()
    assert len(greedy(engine, PROMPTS[1])) == 20
    assert mine[0].cancelled()


def test_the_next_step_is_planned_while_one_is_computed(
    build: Callable[..., Engine], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, ahead, in_time = threading.Semaphore(0), list[int](), list[bool]()

    def watched_plan(*args: Any, **options: Any) -> Any:
        spans = plan(*args, **options)
        if options["flying"]:
            ahead.append(len(spans))
            plans.release()
        return spans

    class Watched(Model):
        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            in_time.append(plans.acquire(timeout=20))
            return super().forward(*args, **options)

    expected = greedy(build(), PROMPTS[0], 3)
    monkeypatch.setattr("kvstore.engine.engine.plan", watched_plan)
    engine = build(own=Watched(model.config, model.weights))
    assert greedy(engine, PROMPTS[0], 3) == expected
    assert in_time == [True] * 3, "each step ran until the next one was planned"
    assert ahead == [1, 1, 0], "nothing follows the last token"


def test_a_stop_word_ends_an_answer_although_more_was_planned(build: Callable[..., Engine]) -> None:
    engine = build()
    expected = [greedy(engine, prompt) for prompt in PROMPTS[:2]]
    stop = Request(prompt=PROMPTS[0], max_new_tokens=20, stop_ids=frozenset({expected[0][5]}))
    stopped = engine.submit(stop)
    assert greedy(engine, PROMPTS[1]) == expected[1]
    assert stopped.result(timeout=60).ids == expected[0][: expected[0].index(expected[0][5]) + 1]
    assert stopped.result().ended_by == "stop"
