"""The bundled engine over a real daemon: one answer whatever came from where; faults cost time only."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.engine.assembly import EngineOptions
from kvstore.engine.model import Model
from kvstore.engine.pair import PrefillDecode
from kvstore.engine.request import Answer, Request
from kvstore.engine.scheduler import Budget
from kvstore.types import MissReason, Tier
from tests.e2e.engine_setup import SECONDS, Working, ask, engine, worker
from tests.e2e.served import Home, Served
from tests.support.engine_models import engine_model, tiny_gemma, tiny_llama_pair, write_gguf
from tests.support.tiny_model import tokens

OPTIONS = EngineOptions(pool_bytes=4 << 20, block_tokens=16, sequences_max=4, match_seconds=5.0)
CHUNKED = replace(OPTIONS, budget=Budget(busy_seconds=0.5, idle_seconds=0.5))
"""With the costs that tests claim, a chunk is one block."""
PROMPT = tuple(tokens(200))
OTHER = tuple(tokens(200, seed=8))
NEW, LONG = 24, 200


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_llama_pair()[1]


@pytest.fixture
def home() -> Iterator[Home]:
    home = Home()
    yield home
    home.remove()


@contextmanager
def two_workers(home: Home, folder: Path, *, new: int) -> Iterator[tuple[Answer, Working, Working]]:
    """Lend a prefill and a decode worker of a tiny model over a daemon, and the answer to PROMPT of an engine
    that is alone.
    """
    theirs, own = tiny_llama_pair()
    write_gguf(theirs, folder / "tiny.gguf")
    with engine(own, None, OPTIONS) as alone:
        expected = ask(alone, PROMPT, new)
    with (
        Served(home),
        worker(home, folder / "tiny.gguf", "prefill") as prefill,
        worker(home, folder / "tiny.gguf", "decode") as decode,
    ):
        yield expected, prefill, decode


@pytest.mark.slow
def test_prefill_and_decode_are_processes_that_meet_in_the_daemon(home: Home, tmp_path: Path) -> None:
    """Killing either loses no request: who is left does both, and says at its end what it did."""
    request = Request(prompt=PROMPT, max_new_tokens=NEW)
    told: list[int] = []
    with two_workers(home, tmp_path, new=NEW) as (expected, (first, prefill), (second, decode)):
        pair = PrefillDecode([prefill], [decode])
        answer = pair.submit(request, on_token=told.append).result(timeout=SECONDS)
        handed = prefill.submit(Request(prompt=OTHER, max_new_tokens=1)).result(timeout=SECONDS)
        follow = decode.submit(Request(prompt=(*OTHER, *handed.ids))).result(timeout=SECONDS)
        first.kill()
        first.wait()
        alone_again = pair.submit(replace(request, max_new_tokens=NEW)).result(timeout=SECONDS)
        second.terminate()
        said = second.stdout.read() if second.stdout is not None else ""
    assert answer.ids == tuple(told) == alone_again.ids == expected.ids
    assert follow.usage.hits == {"host": 128}, follow.usage
    assert "agent: 4 requests, prompts 803 tokens" in said, said
    assert "hits saved" in said, said


@pytest.mark.slow
def test_a_decode_worker_that_dies_in_an_answer_loses_none_of_it(home: Home, tmp_path: Path) -> None:
    """The other worker says the rest, and no token twice."""
    told: list[int] = []
    with two_workers(home, tmp_path, new=LONG) as (expected, (_, prefill), (dying, decode)):

        def tell(token: int) -> None:
            told.append(token)
            if len(told) == 5:
                dying.kill()
                dying.wait()

        request = Request(prompt=PROMPT, max_new_tokens=LONG)
        answer = PrefillDecode([prefill], [decode]).submit(request, on_token=tell).result(timeout=SECONDS)
    assert answer.ids == tuple(told) == expected.ids


@pytest.mark.parametrize(
    "options",
    [pytest.param(OPTIONS, id="whole"), pytest.param(CHUNKED, id="chunked", marks=pytest.mark.slow)],
)
def test_one_answer_from_nothing_from_host_and_from_ssd(
    model: Model, home: Home, options: EngineOptions
) -> None:
    with engine(model, None, OPTIONS) as alone:
        expected = ask(alone, PROMPT, NEW)
    with Served(home):
        with engine(model, home, options) as cold:
            first = ask(cold, PROMPT, NEW)
            cold.flush()
        with engine(model, home, options) as warm:
            second = ask(warm, PROMPT, NEW)
            turn = ask(warm, (*PROMPT, *second.ids, 5, 6, 7), NEW)
    with Served(home), engine(model, home, options) as restarted:
        third = ask(restarted, PROMPT, NEW)
    assert first.ids == second.ids == third.ids == expected.ids
    assert first.usage.hits == {}, first.usage
    assert second.usage.hits == {"host": 176}, second.usage
    assert second.usage.computed == len(PROMPT) - 176 + NEW - 1
    assert third.usage.hits == {"ssd": 176}, third.usage
    assert turn.usage.hits == {"hbm": 208}, turn.usage  # the answer became prefix
    assert not second.usage.fallbacks


@pytest.mark.parametrize("has_windows", [False, True], ids=["full", "windows"])
def test_what_would_come_slower_than_it_is_computed_is_not_loaded(home: Home, has_windows: bool) -> None:
    """A throttled SSD: what lies in host memory is loaded all the same, if one can go on from there."""
    model = engine_model(tiny_gemma()) if has_windows else tiny_llama_pair()[1]
    with Served(home), engine(model, home, OPTIONS) as cold:
        expected = ask(cold, PROMPT, NEW)
        cold.flush()
    with Served(home):
        with engine(model, home, OPTIONS) as fast:
            ask(fast, PROMPT[:80], 1)  # brings its blocks to host memory
        with engine(model, home, OPTIONS, slow=(Tier.SSD,)) as slow:
            part = ask(slow, PROMPT, NEW)
        with engine(model, home, OPTIONS, slow=(Tier.HOST, Tier.SSD)) as slow:
            none = ask(slow, PROMPT, NEW)
        with engine(model, home, OPTIONS) as fast:
            every = ask(fast, PROMPT, NEW)
    assert none.ids == part.ids == every.ids == expected.ids
    assert (none.usage.hits, none.usage.reason) == ({}, MissReason.SLOWER_THAN_RECOMPUTE)
    assert part.usage.reason is MissReason.SLOWER_THAN_RECOMPUTE
    assert part.usage.hits == ({} if has_windows else {"host": 64})
    assert every.usage.hit == 176
    assert not none.usage.fallbacks + part.usage.fallbacks + every.usage.fallbacks


def test_a_model_with_windows_goes_on_from_host_and_from_ssd(home: Home) -> None:
    """The rows of window layers come with the blocks, for the boundary where the prompt is cut."""
    model = engine_model(tiny_gemma())
    with engine(model, None, OPTIONS) as alone:
        expected = ask(alone, PROMPT, NEW)
        turn = (*PROMPT, *expected.ids, *OTHER[:30])
        follow = ask(alone, turn, NEW)
    with Served(home):
        with engine(model, home, CHUNKED) as cold:
            first = ask(cold, PROMPT, NEW)
            cold.flush()
        with engine(model, home, OPTIONS) as warm:
            second = ask(warm, PROMPT, NEW)
            shorter = ask(warm, PROMPT[:100], NEW)
    with Served(home), engine(model, home, OPTIONS) as restarted:
        third = ask(restarted, turn, NEW)
    assert first.ids == second.ids == expected.ids
    assert second.usage.hits == {"host": 176}, second.usage
    assert shorter.usage.hits == {}, "nobody kept the windows there"
    assert third.ids == follow.ids
    assert third.usage.hits == {"ssd": 208}, third.usage
    assert not second.usage.fallbacks + third.usage.fallbacks


def test_answers_of_a_class_that_drops_them_do_not_become_prefix(model: Model, home: Home) -> None:
    dropping = replace(OPTIONS, unsaved_answers=frozenset({"chat"}))
    with Served(home):
        turns = []
        for retention_class, prompt in (("chat", PROMPT), ("agent", OTHER)):
            with engine(model, home, dropping) as first:
                request = Request(prompt=prompt, max_new_tokens=NEW, retention_class=retention_class)
                turns.append((*prompt, *first.submit(request).result(timeout=SECONDS).ids, *range(20)))
                first.flush()
        with engine(model, home, OPTIONS) as later:
            hits = [ask(later, turn, 1).usage.hits for turn in turns]
    assert hits == [{"host": 192}, {"host": 208}]


def test_a_batch_of_hits_and_misses_answers_as_each_alone(model: Model, home: Home) -> None:
    """Four at once: one found whole, one in part, two not at all."""
    prompts = [PROMPT, (*PROMPT[:100], *OTHER[:90]), OTHER, tuple(tokens(70, seed=9))]
    with engine(model, None, OPTIONS) as alone:
        expected = [ask(alone, prompt, NEW).ids for prompt in prompts]
    with Served(home):
        with engine(model, home, OPTIONS) as filling:
            ask(filling, PROMPT, NEW)
            filling.flush()
        with engine(model, home, CHUNKED) as batched:
            waiting = [batched.submit(Request(prompt=one, max_new_tokens=NEW)) for one in prompts]
            answers = [one.result(timeout=SECONDS) for one in waiting]
    assert [answer.ids for answer in answers] == expected
    assert [answer.usage.hit for answer in answers] == [176, 96, 0, 0]


def test_a_daemon_that_dies_or_hangs_costs_time_and_no_answer(model: Model, home: Home) -> None:
    with engine(model, None, OPTIONS) as alone:
        expected = [ask(alone, PROMPT[:count], NEW).ids for count in (90, 120, 200)]
    with Served(home) as daemon:
        with engine(model, home, OPTIONS) as filling:
            ask(filling, PROMPT, NEW)
            filling.flush()
        with engine(model, home, OPTIONS) as served:
            assert ask(served, PROMPT[:90], NEW).ids == expected[0]
            daemon.send(signal.SIGSTOP)
            hung = ask(served, PROMPT[:120], NEW)
            daemon.stop(signal.SIGKILL)
            gone = ask(served, PROMPT, NEW)
    assert [hung.ids, gone.ids] == expected[1:]
