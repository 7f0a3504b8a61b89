"""What a hit costs, counted in Python calls: it must not grow by the block."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest

from kvstore.rpc import wire
from kvstore.types import ReleaseOutcome
from tests.support.driver import put
from tests.unit.core.rig import Rig

CALLS_MAX = 214
"""Of one match, its reply as a message, and its release: 190 from memory, 213 with an SSD."""


def calls_of_a_hit(blocks: int, *, ssd: bool) -> int:
    rig = Rig(pages=1024, ssd=ssd)
    keys = rig.keys(blocks)
    put(rig.ladder, rig.space, rig.root, keys)
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            counted[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    for _ in range(2):  # the first one pays for what is kept
        counted.clear()
        sys.setprofile(count)
        try:
            answer = rig.match(keys)
            wire.match_answer_to_wire(answer, layout=rig.space.layout).SerializeToString()
            rig.ladder.release(answer.lease, used=blocks, outcome=ReleaseOutcome.USED)
        finally:
            sys.setprofile(None)
        assert answer.blocks == blocks
    return counted.total()


@pytest.mark.parametrize("ssd", [False, True])
def test_a_hit_costs_the_same_for_any_number_of_blocks(ssd: bool) -> None:
    few, many = (calls_of_a_hit(blocks, ssd=ssd) for blocks in (8, 512))
    assert many == few
    assert few <= CALLS_MAX
