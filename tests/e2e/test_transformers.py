"""The adapter against a real daemon, beyond what the suite for adapters asks of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_adapters.transformers import PrefixCache
from engine_adapters.transformers.engine import generate_without_store
from engine_adapters.transformers.prefix_cache import hit_blocks
from kvstore.cli.child import ChildDaemon
from kvstore.client import Client
from kvstore.types import MissReason
from tests.support.tiny_model import tiny_model, tokens

NEW = 20
BLOCK_TOKENS = 16
DEADLINE_SECONDS = 10.0
"""Tests judge what happens, not how fast a busy machine is."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ChildDaemon]:
    """Lend a daemon that this test may kill."""
    with ChildDaemon(tmp_path, arena_bytes=64 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Lend a client of a daemon that others use too: each test has prompts of its own."""
    with (
        ChildDaemon(tmp_path_factory.mktemp("daemon"), arena_bytes=64 << 20) as running,
        Client(running.address) as opened,
    ):
        yield opened


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def answer(model: Any, client: Client, prompt: list[int], **options: Any) -> dict[str, Any]:
    """Ask through the store and say everything that a test may want to know."""
    cache = PrefixCache(
        model, client, block_tokens=BLOCK_TOKENS, match_seconds_max=DEADLINE_SECONDS, **options
    )
    result = cache.generate(prompt, max_new_tokens=NEW)
    return {
        "ids": list(result.ids),
        "hit_tokens": result.hit_tokens,
        "tiers": hit_blocks(result.tiers),
        "reason": result.prefill.reason,
        "stored": result.prompt_saved.stored + result.answer_saved.stored,
    }


def plain(model: Any, prompt: list[int]) -> list[int]:
    return generate_without_store(model, prompt, max_new_tokens=NEW, on_token=lambda: None)


def test_a_miss_and_a_hit_answer_as_without_the_store(model: Any, client: Client) -> None:
    prompt = tokens(500, seed=11)
    cold = answer(model, client, prompt)
    warm = answer(model, client, prompt)
    assert cold["ids"] == warm["ids"] == plain(model, prompt)
    assert (cold["hit_tokens"], cold["reason"]) == (0, MissReason.NEVER_STORED)
    assert cold["stored"] == (500 + NEW - 1) // 16
    assert (warm["hit_tokens"], warm["tiers"], warm["reason"]) == (480, {"host": 30}, None)


def test_an_answer_is_a_prefix_of_the_next_turn(model: Any, client: Client) -> None:
    prompt = tokens(490, seed=12)
    first = answer(model, client, prompt)
    following = [*prompt, *first["ids"], *tokens(30, seed=3)]
    second = answer(model, client, following)
    assert second["hit_tokens"] == (490 + NEW - 1) // 16 * 16 > 490
    assert second["ids"] == plain(model, following)


@pytest.mark.parametrize("change", [{"seed": 2}, {"rope_theta": 20000.0}])
def test_models_of_equal_shape_never_meet(model: Any, client: Client, change: dict[str, Any]) -> None:
    prompt = tokens(300, seed=13)
    answer(model, client, prompt)
    other = tiny_model(**change)
    result = answer(other, client, prompt)
    assert (result["hit_tokens"], result["reason"]) == (0, MissReason.IDENTITY_MISMATCH)
    assert result["ids"] == plain(other, prompt)


def test_tenants_never_meet(model: Any, client: Client) -> None:
    prompt = tokens(300, seed=14)
    answer(model, client, prompt, tenant_secret=b"one")
    assert answer(model, client, prompt, tenant_secret=b"two")["hit_tokens"] == 0
    assert answer(model, client, prompt, tenant_secret=b"one")["hit_tokens"] == 272


def test_a_daemon_killed_inside_a_request_fails_none(model: Any, daemon: ChildDaemon) -> None:
    prompt = tokens(300)
    killed: list[int] = []

    def kill(_: int) -> None:
        if not killed:
            killed.append(daemon.pid)
            os.kill(daemon.pid, signal.SIGKILL)

    with Client(daemon.address) as client:
        cache = PrefixCache(model, client, block_tokens=BLOCK_TOKENS, match_seconds_max=DEADLINE_SECONDS)
        result = cache.generate(prompt, max_new_tokens=NEW, on_token=kill)
    assert killed
    assert list(result.ids) == plain(model, prompt)
    assert result.prompt_saved.reason is not None


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)  # the first run on a machine converts the model
def test_smollm2_resumes_from_a_daemon_that_was_restarted(daemon: ChildDaemon) -> None:
    from engine_adapters.transformers import smollm2
    from kvstore.cli.demo_text import conversation

    model, tokenizer = smollm2.load(lambda _: None)
    chat = conversation(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], tokens=400)
    prompt = list(chat.opening)
    reference = plain(model, prompt)
    with Client(daemon.address) as client:
        cold = PrefixCache(model, client, match_seconds_max=DEADLINE_SECONDS).generate(
            prompt, max_new_tokens=NEW
        )
    daemon.stop()
    daemon.start()
    with Client(daemon.address) as client:
        warm = PrefixCache(model, client, match_seconds_max=DEADLINE_SECONDS).generate(
            prompt, max_new_tokens=NEW
        )
    assert list(cold.ids) == list(warm.ids) == reference
    assert warm.hit_tokens == (len(prompt) - 16) // 64 * 64
    assert {str(run.tier) for run in warm.tiers} == {"ssd"}
