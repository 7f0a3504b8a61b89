"""How matches and fetches go: over the session, then through the arena or the framed stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.api import MatchAnswer, MatchRequest, Progress
from kvstore.client.buffers import Buffers, by_part, rows_in
from kvstore.client.deadline import Deadline
from kvstore.client.delivery import Delivery
from kvstore.client.fallback import fall_back, readable
from kvstore.client.framed import fetch_framed, news_of
from kvstore.client.limits import Transport
from kvstore.client.link import Link
from kvstore.client.loading import Loading
from kvstore.client.mapped import fetch_mapped
from kvstore.client.recompute import DECISIONS, Choice, choose, tiers_between
from kvstore.client.results import Fetched, Match
from kvstore.client.session import Outcome
from kvstore.client.ticket import Ticket
from kvstore.errors import InvalidArgument, KVStoreError, TierUnavailable
from kvstore.layout import Layout
from kvstore.rows import Buffer, checked_arrays
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import Release, match_answer_from_wire, match_to_wire
from kvstore.types import HASH_BYTES, MissReason, ReleaseOutcome, key_count

if TYPE_CHECKING:
    from kvstore.client.namespace import OpenNamespace


def match(namespace: OpenNamespace, request: MatchRequest, deadline: Deadline) -> Match:
    """Match and wait for the answer."""
    if not request.keys:
        return Match(blocks=0, parts=request.parts)
    connection = namespace.client.runtime.connection
    loading = Loading(namespace.layout)
    try:
        link = namespace.link(deadline)
        message = pb.SessionRequest(match=match_to_wire(request))
        reply = connection.ask(link, message, deadline, on_progress=loading.put)
        return _answered(namespace.layout, request, link, loading, reply)
    except KVStoreError as error:
        return _missed(namespace, request, error)


def submit_match(namespace: OpenNamespace, request: MatchRequest, deadline: Deadline) -> Ticket[Match]:
    """Match without waiting: the session's reader resolves the ticket, or an alarm at the deadline does."""
    runtime = namespace.client.runtime
    connection, loading = runtime.connection, Loading(namespace.layout)
    ticket: Ticket[Match] = Ticket()
    link = connection.current
    if not request.keys or link is None or not namespace.is_open_on(link):
        # Rare: nothing to ask, a first connection, a namespace to open first. A worker may wait for that.
        return runtime.submit(
            lambda: match(namespace, request, deadline),
            lambda error: _missed(namespace, request, error),
            deadline,
        )

    def arrive(outcome: Outcome) -> None:
        connection.note(link)
        ticket.run(lambda: _heard(namespace, request, link, loading, outcome))

    def expire() -> None:
        if link.session.abandon(number):
            connection.breaker.fail()
            ticket.run(lambda: _missed(namespace, request, deadline.exceeded("match: no answer")))

    try:
        connection.admit()
        message = pb.SessionRequest(match=match_to_wire(request))
        number = link.session.submit(message, arrive, on_progress=loading.put)
    except KVStoreError as error:
        failure = error
        ticket.run(lambda: _missed(namespace, request, failure))
        return ticket
    runtime.alarms.set(deadline.left(), expire)
    return ticket


def _heard(
    namespace: OpenNamespace, request: MatchRequest, link: Link, loading: Loading, outcome: Outcome
) -> Match:
    if isinstance(outcome, KVStoreError):
        return _missed(namespace, request, outcome)
    try:
        return _answered(namespace.layout, request, link, loading, outcome)
    except TierUnavailable as error:
        return _missed(namespace, request, error)


def _answered(
    layout: Layout, request: MatchRequest, link: Link, loading: Loading, reply: pb.SessionReply
) -> Match:
    try:
        answer: MatchAnswer = match_answer_from_wire(reply.match, layout)
    except InvalidArgument as error:
        # The daemon's mistake, not the caller's; what it leased is of no use.
        if reply.match.lease:
            link.release(Release(reply.match.lease, 0, ReleaseOutcome.UNUSED))
        raise TierUnavailable(f"match: the daemon's answer cannot be read: {error}") from error
    return Match(
        blocks=min(answer.blocks, key_count(request.keys)),
        boundaries=answer.boundaries,
        reason=answer.reason,
        lease=answer.lease,
        lease_seconds=answer.lease_seconds,
        tiers=answer.tiers,
        ready=answer.ready,
        extents=answer.extents,
        bitmap=answer.bitmap,
        parts=request.parts,
        loading=None if answer.ready else loading,
        link=link,
    )


def _missed(namespace: OpenNamespace, request: MatchRequest, error: KVStoreError) -> Match:
    return Match(blocks=0, reason=fall_back(error, namespace.client.events), parts=request.parts)


