"""Every value survives the wire, and what is malformed is refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import pytest

from kvstore.api import (
    CommitAnswer,
    CommitRequest,
    Extent,
    ListAnswer,
    MatchAnswer,
    MatchRequest,
    OpenAnswer,
    OutcomeRun,
    PartBlocks,
    PartDigests,
    PrefetchAnswer,
    Progress,
    ReserveAnswer,
    ReserveRequest,
    RunInfo,
    TierRun,
)
from kvstore.errors import InvalidArgument, LayoutMismatch
from kvstore.layout import CacheGroup, Layout, Part, Segment
from kvstore.namespace import Namespace
from kvstore.rpc import enums, wire
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import (
    AckTier,
    BlockHash,
    Fingerprint,
    MatchMode,
    MissReason,
    PutOutcome,
    ReleaseOutcome,
    Tier,
)

LAYOUT = Layout(
    "bf16",
    (CacheGroup("kv"),),
    (
        Part(0, "kv", "tp0", 4000, (Segment(0, 1, 0, 2000), Segment(1, 1, 2000, 2000))),
        Part(1, "kv", "tp1", 100, (Segment(0, 2, 0, 100),)),
    ),
).checked()
NAMESPACE = Namespace(model="m", weights="w1", layout=LAYOUT, block_tokens=16)
PRINT = NAMESPACE.fingerprint
ROOT = BlockHash(b"r" * 32)
KEYS = bytes(range(96))

ENUMS: list[tuple[enums.EnumMap[Any], type[StrEnum], Any]] = [
    (enums.MATCH_MODE, MatchMode, pb.MatchMode),
    (enums.TIER, Tier, pb.Tier),
    (enums.MISS_REASON, MissReason, pb.MissReason),
    (enums.PUT_OUTCOME, PutOutcome, pb.PutOutcome),
    (enums.ACK_TIER, AckTier, pb.AckTier),
    (enums.RELEASE_OUTCOME, ReleaseOutcome, pb.ReleaseOutcome),
]


def extent(
    part: int = 0, *, count: int = 3, lengths: list[int] | None = None, digests: bool = True
) -> Extent:
    segments = len(LAYOUT.parts[part].segments)
    return Extent(
        part=part,
        first=5,
        slots=np.arange(1, count + 1, dtype=np.uint32),
        generations=np.full(count, 0xFFFFFFFF, dtype=np.uint32),
        lengths=np.array(lengths or [LAYOUT.parts[part].bytes_max] * count, dtype=np.uint32),
        digests=bytes(range(16)) * segments * count if digests else b"",
    )


def same(left: Any, right: Any) -> bool:
    """Compare values that may hold extents, whose arrays have no plain equality."""
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    if isinstance(left, tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        names = [f.name for f in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in names)
    return bool(left == right)


def sent(message: Any) -> Any:
    """Return the message as the other end parses it."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize(("mapping", "kind", "wire_enum"), ENUMS)
def test_every_member_has_a_number_and_every_number_a_member(
    mapping: enums.EnumMap[Any], kind: type[StrEnum], wire_enum: Any
) -> None:
    assert [mapping.from_wire(mapping.to_wire(member), "f") for member in kind] == list(kind)
    assert {mapping.to_wire(member) for member in kind} == set(wire_enum.values()) - {0}


@pytest.mark.parametrize(("mapping", "kind", "wire_enum"), ENUMS)
@pytest.mark.parametrize("number", [0, 99, -1])
def test_an_unknown_number_is_refused_by_name(
    mapping: enums.EnumMap[Any], kind: type[StrEnum], wire_enum: Any, number: int
) -> None:
    with pytest.raises(InvalidArgument, match=rf"match\.mode: .* got {number}"):
        mapping.from_wire(number, "match.mode")


def test_the_optional_form_takes_none() -> None:
    assert enums.MISS_REASON.to_wire_optional(None) == 0
    assert enums.MISS_REASON.from_wire_optional(0, "f") is None
    assert enums.MISS_REASON.to_wire_optional(MissReason.EVICTED) == pb.MISS_REASON_EVICTED


MATCH = MatchRequest(
    namespace=PRINT, keys=KEYS, mode=MatchMode.LEASE, owner="r1", retention_class="chat", exact_only=True,
    parts=(0, 1), lease_seconds=1.5, load=False, session=7,
)  # fmt: skip
RESERVE = ReserveRequest(
    namespace=PRINT, parent=ROOT, keys=KEYS, put_id=b"p1", parts=(PartBlocks(1, 1, 2),),
    retention_class="swa", provenance=640, token_ids=b"\1\0\0\0", session=7,
)  # fmt: skip
COMMIT = CommitRequest(
    reservation=2**63 + 1, blocks=3, parts=(PartDigests(0, 0, b"\1\0\0\0" * 3, b"d" * 96),), ack=AckTier.SSD
)
RUN = RunInfo(
    parent=ROOT, keys=KEYS, tiers=(Tier.HOST, Tier.SSD), host_blocks=1, ssd_blocks=2, retention_class="agent",
    written_at=1.5, touched_at=2.5, expires_at=math.inf, bytes=2**40, provenance=1, leased=True,
)  # fmt: skip
OUTCOMES = tuple(OutcomeRun(outcome, 1 + index) for index, outcome in enumerate(PutOutcome))
TIERS = (TierRun(Tier.HOST, 2), TierRun(Tier.SSD, 1))

