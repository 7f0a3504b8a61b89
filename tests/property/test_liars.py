"""Writers that lie about what follows what: nothing hangs or is lost, every structure stays whole."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import InvalidArgument
from tests.support.driver import put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig

KEYS = [bytes([number]) * 32 for number in range(12)]


def do_something(rig: Rig, rng: random.Random) -> Rig:
    keys = b"".join(rng.sample(KEYS, rng.randint(1, 5)))
    what = rng.random()
    if what < 0.5:
        parent = rng.choice([rig.root, *KEYS])
        try:
            put(
                rig.ladder, rig.space, parent, keys, retention_class=rng.choice(["agent", "handoff", "batch"])
            )
        except InvalidArgument:
            assert parent in KEYS
    elif what < 0.7:
        answer = rig.match(keys, retention_class=rng.choice(["", "chat", "batch"]))
        if answer.lease:
            rig.ladder.release(answer.lease, used=answer.blocks)
    elif what < 0.8:
        rig.ladder.delete(rig.space.fingerprint, rng.choice(KEYS))
    elif what < 0.83:
        rig.ladder.delete(rig.space.fingerprint, None)
        assert not rig.ladder.list(rig.space.fingerprint).runs
    elif what < 0.95:
        rig.tick(rng.choice([1.0, 70.0, 4000.0]))
    else:
        rig.ladder.close(deadline_seconds=0.0)
        return Rig(disk=rig.disk, space=rig.space, clock=rig.clock)
    return rig


@pytest.mark.parametrize("seed", range(12))
def test_lies_harm_only_the_liar(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(pages=rng.choice([30, 512]))
    for _ in range(60):
        rig = do_something(rig, rng)
        check_integrity(rig.ladder)


def test_runs_that_claim_to_follow_one_another_make_no_ring() -> None:
    rig = Rig()
    first, second = KEYS[:2]
    put(rig.ladder, rig.space, second, first)
    put(rig.ladder, rig.space, first, second)
    check_integrity(rig.ladder)
    assert rig.length(first) == 0
    rig.ladder.touch(rig.space.fingerprint, first)
    assert rig.ladder.delete(rig.space.fingerprint, None) == 2


def test_a_block_does_not_follow_itself() -> None:
    rig = Rig()
    with pytest.raises(InvalidArgument, match="the parent is one of the blocks"):
        put(rig.ladder, rig.space, KEYS[1], KEYS[0] + KEYS[1])
