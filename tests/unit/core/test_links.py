"""How frames hang together, told from their keys alone."""

from __future__ import annotations

import random

import pytest

from kvstore.core import links
from kvstore.core.frames import Frame
from kvstore.core.links import Links
from kvstore.tiers.base import FrameKind
from kvstore.types import HASH_BYTES, BlockHash, Fingerprint


def frame(parent: bytes, keys: bytes) -> Frame:
    return Frame(
        fingerprint=Fingerprint(bytes(32)),
        kind=FrameKind.MAIN,
        parent=BlockHash(parent),
        keys=keys,
        parts=(),
        retention_class="agent",
        written_at=1.0,
    )


def drawn(seed: int) -> list[Frame]:
    """Frames that follow others at their ends, inside them, or nothing, and some that are there twice."""
    source = random.Random(seed)
    made: list[Frame] = []
    for _ in range(source.randint(1, 40)):
        keys = source.randbytes(HASH_BYTES * source.randint(1, 9))
        parent = source.randbytes(HASH_BYTES)
        if made and source.random() < 0.8:
            other = source.choice(made)
            index = source.randrange(other.count)
            parent = other.keys[index * HASH_BYTES : (index + 1) * HASH_BYTES]
            if source.random() < 0.3:  # goes on as the other does
                keys = other.keys[(index + 1) * HASH_BYTES :] + keys
        made.append(frame(parent, keys))
    source.shuffle(made)
    return made


@pytest.mark.parametrize("seed", range(30))
def test_links_are_what_a_search_through_all_blocks_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "BATCH_BLOCKS", 16)
    frames = drawn(seed)
    blocks = [[f.keys[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(f.count)] for f in frames]
    parents = {f.parent for f in frames}
    found = Links(frames)
    assert found.inside == parents & {key for some in blocks for key in some}
    for number, some in enumerate(blocks):
        branches = [index for index, key in enumerate(some) if key in parents]
        assert found.branches.get(number, []) == branches
        others = {key for other, keys in enumerate(blocks) if other != number for key in keys}
        assert (number in found.overlapping) == (not others.isdisjoint(some))
    assert {f for numbers in found.followers.values() for f in numbers} == set(range(len(frames)))