ROUND_TRIPS: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (NAMESPACE, wire.open_to_wire, wire.open_from_wire),
    (
        OpenAnswer(fingerprint=PRINT, siblings=("a", "b")),
        wire.open_answer_to_wire,
        wire.open_answer_from_wire,
    ),
    (MATCH, wire.match_to_wire, lambda m: wire.match_from_wire(m, session=7)),
    (
        MatchAnswer(
            blocks=3,
            boundaries=(3, 1),
            reason=MissReason.PART_MISSING,
            lease=2**64 - 1,
            lease_seconds=3.0,
            tiers=TIERS,
            ready=False,
            extents=(extent(0), extent(1)),
            bitmap=b"\5",
        ),
        wire.match_answer_to_wire,
        lambda m: wire.match_answer_from_wire(m, LAYOUT),
    ),
    (
        Progress(9, (extent(1, lengths=[1, 2, 3]),), True, 3, MissReason.CORRUPT),
        wire.progress_to_wire,
        lambda m: wire.progress_from_wire(m, LAYOUT),
    ),
    (
        wire.Release(5, 3, ReleaseOutcome.CORRUPT),
        wire.release_to_wire,
        wire.release_from_wire,
    ),
    (RESERVE, wire.reserve_to_wire, lambda m: wire.reserve_from_wire(m, session=7)),
    (
        ReserveAnswer(reservation=4, outcomes=OUTCOMES, extents=(extent(digests=False),), seconds=60.0),
        wire.reserve_answer_to_wire,
        lambda m: wire.reserve_answer_from_wire(m, LAYOUT),
    ),
    (COMMIT, wire.commit_to_wire, wire.commit_from_wire),
    (CommitAnswer(outcomes=OUTCOMES), wire.commit_answer_to_wire, wire.commit_answer_from_wire),
    (
        PrefetchAnswer(prefetch=1, blocks=4, resident=1, loading=3, reason=MissReason.EXPIRED),
        wire.prefetch_answer_to_wire,
        wire.prefetch_answer_from_wire,
    ),
    (RUN, wire.run_info_to_wire, wire.run_info_from_wire),
    (ListAnswer(runs=(RUN, RUN), cursor="c"), wire.list_answer_to_wire, wire.list_answer_from_wire),
    (
        (RESERVE, COMMIT.parts, AckTier.HOST),
        lambda v: wire.put_header_to_wire(v[0], v[1], ack=v[2]),
        lambda m: wire.put_header_from_wire(m, session=7),
    ),
]


@pytest.mark.parametrize(
    ("value", "to_wire", "from_wire"), ROUND_TRIPS, ids=[type(case[0]).__name__ for case in ROUND_TRIPS]
)
def test_a_value_survives_the_wire(
    value: Any, to_wire: Callable[[Any], Any], from_wire: Callable[[Any], Any]
) -> None:
    assert same(from_wire(sent(to_wire(value))), value)


def test_lengths_that_say_nothing_are_left_out_and_come_back() -> None:
    message = wire.extent_to_wire(extent(), layout=LAYOUT)
    assert message.lengths == b""
    assert same(wire.extent_from_wire(sent(message), LAYOUT), extent())
    short = extent(lengths=[4000, 10, 4000])
    assert same(wire.extent_from_wire(wire.extent_to_wire(short, layout=LAYOUT), LAYOUT), short)


def test_an_extent_on_the_wire_is_little_endian() -> None:
    big = dataclasses.replace(extent(count=1), slots=np.array([0x01020304], dtype=">u4"))
    assert wire.extent_to_wire(big).slots == b"\4\3\2\1"


def test_releases_ride_on_a_match() -> None:
    riders = (wire.Release(1, 2), wire.Release(3, 0, ReleaseOutcome.UNUSED))
    assert wire.releases_from_wire(sent(wire.match_to_wire(MATCH, releases=riders))) == riders


def test_both_ends_must_name_a_namespace_alike() -> None:
    message = wire.open_to_wire(NAMESPACE)
    message.fingerprint = b"x" * 32
    with pytest.raises(LayoutMismatch, match="the client says 7878"):
        wire.open_from_wire(message)


