"""How a put goes: reserve, copy with digests, commit through the arena; or one framed stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.api import CommitRequest, PartBlocks, PartDigests, ReserveRequest
from kvstore.client import mapped
from kvstore.client.buffers import Buffers, Lengths, Source, sources_of
from kvstore.client.deadline import Deadline
from kvstore.client.fallback import fall_back
from kvstore.client.framed import put_framed
from kvstore.client.limits import Transport
from kvstore.client.link import Link
from kvstore.client.results import Put, Reservation, final_outcomes
from kvstore.errors import InvalidArgument, KVStoreError, PermissionRefused, TierUnavailable
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import (
    commit_answer_from_wire,
    commit_to_wire,
    reserve_answer_from_wire,
    reserve_to_wire,
)
from kvstore.types import AckTier, key_count

if TYPE_CHECKING:
    from kvstore.client.namespace import OpenNamespace


def put(
    namespace: OpenNamespace,
    request: ReserveRequest,
    source: Buffers,
    *,
    lengths: Lengths | None,
    ack: AckTier,
    deadline: Deadline,
) -> Put:
    """Store blocks by whichever way the link offers."""
    sources = sources_of(namespace.layout, _brought(namespace, request), source, lengths)
    try:
        link = namespace.link(deadline)
        if _can_write(link):
            return _put_mapped(namespace, request, sources, link, ack=ack, deadline=deadline)
        chunk_bytes = namespace.client.limits.chunk_bytes
        answer = put_framed(
            link,
            namespace.layout,
            request,
            sources.values(),
            ack=ack,
            deadline=deadline,
            chunk_bytes=chunk_bytes,
        )
        return Put(answer.outcomes)
    except KVStoreError as error:
        return Put((), fall_back(error, namespace.client.events))


def _can_write(link: Link) -> bool:
    """A user who may read the arena but not write it still has the framed way."""
    if link.transport is not Transport.MAPPED:
        return False
    try:
        link.writable_arena()
    except TierUnavailable:
        return False
    return True


def _put_mapped(
    namespace: OpenNamespace,
    request: ReserveRequest,
    sources: Mapping[int, Source],
    link: Link,
    *,
    ack: AckTier,
    deadline: Deadline,
) -> Put:
    reservation = _reserve(namespace, request, link, deadline)
    if not reservation.reservation:
        return Put(reservation.outcomes)
    try:
        digests = mapped.fill(link, namespace.layout, reservation.extents, sources, deadline=deadline)
    except BaseException:
        link.abort(reservation.reservation)
        raise
    return _commit(
        namespace, reservation, digests, link, blocks=reservation.blocks, ack=ack, deadline=deadline
    )


def reserve(namespace: OpenNamespace, request: ReserveRequest, deadline: Deadline) -> Reservation:
    """Ask for slots.

    Errors: PermissionRefused when the arena is not mapped here.
    """
    try:
        link = namespace.link(deadline)
        if link.transport is not Transport.MAPPED:
            raise PermissionRefused("reserve: the arena is not mapped on this connection; use put")
        return _reserve(namespace, request, link, deadline)
    except KVStoreError as error:
        blocks = key_count(request.keys)
        return Reservation(blocks=blocks, reason=fall_back(error, namespace.client.events))


def _reserve(
    namespace: OpenNamespace, request: ReserveRequest, link: Link, deadline: Deadline
) -> Reservation:
    connection = namespace.client.runtime.connection
    reply = connection.ask(link, pb.SessionRequest(reserve=reserve_to_wire(request)), deadline)
    try:
        answer = reserve_answer_from_wire(reply.reserve, namespace.layout)
    except InvalidArgument as error:
        link.abort(reply.reserve.reservation)
        raise TierUnavailable(f"reserve: the daemon's answer cannot be read: {error}") from error
    return Reservation(
        reservation=answer.reservation,
        blocks=key_count(request.keys),
        outcomes=answer.outcomes,
        extents=answer.extents,
        seconds=answer.seconds,
        link=link,
    )


def fill(
    namespace: OpenNamespace,
    reservation: Reservation,
    source: Buffers,
    *,
    parts: Sequence[PartBlocks],
    lengths: Lengths | None,
    deadline: Deadline,
) -> tuple[PartDigests, ...]:
    """Copy blocks into reserved slots.

    Errors: TierUnavailable when the link is over; DeadlineExceeded.
    """
    if not reservation.reservation or reservation.link is None:
        return ()
    brought = tuple(parts) or _all_required(namespace, reservation.blocks)
    sources = sources_of(namespace.layout, brought, source, lengths)
    return mapped.fill(reservation.link, namespace.layout, reservation.extents, sources, deadline=deadline)


def commit(
    namespace: OpenNamespace,
    reservation: Reservation,
    digests: Sequence[PartDigests],
    *,
    blocks: int | None,
    ack: AckTier,
    deadline: Deadline,
) -> Put:
    """Publish what was written."""
    link = reservation.link
    if not reservation.reservation or link is None:
        return Put(reservation.outcomes, reservation.reason)
    count = reservation.blocks if blocks is None else blocks
    try:
        return _commit(namespace, reservation, digests, link, blocks=count, ack=ack, deadline=deadline)
    except KVStoreError as error:
        return Put((), fall_back(error, namespace.client.events))


def _commit(
    namespace: OpenNamespace,
    reservation: Reservation,
    digests: Sequence[PartDigests],
    link: Link,
    *,
    blocks: int,
    ack: AckTier,
    deadline: Deadline,
) -> Put:
    request = CommitRequest(reservation=reservation.reservation, blocks=blocks, parts=tuple(digests), ack=ack)
    connection = namespace.client.runtime.connection
    try:
        reply = connection.ask(link, pb.SessionRequest(commit=commit_to_wire(request)), deadline)
    except BaseException:
        # Refused, or never to be heard of: nothing is written any more, so the slots need not wait for this
        # client's death. After a commit that did arrive an abort does nothing.
        link.abort(reservation.reservation)
        raise
    try:
        answer = commit_answer_from_wire(reply.commit)
    except InvalidArgument as error:
        raise TierUnavailable(f"commit: the daemon's answer cannot be read: {error}") from error
    return Put(final_outcomes(reservation.outcomes, answer.outcomes))


def _brought(namespace: OpenNamespace, request: ReserveRequest) -> tuple[PartBlocks, ...]:
    return request.parts or _all_required(namespace, key_count(request.keys))


def _all_required(namespace: OpenNamespace, blocks: int) -> tuple[PartBlocks, ...]:
    return tuple(PartBlocks(part, 0, blocks) for part in namespace.layout.required_parts)
