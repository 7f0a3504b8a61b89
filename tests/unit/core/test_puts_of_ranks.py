"""Several writers under one put_id: late side parts, retries, ranks that disagree, and sessions that end."""

from __future__ import annotations

import pytest

from kvstore.api import CommitRequest, OutcomeRun, PartBlocks, ReserveAnswer, ReserveRequest
from kvstore.errors import InvalidArgument
from kvstore.types import PutOutcome
from tests.support.driver import check_extents, fill, namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig

PUT_ID = b"p1"


class Asked(set[int]):
    """Everybody lives; counts how often somebody asked."""

    count = 0

    def __contains__(self, session: object) -> bool:
        self.count += 1
        return True


def reserve(rig: Rig, keys: bytes, *parts: PartBlocks, **fields: object) -> ReserveAnswer:
    request = ReserveRequest(
        namespace=rig.space.fingerprint,
        parent=rig.root,
        keys=keys,
        parts=parts,
        **{"put_id": PUT_ID, **fields},  # type: ignore[arg-type]
    )
    return rig.ladder.reserve(request)


def commit(rig: Rig, keys: bytes, answer: ReserveAnswer) -> tuple[OutcomeRun, ...]:
    filled = tuple(fill(rig.ladder, rig.space, keys, extent) for extent in answer.extents)
    request = CommitRequest(reservation=answer.reservation, blocks=len(keys) // 32, parts=filled)
    result = rig.ladder.commit(request)
    assert result is not None
    check_integrity(rig.ladder)
    return result.outcomes


@pytest.mark.parametrize("ssd", [True, False])
def test_a_side_part_that_is_committed_after_publication_is_published_by_itself(ssd: bool) -> None:
    rig = Rig(space=namespace(side="checkpoint"), ssd=ssd)
    keys = rig.keys(3)
    main = reserve(rig, keys, PartBlocks(0, 0, 3))
    side = reserve(rig, keys, PartBlocks(1, 2, 1))
    assert commit(rig, keys, main) == (OutcomeRun(PutOutcome.STORED_HOST, 3),)
    assert rig.match(keys).boundaries == ()
    assert commit(rig, keys, side)[-1] == OutcomeRun(PutOutcome.STORED_HOST, 1)
    found = rig.match(keys)
    assert found.boundaries == (3,)
    assert check_extents(rig.ladder, rig.space, keys, found.extents) == 4
    rig.ladder.delete(rig.space.fingerprint, None)


def test_a_side_part_that_never_comes_after_publication_gives_its_slots_back() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys = rig.keys(3)
    main = reserve(rig, keys, PartBlocks(0, 0, 3))
    side = reserve(rig, keys, PartBlocks(1, 2, 1))
    commit(rig, keys, main)
    assert rig.ladder.abort(side.reservation)
    check_integrity(rig.ladder)
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 3 * 4096


def test_the_same_reserve_again_is_refused_and_harms_nothing() -> None:
    rig = Rig()
    keys = rig.keys(2)
    first = reserve(rig, keys)
    with pytest.raises(InvalidArgument, match="already has part 0"):
        reserve(rig, keys)
    check_integrity(rig.ladder)
    assert commit(rig, keys, first) == (OutcomeRun(PutOutcome.STORED_HOST, 2),)


def test_ranks_agree_on_how_exact_their_bytes_are() -> None:
    rig = Rig(space=namespace(parts=2))
    keys = rig.keys(2)
    reserve(rig, keys, PartBlocks(0, 0, 2))
    with pytest.raises(InvalidArgument, match="provenance 0, this request brings 640"):
        reserve(rig, keys, PartBlocks(1, 0, 2), provenance=640)


def test_a_put_renews_the_side_parts_that_are_there() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys = rig.keys(2)
    parts = (PartBlocks(0, 0, 2), PartBlocks(1, 1, 1))
    put(rig.ladder, rig.space, rig.root, keys, parts=parts, retention_class="swa")
    rig.clock.advance(181.0)
    assert rig.match(keys).blocks == 0
    put(rig.ladder, rig.space, rig.root, keys, parts=parts, retention_class="swa")
    assert rig.match(keys).boundaries == (2,)


def test_of_two_writers_of_a_side_part_the_first_wins() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys = rig.keys(2)
    put(rig.ladder, rig.space, rig.root, keys)
    first = reserve(rig, keys, PartBlocks(1, 1, 1))
    second = reserve(rig, keys, PartBlocks(1, 1, 1), put_id=b"p2")
    assert commit(rig, keys, first)[-1] == OutcomeRun(PutOutcome.STORED_HOST, 1)
    commit(rig, keys, second)
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 3 * 4096


def test_a_client_is_asked_after_once_however_much_it_left_behind() -> None:
    rig = Rig()
    rig.alive = Asked()
    for salt in range(20):
        reserve(rig, rig.keys(1, salt=salt), session=5, put_id=b"")
    rig.ladder.end_session(5)
    assert rig.alive.count <= 2
    assert rig.ladder.gauges()["kvstore_quarantined_slots"] == 20


def test_blocks_that_another_put_brought_before_the_rank_came_are_duplicates() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys = rig.keys(4)
    side = reserve(rig, keys, PartBlocks(1, 3, 1))
    put(rig.ladder, rig.space, rig.root, keys[:64])
    main = reserve(rig, keys, PartBlocks(0, 0, 4))
    assert commit(rig, keys, main) == (
        OutcomeRun(PutOutcome.DUPLICATE, 2),
        OutcomeRun(PutOutcome.STORED_HOST, 2),
    )
    commit(rig, keys, side)
    assert rig.match(keys).boundaries == (4,)
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 5 * 4096
