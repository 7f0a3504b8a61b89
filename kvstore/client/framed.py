"""The framed path, for clients that cannot or may not map the arena: payload goes through the daemon, as
packets on a connection of its own, or in the streams of gRPC where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvstore.api import CommitAnswer, PartDigests, Progress, ReserveRequest
from kvstore.client import framed_packets, framed_streams
from kvstore.client.buffers import Source
from kvstore.client.deadline import Deadline
from kvstore.client.delivery import Delivery
from kvstore.client.link import Link
from kvstore.client.payload import NoPayload
from kvstore.client.receiving import Receiver
from kvstore.layout import Layout, Part
from kvstore.rows import Buffer, digest_rows
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import put_header_to_wire, u32_to_wire
from kvstore.types import AckTier


def fetch_framed(
    link: Link,
    layout: Layout,
    lease: int,
    into: Mapping[int, Buffer],
    *,
    delivery: Delivery,
    deadline: Deadline,
    verify: bool,
) -> None:
    """Receive a lease's blocks into the caller's buffers, check each, and write `delivery`'s book.

    Errors: what the daemon says; DeadlineExceeded; TierUnavailable on an ended link or nonsense.
    """
    receiver = Receiver(layout, into, delivery, verify=verify)
    first, blocks = delivery.first, delivery.limit - delivery.first
    request = pb.FetchRequest(lease=lease, parts=sorted(into), payload=True, first=first, blocks=blocks)
    with link.use():
        try:
            framed_packets.fetch(link.payload, layout, request, receiver, deadline=deadline)
        except NoPayload:
            framed_streams.fetch(link, layout, request, receiver, deadline=deadline)


def news_of(link: Link, layout: Layout, lease: int, *, deadline: Deadline) -> Iterator[Progress]:
    """Yield the news of a lease taken elsewhere: what is resident now, then what becomes so.

    Errors: as `fetch_framed`.
    """
    request = pb.FetchRequest(lease=lease, payload=False)
    try:
        yield from framed_packets.news(link.payload, layout, request, deadline=deadline)
    except NoPayload:
        yield from framed_streams.news(link, layout, request, deadline=deadline)


def put_framed(
    link: Link,
    layout: Layout,
    reserve: ReserveRequest,
    sources: Iterable[Source],
    *,
    ack: AckTier,
    deadline: Deadline,
    chunk_bytes: int,
) -> CommitAnswer:
    """Send blocks as a framed put; the daemon checks what landed against the digests sent ahead.

    Errors: as `fetch_framed`.
    """
    sources = list(sources)
    digests = [_digests(layout.parts[source.blocks.part], source) for source in sources]
    header = put_header_to_wire(reserve, digests, ack=ack)
    with link.use():
        try:
            return framed_packets.put(
                link.payload, layout, header, sources, deadline=deadline, chunk_bytes=chunk_bytes
            )
        except NoPayload:
            return framed_streams.put(
                link, layout, header, sources, deadline=deadline, chunk_bytes=chunk_bytes
            )


def _digests(part: Part, source: Source) -> PartDigests:
    digests = digest_rows(part, source.buffer, source.lengths)
    return PartDigests(part.index, source.blocks.first, u32_to_wire(source.lengths), digests)