def fetch(
    namespace: OpenNamespace,
    found: Match,
    into: Buffers,
    *,
    first: int = 0,
    blocks: int | None,
    deadline: Deadline,
    verify: bool,
) -> Fetched:
    """Copy a match's blocks from `first` on into the caller's buffers; on a corrupt one, tell the daemon."""
    layout = namespace.layout
    buffers = by_part(layout, into, found.parts)
    end = found.blocks if blocks is None else min(first + blocks, found.blocks)
    wanted = max(0, end - first)
    for index, buffer in buffers.items():
        checked_arrays(layout.parts[index], buffer, count=wanted, writing=True)
    if not wanted or not found.lease:
        return Fetched(0, found.reason, deadline.spent())
    delivery = Delivery(layout, buffers, end, first=first)
    try:
        _deliver(namespace, found, buffers, delivery, deadline, verify)
        reason = MissReason.EVICTED
    except KVStoreError as error:
        reason = fall_back(error, namespace.client.events)
    good = delivery.good()
    # What the book says wins; else whatever ended the copying cut the result.
    why = (delivery.reason or reason) if good == delivery.limit else reason
    if delivery.corrupt:
        namespace.client.events.add("kvstore_client_corrupt_total")
        release(namespace, found, Release(found.lease, good, ReleaseOutcome.CORRUPT))
    tiers = tiers_between(found.tiers, first, good)
    namespace.client.speeds.note(
        tiers or tiers_between(found.tiers, first, first + 1),
        block_bytes=_block_bytes(layout, buffers),
        seconds=deadline.spent(),
        came=bool(tiers),
    )
    return Fetched(max(0, good - first), None if good == end else why, deadline.spent(), tiers)


def _block_bytes(layout: Layout, parts: Iterable[int]) -> int:
    return sum(layout.parts[part].bytes_max for part in parts)


def worth(namespace: OpenNamespace, found: Match, *, first: int, block_recompute_seconds: float) -> Choice:
    """Decide how much of a match to load, and count the decision."""
    speeds, layout = namespace.client.speeds, namespace.layout
    # Of side parts only a few blocks have anything.
    required = set(layout.required_parts)
    size = _block_bytes(layout, required & set(found.parts or required) or required)
    choice = choose(
        found.tiers,
        first=first,
        block_load_seconds=lambda tier: speeds.block_seconds(tier, block_bytes=size),
        block_recompute_seconds=block_recompute_seconds,
        may_try=speeds.may_try,
    )
    if found.blocks > first:
        namespace.client.events.add(DECISIONS, decision=choice.decision(first=first, found=found.blocks))
    return choice


def _deliver(
    namespace: OpenNamespace,
    found: Match,
    buffers: dict[int, Buffer],
    delivery: Delivery,
    deadline: Deadline,
    verify: bool,
) -> None:
    link = found.link or namespace.link(deadline)
    layout = namespace.layout
    with readable("fetch"):
        if link.transport is Transport.MAPPED:
            news = _news(link, layout, found, deadline)
            fetch_mapped(
                link, layout, found, buffers, delivery=delivery, deadline=deadline, verify=verify, news=news
            )
        else:
            fetch_framed(
                link, layout, found.lease, buffers, delivery=delivery, deadline=deadline, verify=verify
            )


def _news(link: Link, layout: Layout, found: Match, deadline: Deadline) -> Iterator[Progress]:
    """Yield what becomes resident, from the session if the match was made on it."""
    if found.loading is None:
        yield from news_of(link, layout, found.lease, deadline=deadline)
        return
    position = 0
    while (news := found.loading.after(position, deadline.left())) is not None:
        progress, position = news
        yield progress
    raise deadline.exceeded("fetch: blocks were still loading")


def get(
    namespace: OpenNamespace, request: MatchRequest, into: Buffers, *, deadline: Deadline, verify: bool
) -> Fetched:
    """Match, fetch and release."""
    buffers = by_part(namespace.layout, into, ())
    room = min((rows_in(buffer) for buffer in buffers.values()), default=0)
    # What has no room, or no buffer, need not be leased or loaded.
    request = replace(request, keys=request.keys[: room * HASH_BYTES], parts=tuple(sorted(buffers)))
    found = match(namespace, request, deadline)
    outcome = ReleaseOutcome.UNUSED
    used = 0
    try:
        fetched = fetch(namespace, found, buffers, blocks=room, deadline=deadline, verify=verify)
        outcome, used = ReleaseOutcome.USED, fetched.blocks
    finally:
        release(namespace, found, Release(found.lease, used, outcome))
    # With all that was found delivered, the match's reason says why there was not more.
    reason = fetched.reason or found.reason
    return Fetched(fetched.blocks, reason, deadline.spent(), fetched.tiers)


def release(namespace: OpenNamespace, found: Match, release: Release) -> None:
    """Give a lease back on the link it came from; with that link gone, so is the lease."""
    link = found.link or namespace.client.runtime.connection.current
    if found.lease and link is not None:
        link.release(release)
