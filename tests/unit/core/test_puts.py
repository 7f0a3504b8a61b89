"""Reservations, put_id, parts, first writer wins, and what becomes of writers that fail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvstore import hashing
from kvstore.api import (
    CommitAnswer,
    CommitRequest,
    OutcomeRun,
    PartBlocks,
    PartDigests,
    ReserveAnswer,
    ReserveRequest,
)
from kvstore.errors import InvalidArgument, LeaseExpired, UnknownNamespace
from kvstore.types import PART_WAIT_SECONDS, AckTier, BlockHash, Fingerprint, MissReason, PutOutcome
from tests.support.driver import check_extents, fill, namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig


def reserve(rig: Rig, keys: bytes, **fields: object) -> ReserveRequest:
    return ReserveRequest(namespace=rig.space.fingerprint, parent=rig.root, keys=keys, **fields)  # type: ignore[arg-type]


def commit_all(rig: Rig, keys: bytes, number: int, extents: tuple) -> CommitAnswer:  # type: ignore[type-arg]
    filled = tuple(fill(rig.ladder, rig.space, keys, extent) for extent in extents)
    answer = rig.ladder.commit(CommitRequest(reservation=number, blocks=len(keys) // 32, parts=filled))
    assert answer is not None
    return answer


def test_nothing_is_visible_before_the_commit() -> None:
    rig = Rig()
    keys = rig.keys(4)
    answer = rig.ladder.reserve(reserve(rig, keys))
    found = rig.match(keys)
    assert (found.blocks, found.reason) == (0, MissReason.IN_FLIGHT)
    assert commit_all(rig, keys, answer.reservation, answer.extents).outcomes == (
        OutcomeRun(PutOutcome.STORED_HOST, 4),
    )
    assert rig.length(keys) == 4


def test_the_first_writer_wins() -> None:
    rig = Rig()
    keys = rig.keys(4)
    first = rig.ladder.reserve(reserve(rig, keys))
    second = rig.ladder.reserve(reserve(rig, keys))
    assert second.reservation == 0
    assert second.outcomes == (OutcomeRun(PutOutcome.IN_FLIGHT, 4),)
    commit_all(rig, keys, first.reservation, first.extents)
    third = rig.ladder.reserve(reserve(rig, keys))
    assert (third.reservation, third.outcomes) == (0, (OutcomeRun(PutOutcome.DUPLICATE, 4),))


def test_a_shorter_commit_publishes_a_prefix_and_gives_the_rest_back() -> None:
    rig = Rig()
    keys = rig.keys(6)
    answer = put(rig.ladder, rig.space, rig.root, keys, blocks=4)
    assert answer is not None and answer.outcomes[0] == OutcomeRun(PutOutcome.STORED_HOST, 4)
    assert rig.length(keys) == 4
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 4 * 4096
    check_integrity(rig.ladder)


def test_commit_twice_gives_the_same_answer() -> None:
    rig = Rig()
    keys = rig.keys(2)
    answer = rig.ladder.reserve(reserve(rig, keys))
    first = commit_all(rig, keys, answer.reservation, answer.extents)
    assert rig.ladder.commit(CommitRequest(reservation=answer.reservation, blocks=2, parts=())) == first


def test_a_commit_of_nothing_known_is_refused() -> None:
    with pytest.raises(LeaseExpired, match="0x4d"):
        Rig().ladder.commit(CommitRequest(reservation=77, blocks=1, parts=()))


def test_a_reservation_that_is_never_committed_ends_and_its_slots_wait_for_the_writer() -> None:
    rig = Rig()
    rig.alive.add(5)
    keys = rig.keys(3)
    answer = rig.ladder.reserve(reserve(rig, keys, session=5))
    rig.tick(61.0)
    assert rig.ladder.gauges()["kvstore_quarantined_slots"] == 3
    assert rig.events.total("kvstore_reservations_expired_total") == 1
    late = rig.ladder.commit(CommitRequest(reservation=answer.reservation, blocks=3, parts=()))
    assert late is not None and late.outcomes == (OutcomeRun(PutOutcome.EXPIRED, 3),)
    assert rig.ladder.gauges()["kvstore_quarantined_slots"] == 0
    assert rig.length(keys) == 0


def test_slots_of_a_dead_writer_are_free_once_the_kernel_says_so() -> None:
    rig = Rig()
    rig.alive.add(5)
    rig.ladder.reserve(reserve(rig, rig.keys(3), session=5))
    rig.ladder.end_session(5)
    assert rig.ladder.gauges()["kvstore_quarantined_slots"] == 3
    rig.alive.clear()
    rig.tick(0.1)
    assert rig.ladder.gauges()["kvstore_quarantined_slots"] == 0
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 0


def test_abort_frees_the_slots_and_is_idempotent() -> None:
    rig = Rig()
    answer = rig.ladder.reserve(reserve(rig, rig.keys(3)))
    assert rig.ladder.abort(answer.reservation)
    assert not rig.ladder.abort(answer.reservation)
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 0
    check_integrity(rig.ladder)


def test_blocks_of_two_ranks_become_visible_together() -> None:
    rig = Rig(space=namespace(parts=2))
    keys = rig.keys(3)
    ranks = [
        rig.ladder.reserve(reserve(rig, keys, put_id=b"step-1", parts=(PartBlocks(rank, 0, 3),)))
        for rank in (0, 1)
    ]
    first = commit_all(rig, keys, ranks[0].reservation, ranks[0].extents)
    assert first.outcomes == (OutcomeRun(PutOutcome.PART_PENDING, 3),)
    assert rig.match(keys).reason is MissReason.PART_MISSING
    last = commit_all(rig, keys, ranks[1].reservation, ranks[1].extents)
    assert last.outcomes == (OutcomeRun(PutOutcome.STORED_HOST, 3),)
    answer = rig.match(keys)
    assert answer.blocks == 3 and check_extents(rig.ladder, rig.space, keys, answer.extents) == 6


def test_the_shortest_rank_decides_how_much_is_visible() -> None:
    rig = Rig(space=namespace(parts=2))
    keys = rig.keys(5)
    for rank, blocks in ((0, 5), (1, 3)):
        put(
            rig.ladder, rig.space, rig.root, keys, put_id=b"x", parts=(PartBlocks(rank, 0, 5),), blocks=blocks
        )
    assert rig.length(keys) == 3
    check_integrity(rig.ladder)


def test_a_put_whose_other_rank_never_comes_is_dropped() -> None:
    rig = Rig(space=namespace(parts=2))
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys, put_id=b"x", parts=(PartBlocks(0, 0, 3),))
    rig.tick(61.0)
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 0
    assert rig.events.total("kvstore_puts_incomplete_total") == 1
    put(rig.ladder, rig.space, rig.root, keys)
    assert rig.length(keys) == 3


def test_a_put_that_waits_for_a_rank_makes_way_for_one_that_brings_all() -> None:
    rig = Rig(space=namespace(parts=2))
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys, put_id=b"x", parts=(PartBlocks(0, 0, 3),))
    put(rig.ladder, rig.space, rig.root, rig.keys(4))
    assert rig.length(keys) == 0, "the other rank may be on its way"
    rig.tick(PART_WAIT_SECONDS)
    put(rig.ladder, rig.space, rig.root, rig.keys(4))
    assert rig.length(rig.keys(4)) == 4
    late = put(rig.ladder, rig.space, rig.root, keys, put_id=b"x", parts=(PartBlocks(1, 0, 3),))
    assert late is not None
    assert {run.outcome for run in late.outcomes} == {PutOutcome.DUPLICATE}
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 8 * 4096
    check_integrity(rig.ladder)


def test_a_put_with_a_writer_makes_no_way() -> None:
    rig = Rig(space=namespace(parts=2))
    keys = rig.keys(3)
    whole = ReserveRequest(namespace=rig.space.fingerprint, parent=rig.root, keys=keys)
    assert rig.ladder.reserve(whole).reservation
    rig.tick(PART_WAIT_SECONDS)
    second = rig.ladder.reserve(whole)
    assert second.outcomes == (OutcomeRun(PutOutcome.IN_FLIGHT, 3),)


def test_the_end_of_a_put_leaves_what_a_rank_of_another_brings_in_flight() -> None:
    """The rank had room for a block that the first rank of its put had none for, and a rival took up."""
    rig = Rig(space=namespace(parts=2), pages=4, ssd=False)
    keys = rig.keys(2)

    def bring(name: bytes, part: int, blocks: bytes) -> ReserveAnswer:
        count = len(blocks) // 32
        return rig.ladder.reserve(reserve(rig, blocks, put_id=name, parts=(PartBlocks(part, 0, count),)))

    filler = bring(b"filler", 0, rig.keys(3, salt=9))
    short = bring(b"a", 0, keys)
    assert short.outcomes == (OutcomeRun(PutOutcome.RESERVED, 1), OutcomeRun(PutOutcome.THROTTLED, 1))
    rig.ladder.abort(filler.reservation)
    rival = bring(b"b", 0, keys)
    assert rival.outcomes == (OutcomeRun(PutOutcome.IN_FLIGHT, 1), OutcomeRun(PutOutcome.RESERVED, 1))
    assert bring(b"a", 1, keys).outcomes == (OutcomeRun(PutOutcome.RESERVED, 2),)
    rig.ladder.abort(rival.reservation)
    assert bring(b"c", 0, keys).outcomes == (OutcomeRun(PutOutcome.IN_FLIGHT, 2),)
    check_integrity(rig.ladder)


def test_ranks_that_disagree_are_told_both_sides() -> None:
    rig = Rig(space=namespace(parts=2))
    rig.ladder.reserve(reserve(rig, rig.keys(3), put_id=b"x", parts=(PartBlocks(0, 0, 3),)))
    with pytest.raises(InvalidArgument, match=r"joins 3 blocks.*brings 2"):
        rig.ladder.reserve(reserve(rig, rig.keys(2, salt=9), put_id=b"x", parts=(PartBlocks(1, 0, 2),)))
    with pytest.raises(InvalidArgument, match="already has part 0"):
        rig.ladder.reserve(reserve(rig, rig.keys(3), put_id=b"x", parts=(PartBlocks(0, 0, 3),)))


def test_an_ssd_acknowledgement_waits_for_the_disk() -> None:
    rig = Rig(manual=True)
    acks: list[CommitAnswer] = []
    keys = rig.keys(3)
    assert put(rig.ladder, rig.space, rig.root, keys, ack=AckTier.SSD, acks=acks) is None
    assert not acks and rig.length(keys) == 3
    rig.tier.run()
    assert acks == [CommitAnswer(outcomes=(OutcomeRun(PutOutcome.STORED_SSD, 3),))]


def test_a_refused_write_is_an_honest_host_acknowledgement() -> None:
    rig = Rig()
    rig.tier.refuse_writes = "disk full"
    acks: list[CommitAnswer] = []
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys, ack=AckTier.SSD, acks=acks)
    assert acks == [CommitAnswer(outcomes=(OutcomeRun(PutOutcome.STORED_HOST, 3),))]
    assert rig.length(keys) == 3 and rig.events.total("kvstore_write_refusals_total") == 1


def test_an_ssd_acknowledgement_covers_ancestors_that_were_host_only() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys[: 3 * 32], retention_class="handoff")
    assert not rig.disk.frames
    acks: list[CommitAnswer] = []
    put(rig.ladder, rig.space, rig.root, keys, retention_class="agent", ack=AckTier.SSD, acks=acks)
    again = Rig(disk=rig.disk)
    assert again.length(keys) == 6


def test_an_ssd_acknowledgement_of_a_side_part_covers_the_blocks_it_belongs_to() -> None:
    rig = Rig(space=namespace(side="checkpoint"), manual=True)
    keys, side = rig.keys(3), (PartBlocks(1, 2, 1),)
    put(rig.ladder, rig.space, rig.root, keys)
    acks: list[CommitAnswer] = []
    assert put(rig.ladder, rig.space, rig.root, keys, parts=side, ack=AckTier.SSD, acks=acks) is None
    rig.tier.run(1)
    assert not acks
    rig.tier.run()
    assert acks[0].outcomes[-1] == OutcomeRun(PutOutcome.STORED_SSD, 1)
    again = Rig(disk=rig.disk, space=rig.space)
    assert again.match(keys).boundaries == (3,)


def test_blocks_that_were_not_for_ssd_come_along_with_their_side_part() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys, side = rig.keys(3), (PartBlocks(1, 2, 1),)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="handoff")
    acks: list[CommitAnswer] = []
    put(rig.ladder, rig.space, rig.root, keys, parts=side, ack=AckTier.SSD, acks=acks)
    assert acks[0].outcomes[-1] == OutcomeRun(PutOutcome.STORED_SSD, 1)
    assert Rig(disk=rig.disk, space=rig.space).match(keys).boundaries == (3,)


def test_a_side_part_without_its_block_is_not_acknowledged_on_ssd() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys, acks = rig.keys(3), list[CommitAnswer]()
    side = (PartBlocks(1, 2, 1),)
    answer = put(rig.ladder, rig.space, rig.root, keys, parts=side, ack=AckTier.SSD, acks=acks)
    assert answer is not None
    assert answer.outcomes[-1] == OutcomeRun(PutOutcome.STORED_HOST, 1)


def test_a_side_part_of_several_blocks_is_not_acknowledged_on_ssd_while_one_of_them_is_in_flight() -> None:
    rig = Rig(space=namespace(side="checkpoint"))
    keys, acks = rig.keys(3), list[CommitAnswer]()
    middle = ReserveRequest(
        namespace=rig.space.fingerprint, parent=BlockHash(keys[:32]), keys=keys[32:64], parts=()
    )
    assert rig.ladder.reserve(middle).reservation
    parts = (PartBlocks(0, 0, 3), PartBlocks(1, 1, 2))
    answer = put(rig.ladder, rig.space, rig.root, keys, parts=parts, ack=AckTier.SSD, acks=acks)
    assert {run.outcome for told in (answer, *acks) if told for run in told.outcomes} == {
        PutOutcome.STORED_HOST
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": b""}, "1..65536 blocks"),
        ({"keys": b"x" * 33}, "no multiple of 32"),
        ({"parent": BlockHash(b"short")}, "parent must have 32"),
        ({"parts": (PartBlocks(3, 0, 2),)}, "part 3 is outside"),
        ({"parts": (PartBlocks(0, 1, 1),)}, "must cover all"),
        ({"parts": (PartBlocks(0, 0, 9),)}, "covers blocks 0..9"),
        ({"retention_class": "gold"}, "'gold' is unknown; known: agent"),
        ({"put_id": b"x" * 65}, "64 bytes"),
        ({"token_ids": b"1234"}, "token ids"),
    ],
)
def test_bad_reserves_are_refused_and_lose_nothing(change: dict[str, object], message: str) -> None:
    rig = Rig()
    with pytest.raises(InvalidArgument, match=message):
        rig.ladder.reserve(dataclasses.replace(reserve(rig, rig.keys(2)), **change))  # type: ignore[arg-type]
    assert rig.ladder.gauges()["kvstore_host_used_bytes"] == 0
    put(rig.ladder, rig.space, rig.root, rig.keys(2))
    assert rig.length(rig.keys(2)) == 2


def test_an_unknown_namespace_is_refused() -> None:
    rig = Rig()
    with pytest.raises(UnknownNamespace, match="open it first"):
        rig.ladder.reserve(
            ReserveRequest(namespace=Fingerprint(b"n" * 32), parent=rig.root, keys=rig.keys(1))
        )


def test_a_hash_that_does_not_follow_its_parent_is_refused() -> None:
    rig = Rig()
    tokens = np.arange(8, dtype="<u4")
    good = hashing.block_hashes(rig.root, tokens, block_tokens=4)
    rig.ladder.reserve(reserve(rig, good, token_ids=tokens.tobytes()))
    bad = good[:32] + hashing.block_hashes(rig.root, [9, 9, 9, 9], block_tokens=4)
    with pytest.raises(InvalidArgument, match="hash 1 does not follow its parent"):
        rig.ladder.reserve(reserve(rig, bad, token_ids=tokens.tobytes()))


def test_the_same_hash_twice_is_refused() -> None:
    rig = Rig()
    with pytest.raises(InvalidArgument, match="occurs twice"):
        rig.ladder.reserve(reserve(rig, rig.keys(1) * 2))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "no digest for block 0"),
        ((PartDigests(0, 0, b"", b"x" * 31),), "32 a block"),
        ((PartDigests(1, 0, b"", b"x" * 64),), "not part of reservation"),
        ((PartDigests(0, 0, (601).to_bytes(4, "little") * 2, b"x" * 64),), "lengths in 1..600"),
        ((PartDigests(0, 1, b"", b"x" * 64),), "from block 1"),
    ],
)
def test_bad_commits_are_refused_and_can_be_repeated(parts: tuple[PartDigests, ...], message: str) -> None:
    rig = Rig()
    keys = rig.keys(2)
    answer = rig.ladder.reserve(reserve(rig, keys))
    with pytest.raises(InvalidArgument, match=message):
        rig.ladder.commit(CommitRequest(reservation=answer.reservation, blocks=2, parts=parts))
    commit_all(rig, keys, answer.reservation, answer.extents)
    assert rig.length(keys) == 2


def test_a_put_too_large_for_the_arena_is_cut_at_its_tail() -> None:
    rig = Rig(pages=64, ssd=False)
    keys = rig.keys(100)
    answer = put(rig.ladder, rig.space, rig.root, keys)
    assert answer is not None
    assert answer.outcomes == (OutcomeRun(PutOutcome.STORED_HOST, 64), OutcomeRun(PutOutcome.THROTTLED, 36))
    assert rig.length(keys) == 64
