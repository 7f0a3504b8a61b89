"""The forward pass against that of transformers, both families, in one shot and in chunks over pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvstore.engine.attention import Span, StepAttention
from kvstore.engine.model import Model, Rows
from kvstore.engine.pool import KvPool
from kvstore.engine.windows import WindowRows
from tests.support.engine_models import WINDOW, engine_model, tiny_gemma
from tests.support.tiny_model import tiny_model, tokens

COUNT = 200
IDS = torch.tensor(tokens(COUNT))
ONE_SHOT_TOLERANCE = 1e-6
"""Logits spread over about 1.6; the same operations on the same rows."""
CHUNKED_TOLERANCE = 1e-4
"""Other row counts run other kernels."""


def logits(model: Model, chunks: Sequence[int], pages: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Run a prompt in chunks and return the logits of every row."""
    cpu = torch.device("cpu")
    pool = KvPool(model.config, block_tokens=16, page_count=40, scratch_count=1, dtype=dtype, device=cpu)
    window, first, out = WindowRows(), 0, []
    for count in chunks:
        here = slice(first, first + count)
        rows = Rows(IDS[here], torch.arange(first, first + count), torch.arange(count))
        spans = [Span(first, count, pages, window)]
        out.append(model.forward(rows, StepAttention(model.config, pool, spans, dtype)))
        first += count
    return torch.cat(out)


@pytest.mark.parametrize("build", [tiny_model, tiny_gemma])
def test_logits_are_those_of_transformers(build: Callable[[], Any]) -> None:
    theirs = build()
    with torch.no_grad():
        expected = theirs(IDS[None]).logits[0]
    own = logits(engine_model(theirs), [COUNT], range(1, 14), torch.float32)
    assert (own - expected).abs().max() <= ONE_SHOT_TOLERANCE


@pytest.mark.parametrize("build", [tiny_model, tiny_gemma])
def test_chunks_over_scattered_pages_change_rounding_only(build: Callable[[], Any]) -> None:
    model = engine_model(build())
    whole = logits(model, [COUNT], range(1, 14), torch.float32)
    pieces = logits(model, [WINDOW - 1, 1, 1, 40, 3, 148], [3, 1, 9, 8, *range(11, 29, 2)], torch.float32)
    assert (whole - pieces).abs().max() <= CHUNKED_TOLERANCE
    assert (whole.argmax(-1) == pieces.argmax(-1)).all()


def test_a_window_hides_what_lies_before_it() -> None:
    """Exactly the last `window` tokens are seen: by index, since an error of one is invisible in a metric."""
    model = engine_model(tiny_gemma())
    config = model.config
    pool = KvPool(
        config,
        block_tokens=16,
        page_count=4,
        scratch_count=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    keys = torch.zeros(32, 2, config.kv_heads, config.head_dim)
    keys[:, 1] = torch.eye(32)[:, : config.head_dim].repeat_interleave(1, 0)[:, None]
    attention = StepAttention(config, pool, [Span(0, 32, (1, 2), WindowRows())], torch.float32)
    seen = attention.attend(0, torch.zeros(32, config.heads, config.head_dim), keys)
    for row in range(32):
        weights = seen[row, 0]
        expected = [1.0 if row - WINDOW < column <= row else 0.0 for column in range(config.head_dim)]
        assert [float(value > 0) for value in weights] == expected


def test_bfloat16_runs() -> None:
    theirs = tiny_model()
    exact = logits(engine_model(theirs), [COUNT], range(1, 14), torch.float32)
    rounded = logits(engine_model(theirs, torch.bfloat16), [COUNT], range(1, 14), torch.bfloat16)
    assert (exact - rounded).abs().mean() < 0.1 * exact.std()
