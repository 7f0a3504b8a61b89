"""The order in which blocks leave is exact block LRU, although the index orders runs."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvstore.types import split_keys
from tests.support.driver import put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig

CAPACITY = 64


class BlockLru:
    """Every block on its own: a request touches its blocks tail first, so that heads outlive tails."""

    def __init__(self) -> None:
        self.order: OrderedDict[bytes, None] = OrderedDict()

    def lookup(self, blocks: list[bytes]) -> int:
        hit = next((i for i, block in enumerate(blocks) if block not in self.order), len(blocks))
        self._touch(blocks[:hit])
        return hit

    def write(self, blocks: list[bytes]) -> None:
        present = [block for block in blocks if block in self.order]
        self._touch(present)
        missing = [block for block in blocks if block not in self.order]
        while len(self.order) + len(missing) > CAPACITY:
            self.order.popitem(last=False)
        for block in reversed(missing):
            self.order[block] = None
        self._touch(blocks)

    def _touch(self, blocks: list[bytes]) -> None:
        for block in reversed(blocks):
            self.order.move_to_end(block)


@pytest.mark.parametrize("seed", range(20))
def test_runs_leave_as_single_blocks_would(seed: int) -> None:
    rng = random.Random(seed)
    rig, model = Rig(pages=CAPACITY, ssd=False), BlockLru()
    for _ in range(120):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        keys = rig.chain(tokens)
        blocks = split_keys(keys)
        answer = rig.match(keys)
        assert answer.blocks == model.lookup(blocks)
        if answer.lease:
            rig.ladder.release(answer.lease, used=answer.blocks)
        put(rig.ladder, rig.space, rig.root, keys)
        model.write(blocks)
        resident = {key for node in rig.ladder._catalog.policy.nodes() for key in split_keys(node.keys)}
        assert resident == set(model.order)
    check_integrity(rig.ladder)
