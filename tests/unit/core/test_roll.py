"""The roll of an index: nodes come and go while somebody looks at all of them, and blocks are looked for."""

from __future__ import annotations

import random

import pytest

from kvstore.core.frames import Frame, Node, Slice
from kvstore.core.index import NO_HASH
from kvstore.core.roll import MARKS_BYTES, SHELF_NODES, Roll
from kvstore.tiers.base import FrameKind
from kvstore.types import Fingerprint


def node_of(keys: bytes) -> Node:
    frame = Frame(
        fingerprint=Fingerprint(b"x"), kind=FrameKind.MAIN, parent=NO_HASH, keys=keys, parts=(),
        retention_class="", written_at=0.0,
    )  # fmt: skip
    return Node([Slice(frame, 0, frame.count)], parent_hash=NO_HASH, retention_class="", since=0.0)


@pytest.mark.parametrize("seed", range(3))
def test_who_stays_is_met_once_whoever_comes_and_goes(seed: int) -> None:
    rng, roll = random.Random(seed), Roll()
    nodes = [node_of(rng.randbytes(32)) for _ in range(1000)]
    for node in nodes:
        roll.add(node)
    stay = set(rng.sample(nodes, 500))
    leave = [node for node in nodes if node not in stay]
    met: list[Node] = []
    for some in roll.stretches():
        assert len(some) <= SHELF_NODES
        met += some
        for _ in range(100):
            roll.add(node_of(rng.randbytes(32)))
            if leave:
                roll.remove(leave.pop(rng.randrange(len(leave))))
    assert stay <= set(met)
    assert len(met) == len(set(met))
    assert len(roll) == len(list(roll))


def test_a_block_is_looked_for_among_few() -> None:
    rng, roll = random.Random(1), Roll()
    nodes = [node_of(rng.randbytes(3 * 32)) for _ in range(10 * SHELF_NODES)]
    for node in nodes:
        roll.add(node)
    found = list(roll.holding(nodes[700].key(1)))
    assert nodes[700] in found
    assert len(found) == SHELF_NODES
    assert list(roll.holding(bytes(32))) == []


def test_a_run_that_is_joined_again_and_again_takes_no_more_memory() -> None:
    roll, node = Roll(), node_of(random.Random(1).randbytes(8 * 32))
    roll.add(node)
    shelf = node.shelf
    assert shelf is not None
    for _ in range(5000):
        shelf.note(node.keys)
    assert len(shelf._marks) <= 2 * MARKS_BYTES
    assert node in roll.holding(node.key(5))
