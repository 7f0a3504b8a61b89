"""Window rows as records, and the memory of boundaries."""

from __future__ import annotations

import pytest
import torch

from kvstore.engine.model import Model
from kvstore.engine.windows import Checkpoints, WindowFormat, WindowRows
from kvstore.types import HASH_BYTES
from tests.support.engine_models import WINDOW, engine_model, tiny_gemma

KEYS = bytes(range(4 * HASH_BYTES))


@pytest.fixture(scope="module")
def model() -> Model:
    return engine_model(tiny_gemma())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, WINDOW - 1, 50])
def test_a_record_gives_back_what_it_was_made_of(model: Model, tokens: int, dtype: torch.dtype) -> None:
    config, cpu = model.config, torch.device("cpu")
    form = WindowFormat(config, part=1, dtype=dtype, device=cpu)
    window = WindowRows.blank(config, tokens, dtype=dtype, device=cpu)
    window.rows = {layer: torch.randn(rows.shape).to(dtype) for layer, rows in window.rows.items()}
    record = form.pack(window)
    assert record.shape == (1, form.part.bytes_max)
    back = form.unpack(record, tokens=tokens)
    assert back is not None
    assert back.rows.keys() == window.rows.keys()
    assert all(torch.equal(back.rows[layer], rows) for layer, rows in window.rows.items())


def test_a_record_that_never_came_is_none(model: Model) -> None:
    form = WindowFormat(model.config, part=1, dtype=torch.float32, device=torch.device("cpu"))
    assert form.unpack(form.blank(), tokens=50) is None


def test_the_last_boundary_within_reach_is_found_and_the_least_used_one_goes() -> None:
    checkpoints, windows = Checkpoints(2), [WindowRows({0: torch.zeros(n)}) for n in range(3)]
    for block in (0, 2):
        checkpoints.keep(KEYS[block * HASH_BYTES : (block + 1) * HASH_BYTES], windows[block])
    assert checkpoints.latest(KEYS, 4) == (3, windows[2])
    assert checkpoints.latest(KEYS, 2) == (1, windows[0])
    checkpoints.keep(KEYS[HASH_BYTES : 2 * HASH_BYTES], windows[1])
    assert checkpoints.latest(KEYS, 4) == (2, windows[1]), "the one behind it was not used for longest"
    assert checkpoints.latest(KEYS[HASH_BYTES:], 4)[0] == 1
    assert checkpoints.latest(b"", 0) == (0, WindowRows())