def broken_extent(**changes: Any) -> pb.Extent:
    message = wire.extent_to_wire(extent())
    for name, value in changes.items():
        setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"part": 2}, r"extent\.part: the layout has 2 parts, got 2"),
        ({"slots": b"123"}, r"extent\.slots: .* multiple of 4 bytes, got 3"),
        ({"slots": b"1234"}, r"extent\.lengths: 1 packed u32 are 4 bytes, got 12"),
        ({"generations": b""}, r"extent\.generations: 3 packed u32 are 12 bytes, got 0"),
        ({"lengths": b"\xff" * 12}, r"extent\.lengths: part 0 holds 4000 bytes, got 4294967295"),
        ({"digests": b"1"}, r"extent\.digests: .* got 1 bytes"),
        ({"digests": b"1" * 48}, r"extent\.digests: part 0 needs 3 blocks x 2 segments x 16 bytes, got 48"),
        ({"digests": b"1" * 16 * 9 * 3}, r"extent\.digests: .* got 432 bytes"),
    ],
)
def test_a_malformed_extent_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        wire.extent_from_wire(broken_extent(**changes), LAYOUT)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"namespace": b"1"}, r"match\.namespace: a fingerprint has 32 bytes, got 1"),
        ({"keys": b"1" * 33}, r"match\.keys: packed keys have a multiple of 32 bytes, got 33"),
        ({"mode": 0}, r"match\.mode: MATCH_MODE must be one of 1\.\.3, got 0"),
        ({"lease_seconds": -1.0}, r"match\.lease_seconds: .* got -1"),
        ({"lease_seconds": math.nan}, r"match\.lease_seconds: .* got nan"),
        ({"owner": "o" * 257}, r"match\.owner: at most 256 characters, got 257"),
    ],
)
def test_a_malformed_match_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    message = wire.match_to_wire(MATCH)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InvalidArgument, match=text):
        wire.match_from_wire(message)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parent": b""}, r"reserve\.parent: a block hash has 32 bytes, got 0"),
        ({"put_id": b"p" * 65}, r"reserve\.put_id: at most 64 bytes, got 65"),
        ({"token_ids": b"123"}, r"reserve\.token_ids: .* got 3"),
    ],
)
def test_a_malformed_reserve_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    message = wire.reserve_to_wire(RESERVE)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InvalidArgument, match=text):
        wire.reserve_from_wire(message)


@pytest.mark.parametrize("part", [PartBlocks(0, 0, 0), PartBlocks(0, 2, 2), PartBlocks(256, 0, 1)])
def test_parts_of_a_put_lie_within_it(part: PartBlocks) -> None:
    message = wire.reserve_to_wire(dataclasses.replace(RESERVE, parts=(part,)))
    with pytest.raises(InvalidArgument, match=r"reserve\.parts"):
        wire.reserve_from_wire(message)


@pytest.mark.parametrize(
    "part",
    [PartDigests(0, 0, b"123", b""), PartDigests(0, 0, b"1234", b"d"), PartDigests(0, 0, b"", b"d" * 17)],
)
def test_malformed_digests_are_refused(part: PartDigests) -> None:
    with pytest.raises(InvalidArgument, match=r"digests\."):
        wire.commit_from_wire(wire.commit_to_wire(dataclasses.replace(COMMIT, parts=(part,))))


def test_a_framed_put_starts_with_its_header() -> None:
    with pytest.raises(InvalidArgument, match="first message must be the header, got chunk"):
        wire.put_header_from_wire(pb.PutRequest(chunk=pb.PutRequest.Chunk(part=1)))


def test_a_reply_says_which_boot_it_comes_from() -> None:
    assert wire.match_answer_to_wire(MatchAnswer(blocks=0), boot_id=9).boot_id == 9
    assert wire.fingerprint_of(b"f" * 32, "x") == Fingerprint(b"f" * 32)


def test_an_open_declares_a_root_or_none() -> None:
    assert wire.root_from_wire(sent(wire.open_to_wire(NAMESPACE, root=ROOT))) == ROOT
    assert wire.root_from_wire(wire.open_to_wire(NAMESPACE)) is None
    with pytest.raises(InvalidArgument, match=r"open\.root: a block hash has 32 bytes, got 1"):
        wire.root_from_wire(pb.OpenRequest(root=b"1"))


def test_repeated_fields_have_a_limit() -> None:
    digests = [pb.PartDigests(part=0)] * 65_537
    with pytest.raises(InvalidArgument, match="digests: at most 65536 entries, got 65537"):
        wire.part_digests_from_wire(digests)
    with pytest.raises(InvalidArgument, match=r"match\.parts: at most 256 entries, got 257"):
        wire.parts_from_wire([0] * 257, "match.parts")
    parts = [pb.PartBlocks(part=0, first=0, count=1)] * 257
    reserve = pb.ReserveRequest(namespace=bytes(32), parent=bytes(32), keys=bytes(32), parts=parts)
    with pytest.raises(InvalidArgument, match=r"reserve\.parts: at most 256 entries, got 257"):
        wire.reserve_from_wire(reserve)
