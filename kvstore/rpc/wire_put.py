"""The put side of kvstore.rpc.wire: reserve, commit and the header of a framed put. Import wire instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvstore.api import (
    NO_SESSION,
    CommitAnswer,
    CommitRequest,
    OutcomeRun,
    PartBlocks,
    PartDigests,
    ReserveAnswer,
    ReserveRequest,
)
from kvstore.errors import InvalidArgument
from kvstore.layout import PARTS_MAX, Layout
from kvstore.rpc.enums import ACK_TIER, PUT_OUTCOME
from kvstore.rpc.packing import (
    U32_BYTES,
    count_of,
    digests_of,
    fingerprint_of,
    hash_of,
    keys_of,
    put_id_of,
    text_of,
    words_of,
)
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire_extent import extent_from_wire, extent_to_wire, parts_from_wire
from kvstore.types import DIGEST_BYTES, AckTier, key_count


def reserve_to_wire(request: ReserveRequest) -> pb.ReserveRequest:
    """Return a reserve request."""
    return pb.ReserveRequest(
        namespace=request.namespace,
        parent=request.parent,
        keys=request.keys,
        put_id=request.put_id,
        parts=[pb.PartBlocks(part=p.part, first=p.first, count=p.count) for p in request.parts],
        retention_class=request.retention_class,
        provenance=request.provenance,
        token_ids=request.token_ids,
    )


def reserve_from_wire(message: pb.ReserveRequest, *, session: int = NO_SESSION) -> ReserveRequest:
    """Return a reserve request of a session."""
    keys = keys_of(message.keys, "reserve.keys")
    count_of(message.parts, "reserve.parts", limit=PARTS_MAX)
    return ReserveRequest(
        namespace=fingerprint_of(message.namespace, "reserve.namespace"),
        parent=hash_of(message.parent, "reserve.parent"),
        keys=keys,
        put_id=put_id_of(message.put_id, "reserve.put_id"),
        parts=tuple(_part_blocks(part, key_count(keys)) for part in message.parts),
        retention_class=text_of(message.retention_class, "reserve.retention_class"),
        provenance=message.provenance,
        token_ids=words_of(message.token_ids, "reserve.token_ids"),
        session=session,
    )


def _part_blocks(message: pb.PartBlocks, blocks: int) -> PartBlocks:
    parts_from_wire((message.part,), "reserve.parts.part")
    if message.count < 1 or message.first + message.count > blocks:
        got = f"[{message.first}, {message.first + message.count})"
        raise InvalidArgument(
            f"reserve.parts: part {message.part} must name blocks within [0, {blocks}), got {got}"
        )
    return PartBlocks(message.part, message.first, message.count)


def reserve_answer_to_wire(
    answer: ReserveAnswer, *, layout: Layout | None = None, boot_id: int = 0
) -> pb.ReserveReply:
    """Return the reply of reserve."""
    return pb.ReserveReply(
        reservation=answer.reservation,
        outcomes=outcomes_to_wire(answer.outcomes),
        extents=[extent_to_wire(extent, layout=layout) for extent in answer.extents],
        seconds=answer.seconds,
        boot_id=boot_id,
    )


def reserve_answer_from_wire(message: pb.ReserveReply, layout: Layout) -> ReserveAnswer:
    """Return the answer of reserve."""
    return ReserveAnswer(
        reservation=message.reservation,
        outcomes=outcomes_from_wire(message.outcomes),
        extents=tuple(extent_from_wire(extent, layout) for extent in message.extents),
        seconds=message.seconds,
    )


def commit_to_wire(request: CommitRequest) -> pb.CommitRequest:
    """Return a commit request."""
    return pb.CommitRequest(
        reservation=request.reservation,
        blocks=request.blocks,
        parts=part_digests_to_wire(request.parts),
        ack=ACK_TIER.to_wire(request.ack),
    )


def commit_from_wire(message: pb.CommitRequest) -> CommitRequest:
    """Return a commit request."""
    return CommitRequest(
        reservation=message.reservation,
        blocks=message.blocks,
        parts=part_digests_from_wire(message.parts),
        ack=ACK_TIER.from_wire(message.ack, "commit.ack"),
    )


def commit_answer_to_wire(answer: CommitAnswer, *, boot_id: int = 0) -> pb.CommitReply:
    """Return the reply of commit."""
    return pb.CommitReply(outcomes=outcomes_to_wire(answer.outcomes), boot_id=boot_id)


def commit_answer_from_wire(message: pb.CommitReply | pb.PutReply) -> CommitAnswer:
    """Return the answer of commit, or of a framed put, which ends the same way."""
    return CommitAnswer(outcomes=outcomes_from_wire(message.outcomes))


def put_header_to_wire(
    reserve: ReserveRequest, digests: Sequence[PartDigests], *, ack: AckTier
) -> pb.PutRequest:
    """Return the first message of a framed put."""
    header = pb.PutRequest.Header(
        reserve=reserve_to_wire(reserve), digests=part_digests_to_wire(digests), ack=ACK_TIER.to_wire(ack)
    )
    return pb.PutRequest(header=header)


def put_header_from_wire(
    message: pb.PutRequest, *, session: int = NO_SESSION
) -> tuple[ReserveRequest, tuple[PartDigests, ...], AckTier]:
    """Return what the first message of a framed put announces.

    Errors: InvalidArgument when the first message is no header.
    """
    if message.WhichOneof("message") != "header":
        raise InvalidArgument(
            f"put: the first message must be the header, got {message.WhichOneof('message')}"
        )
    header = message.header
    reserve = reserve_from_wire(header.reserve, session=session)
    return reserve, part_digests_from_wire(header.digests), ACK_TIER.from_wire(header.ack, "put.ack")


def part_digests_to_wire(parts: Iterable[PartDigests]) -> list[pb.PartDigests]:
    """Return what a writer says of the bytes it wrote."""
    return [pb.PartDigests(part=p.part, first=p.first, lengths=p.lengths, digests=p.digests) for p in parts]


def part_digests_from_wire(messages: Collection[pb.PartDigests]) -> tuple[PartDigests, ...]:
    """Return what a writer says of its bytes; whether that covers the reservation is the store's to judge."""
    parts = []
    count_of(messages, "digests")
    for message in messages:
        parts_from_wire((message.part,), "digests.part")
        lengths = words_of(message.lengths, "digests.lengths")
        # Without lengths the number of blocks is unknown here; one digest a block is the weakest claim.
        blocks = len(lengths) // U32_BYTES or -(-len(message.digests) // DIGEST_BYTES)
        digests_of(message.digests, "digests.digests", blocks=blocks)
        parts.append(PartDigests(message.part, message.first, lengths, message.digests))
    return tuple(parts)


def outcomes_to_wire(outcomes: Iterable[OutcomeRun]) -> list[pb.OutcomeRun]:
    """Return the outcomes of a put."""
    return [pb.OutcomeRun(outcome=PUT_OUTCOME.to_wire(run.outcome), count=run.count) for run in outcomes]


def outcomes_from_wire(messages: Iterable[pb.OutcomeRun]) -> tuple[OutcomeRun, ...]:
    """Return the outcomes of a put."""
    return tuple(OutcomeRun(PUT_OUTCOME.from_wire(m.outcome, "outcomes.outcome"), m.count) for m in messages)
