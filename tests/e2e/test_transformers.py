"""The adapter against a real daemon: real processes, real kills, a real restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_adapters.transformers.engine import generate_without_store
from kvstore.cli.child import ChildDaemon
from kvstore.client import Client
from kvstore.types import MissReason
from tests.e2e.adapter_worker import answer
from tests.support.tiny_model import tiny_model, tokens

NEW = 20
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ChildDaemon]:
    with ChildDaemon(tmp_path, arena_bytes=64 << 20) as running:
        yield running


@pytest.fixture
def client(daemon: ChildDaemon) -> Iterator[Client]:
    with Client(daemon.address) as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def plain(model: Any, prompt: list[int]) -> list[int]:
    return generate_without_store(model, prompt, max_new_tokens=NEW, on_token=lambda: None)


def in_a_fresh_process(address: str, prompt: list[int], **changes: Any) -> dict[str, Any]:
    job = {"address": address, "prompt": prompt, "max_new_tokens": NEW, "model": changes}
    command = [sys.executable, "-m", "tests.e2e.adapter_worker"]
    done = subprocess.run(
        command, check=False, input=json.dumps(job), capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_miss_and_a_hit_answer_as_without_the_store(model: Any, client: Client) -> None:
    prompt = tokens(500)
    cold = answer(model, client, prompt, max_new_tokens=NEW)
    warm = answer(model, client, prompt, max_new_tokens=NEW)
    assert cold["ids"] == warm["ids"] == plain(model, prompt)
    assert (cold["hit_tokens"], cold["reason"]) == (0, MissReason.NEVER_STORED)
    assert cold["stored"] == (500 + NEW - 1) // 16
    assert (warm["hit_tokens"], warm["tiers"], warm["reason"]) == (480, {"host": 30}, None)


def test_an_answer_is_a_prefix_of_the_next_turn(model: Any, client: Client) -> None:
    prompt = tokens(490)
    first = answer(model, client, prompt, max_new_tokens=NEW)
    following = [*prompt, *first["ids"], *tokens(30, seed=3)]
    second = answer(model, client, following, max_new_tokens=NEW)
    assert second["hit_tokens"] == (490 + NEW - 1) // 16 * 16 > 490
    assert second["ids"] == plain(model, following)


def test_a_fresh_process_resumes_also_from_ssd(model: Any, daemon: ChildDaemon) -> None:
    prompt = tokens(500)
    first = in_a_fresh_process(daemon.address, prompt)
    second = in_a_fresh_process(daemon.address, prompt)
    daemon.stop()
    daemon.start()
    third = in_a_fresh_process(daemon.address, prompt)
    assert first["ids"] == second["ids"] == third["ids"] == plain(model, prompt)
    assert (second["hit_tokens"], second["tiers"]) == (480, {"host": 30})
    assert (third["hit_tokens"], third["tiers"]) == (480, {"ssd": 30})


@pytest.mark.parametrize("change", [{"seed": 2}, {"rope_theta": 20000.0}])
def test_models_of_equal_shape_never_meet(model: Any, client: Client, change: dict[str, Any]) -> None:
    prompt = tokens(300)
    answer(model, client, prompt, max_new_tokens=NEW)
    other = tiny_model(**change)
    result = answer(other, client, prompt, max_new_tokens=NEW)
    assert (result["hit_tokens"], result["reason"]) == (0, MissReason.IDENTITY_MISMATCH)
    assert result["ids"] == plain(other, prompt)


def test_tenants_never_meet(model: Any, client: Client) -> None:
    prompt = tokens(300)
    answer(model, client, prompt, max_new_tokens=NEW, tenant_secret=b"one")
    assert answer(model, client, prompt, max_new_tokens=NEW, tenant_secret=b"two")["hit_tokens"] == 0
    assert answer(model, client, prompt, max_new_tokens=NEW, tenant_secret=b"one")["hit_tokens"] == 272


def test_without_a_daemon_the_model_computes(model: Any, tmp_path: Path) -> None:
    prompt = tokens(100)
    with Client(f"unix:{tmp_path / 'nobody.sock'}") as client:
        result = answer(model, client, prompt, max_new_tokens=NEW)
    assert result["ids"] == plain(model, prompt)
    assert (result["hit_tokens"], result["stored"]) == (0, 0)
    assert result["reason"] in {MissReason.DAEMON_GONE, MissReason.BREAKER_OPEN, MissReason.DEADLINE}


def test_a_daemon_killed_between_two_requests_fails_none(
    model: Any, daemon: ChildDaemon, client: Client
) -> None:
    prompt = tokens(300)
    answer(model, client, prompt, max_new_tokens=NEW)
    os.kill(daemon.pid, signal.SIGKILL)
    result = answer(model, client, prompt, max_new_tokens=NEW)
    assert result["ids"] == plain(model, prompt)
    assert (result["hit_tokens"], result["stored"]) == (0, 0)


def test_the_same_process_resumes_when_the_daemon_is_back(
    model: Any, daemon: ChildDaemon, client: Client
) -> None:
    prompt = tokens(300)
    answer(model, client, prompt, max_new_tokens=NEW)
    daemon.stop()
    assert answer(model, client, prompt, max_new_tokens=NEW)["hit_tokens"] == 0
    daemon.start()
    deadline = time.monotonic() + 40.0
    while not (result := answer(model, client, prompt, max_new_tokens=NEW))["hit_tokens"]:
        assert time.monotonic() < deadline, f"still no hit: {result}"
        time.sleep(0.2)
    assert result["ids"] == plain(model, prompt)


def test_a_daemon_killed_inside_a_request_fails_none(model: Any, daemon: ChildDaemon, client: Client) -> None:
    from engine_adapters.transformers import PrefixCache

    prompt = tokens(300)
    cache = PrefixCache(model, client, block_tokens=16, match_seconds_max=10.0)
    killed: list[int] = []

    def kill(_: int) -> None:
        if not killed:
            killed.append(daemon.pid)
            os.kill(daemon.pid, signal.SIGKILL)

    result = cache.generate(prompt, max_new_tokens=NEW, on_token=kill)
    assert killed
    assert list(result.ids) == plain(model, prompt)
    assert result.prompt_saved.reason is not None


def test_a_hung_daemon_fails_none(model: Any, daemon: ChildDaemon, client: Client) -> None:
    from engine_adapters.transformers import PrefixCache

    prompt = tokens(300)
    cache = PrefixCache(model, client, block_tokens=16)
    cache.prefill(prompt)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        hung = cache.generate(prompt, max_new_tokens=NEW)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert list(hung.ids) == plain(model, prompt)
    assert (hung.hit_tokens, hung.prefill.reason) == (0, MissReason.DEADLINE)


@pytest.mark.model
@pytest.mark.timeout(300)  # the first run on a machine converts the model
def test_smollm2_resumes_from_a_daemon_that_was_restarted(daemon: ChildDaemon) -> None:
    from engine_adapters.transformers import PrefixCache, smollm2
    from kvstore.cli.demo_text import conversation

    model, tokenizer = smollm2.load(lambda _: None)
    chat = conversation(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], tokens=400)
    prompt = list(chat.opening)
    reference = plain(model, prompt)
    with Client(daemon.address) as client:
        cold = PrefixCache(model, client, match_seconds_max=10.0).generate(prompt, max_new_tokens=NEW)
    daemon.stop()
    daemon.start()
    with Client(daemon.address) as client:
        warm = PrefixCache(model, client, match_seconds_max=10.0).generate(prompt, max_new_tokens=NEW)
    assert list(cold.ids) == list(warm.ids) == reference
    assert warm.hit_tokens == (len(prompt) - 16) // 64 * 64
    assert {str(run.tier) for run in warm.tiers} == {"ssd"}
