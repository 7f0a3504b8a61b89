"""A put whose blocks orphans have been waiting for is cut at once, and all of it is as good as any."""

from __future__ import annotations

import pytest

from kvstore.api import CommitAnswer, CommitRequest, ReserveAnswer, ReserveRequest
from kvstore.types import HASH_BYTES, AckTier, PutOutcome
from tests.support.driver import fill
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig


def reserve(rig: Rig, keys: bytes) -> ReserveAnswer:
    return rig.ladder.reserve(ReserveRequest(namespace=rig.space.fingerprint, parent=rig.root, keys=keys))


def commit(rig: Rig, keys: bytes, answer: ReserveAnswer) -> list[CommitAnswer]:
    """Commit with ack=ssd and return what came of it."""
    parts = tuple(fill(rig.ladder, rig.space, keys, extent) for extent in answer.extents)
    heard: list[CommitAnswer] = []
    request = CommitRequest(
        reservation=answer.reservation, blocks=len(keys) // HASH_BYTES, parts=parts, ack=AckTier.SSD
    )
    now = rig.ladder.commit(request, heard.append)
    return heard if now is None else [now]


@pytest.mark.parametrize("shared", [1, 4, 7])
def test_what_was_acknowledged_on_ssd_is_there_after_a_crash(shared: int) -> None:
    rig = Rig()
    first = rig.chain([0] * shared + [1] * (8 - shared))
    second = rig.chain([0] * shared + [2] * 4)
    one, other = reserve(rig, first), reserve(rig, second)
    assert [run.outcome for run in other.outcomes] == [PutOutcome.IN_FLIGHT, PutOutcome.RESERVED]
    commit(rig, second, other)
    (answer,) = commit(rig, first, one)
    assert [(run.outcome, run.count) for run in answer.outcomes] == [(PutOutcome.STORED_SSD, 8)]
    again = Rig(disk=rig.disk)
    assert again.length(first) == 8
    assert again.length(second) == shared + 4
    check_integrity(again.ladder)


def test_all_of_it_can_be_evicted() -> None:
    rig = Rig(pages=16, ssd=False)
    first = rig.chain([0] * 4 + [1] * 4)
    one, other = reserve(rig, first), reserve(rig, rig.chain([0] * 4 + [2] * 4))
    commit(rig, rig.chain([0] * 4 + [2] * 4), other)
    commit(rig, first, one)
    check_integrity(rig.ladder)
    big = rig.chain([9] * 15)
    granted = reserve(rig, big)
    assert sum(run.count for run in granted.outcomes if run.outcome is PutOutcome.RESERVED) == 15
