"""A framed put's chunks: where they land, what is refused, how outcomes of both steps merge."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from kvstore.api import Extent, OutcomeRun, PartDigests
from kvstore.errors import InvalidArgument
from kvstore.layout import Layout, Part
from kvstore.service.landing import Landing, Piece, merged
from kvstore.types import PutOutcome

LAYOUT = Layout.single(dtype="u8", bytes_max=6000, layers=2, segments=2)
PART = LAYOUT.parts[0]


def payload(block: int, length: int = PART.bytes_max) -> bytes:
    return np.random.default_rng(block).integers(0, 256, length, np.uint8).tobytes()


def digests(*payloads: bytes) -> bytes:
    pieces = (p[s.offset : s.offset + s.length] for p in payloads for s in PART.segments)
    return b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces)


class Slots:
    """Memory for a few slots, and the landing of a put into them."""

    def __init__(self, first: int, count: int, source: list[PartDigests]) -> None:
        self.memory = np.zeros(count * PART.stride_bytes, np.uint8)
        zeros = np.zeros(count, np.uint32)
        extent = Extent(0, first, zeros, zeros, np.full(count, PART.bytes_max, np.uint32))
        self.landing = Landing(LAYOUT, [extent], source, images=self._images)

    def _images(self, extent: Extent, part: Part) -> tuple[memoryview, ...]:
        return (memoryview(self.memory),)  # type: ignore[arg-type]

    def record(self, index: int, length: int = PART.bytes_max) -> bytes:
        at = index * PART.stride_bytes
        return self.memory[at : at + length].tobytes()


def send(landing: Landing, block: int, data: bytes, size: int = 4096) -> None:
    for offset in range(0, len(data), size):
        landing.land(Piece(0, block, offset, data[offset : offset + size]))


def test_chunks_land_in_their_slots_with_their_digests() -> None:
    said = [PartDigests(0, 2, b"", digests(payload(2), payload(3)))]
    slots = Slots(2, 2, said)
    send(slots.landing, 2, payload(2))
    send(slots.landing, 3, payload(3))
    assert slots.landing.good_blocks() == 4
    assert (slots.record(0), slots.record(1)) == (payload(2), payload(3))
    landed = slots.landing.landed(4)
    assert [(entry.part, entry.first, entry.digests) for entry in landed] == [(0, 2, said[0].digests)]


def test_a_writer_may_leave_the_digests_to_the_daemon() -> None:
    slots = Slots(0, 1, [])
    send(slots.landing, 0, payload(0))
    assert slots.landing.landed(1)[0].digests == digests(payload(0))


def test_what_arrives_damaged_cuts_the_rest() -> None:
    slots = Slots(0, 3, [PartDigests(0, 0, b"", digests(payload(0), payload(1), payload(2)))])
    send(slots.landing, 0, payload(0))
    send(slots.landing, 1, b"\1" + payload(1)[1:])
    send(slots.landing, 2, payload(2))
    assert slots.landing.good_blocks() == 1
    assert len(slots.landing.landed(1)[0].digests) == 32


def test_a_stream_that_ends_early_keeps_whole_blocks_only() -> None:
    slots = Slots(0, 2, [])
    send(slots.landing, 0, payload(0))
    slots.landing.land(Piece(0, 1, 0, payload(1)[:100]))
    assert slots.landing.good_blocks() == 1


def test_short_records() -> None:
    short = payload(0, 3500)
    said = [PartDigests(0, 0, np.array([3500], "<u4").tobytes(), digests(short))]
    slots = Slots(0, 1, said)
    send(slots.landing, 0, short)
    assert slots.landing.good_blocks() == 1
    assert slots.landing.landed(1)[0].lengths == said[0].lengths


def test_chunks_of_blocks_that_were_not_reserved_are_dropped() -> None:
    slots = Slots(1, 1, [])
    send(slots.landing, 0, payload(0))
    send(slots.landing, 1, payload(1))
    send(slots.landing, 2, payload(2))
    assert slots.record(0) == payload(1)
    assert slots.landing.good_blocks() == 2


@pytest.mark.parametrize(
    "piece",
    [
        Piece(0, 1, 0, b"x"),
        Piece(0, 0, 5, b"x"),
        Piece(0, 0, 0, b"x" * (PART.bytes_max + 1)),
        Piece(7, 0, 0, b"x"),
    ],
)
def test_chunks_out_of_order_or_too_long_are_refused(piece: Piece) -> None:
    with pytest.raises(InvalidArgument, match=r"^put: "):
        Slots(0, 2, []).landing.land(piece)


@pytest.mark.parametrize(
    "said",
    [
        PartDigests(3, 0, b"", b""),
        PartDigests(0, 0, np.array([PART.bytes_max + 1], "<u4").tobytes(), b""),
        PartDigests(0, 0, np.array([0], "<u4").tobytes(), b""),
        PartDigests(0, 0, np.array([5, 5], "<u4").tobytes(), bytes(32)),
        PartDigests(0, 0, b"", bytes(33)),
    ],
)
def test_digests_that_do_not_fit_the_layout_are_refused(said: PartDigests) -> None:
    with pytest.raises(InvalidArgument, match=r"^put: "):
        Slots(0, 2, [said])


R, S, D, T, X = (
    PutOutcome.RESERVED,
    PutOutcome.STORED_HOST,
    PutOutcome.DUPLICATE,
    PutOutcome.THROTTLED,
    PutOutcome.REFUSED,
)


def runs(*pairs: tuple[PutOutcome, int]) -> list[OutcomeRun]:
    return [OutcomeRun(outcome, count) for outcome, count in pairs]


def test_outcomes_of_reserve_and_commit_merge() -> None:
    reserved = runs((D, 2), (R, 3), (T, 1))
    assert merged(reserved, runs((D, 2), (S, 3), (T, 1)), good=5) == tuple(runs((D, 2), (S, 3), (T, 1)))
    assert merged(reserved, runs((D, 2), (S, 1), (T, 3)), good=3) == tuple(
        runs((D, 2), (S, 1), (X, 2), (T, 1))
    )
    assert merged(reserved, runs((D, 2), (T, 4)), good=2) == tuple(runs((D, 2), (X, 3), (T, 1)))
