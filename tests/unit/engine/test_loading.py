"""A load into pages, over a store that gives what a test wants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstore.client import Fetched, Match
from kvstore.clock import SystemClock
from kvstore.engine.loading import Loader
from kvstore.engine.pool import KvPool
from kvstore.types import MissReason, ReleaseOutcome
from tests.support.engine_models import tiny_llama_pair

PAGES = (3, 4, 5, 9, 10, 2)
"""Three stretches of neighbours."""
FIRST = 2


class Store:
    """Fills a block with one byte that tells it and its stage; of some stages it lacks the last blocks."""

    def __init__(self, limits: dict[int, int]) -> None:
        self.limits = limits
        self.released: list[tuple[int, ReleaseOutcome]] = []

    def fetch(self, match: Match, into: Any, *, first: int, blocks: int, deadline_seconds: float) -> Fetched:
        ((stage, arrays),) = into.items()
        good = max(0, min(blocks, self.limits.get(stage, 99) - first))
        for array in arrays:
            for index in range(good):
                array[index] = byte_of(stage, first + index)
        return Fetched(good, None if good == blocks else MissReason.CORRUPT)

    def release(self, match: Match, *, used: int, outcome: ReleaseOutcome) -> None:
        self.released.append((used, outcome))


def byte_of(stage: int, block: int) -> int:
    return 16 * (stage + 1) + block


def pool() -> KvPool:
    model = tiny_llama_pair()[1]
    made = KvPool(
        model.config,
        block_tokens=4,
        page_count=12,
        scratch_count=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    made.stages = tuple((layer,) for layer in made.layers)
    return made


@pytest.mark.parametrize(
    ("limits", "blocks"), [({}, 6), ({0: 4}, 2), ({1: 4}, 2), ({0: 6, 1: 3}, 1), ({1: 0}, 0)]
)
def test_what_came_is_there_in_every_layer(limits: dict[int, int], blocks: int) -> None:
    store, pages = Store(limits), pool()
    loader = Loader(store, pages, SystemClock())  # type: ignore[arg-type]
    load = loader.start(Match(blocks=8), first=FIRST, pages=PAGES, seconds=10.0)
    assert load.wait_end(seconds=10.0)
    loader.close()
    assert load.result is not None
    assert (load.result.blocks, load.result.whole) == (blocks, not limits)
    for stage in range(len(pages.stages)):
        for index in range(blocks):
            (view,) = pages.views(stage, [PAGES[index]])
            assert set(view[0].tolist()) == {byte_of(stage, FIRST + index)}
    used = ReleaseOutcome.USED if blocks else ReleaseOutcome.UNUSED
    assert store.released == [(FIRST + blocks if blocks else 0, used)]
