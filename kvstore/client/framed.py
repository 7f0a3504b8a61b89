"""Payload in the gRPC streams Put and Fetch, for clients that cannot or may not map the arena."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import grpc
import numpy as np

from kvstore.api import CommitAnswer, PartDigests, Progress, ReserveRequest
from kvstore.client.buffers import Source, chunks_of, pieces_of, rows_of
from kvstore.client.deadline import Deadline
from kvstore.client.delivery import Delivery
from kvstore.client.link import Link
from kvstore.errors import TierUnavailable
from kvstore.layout import Layout, Part
from kvstore.rows import Buffer, digest_rows
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import (
    commit_answer_from_wire,
    error_from_call,
    progress_from_wire,
    put_header_to_wire,
    u32_to_wire,
)
from kvstore.types import DIGEST_BYTES, AckTier, MissReason

GRACE_SECONDS = 0.05
"""gRPC is given this long to end a call by itself at its deadline."""


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

    Errors: what the daemon says; DeadlineExceeded; TierUnavailable on an ended link or a stream of nonsense.
    """
    receiver = _Receiver(layout, into, delivery, verify=verify)
    request = pb.FetchRequest(lease=lease, parts=sorted(into), payload=True)
    with link.use():
        call = link.invoke(link.stub().Fetch, request, deadline=deadline)
        try:
            for reply in call:
                if reply.WhichOneof("message") == "chunk":
                    receiver.chunk(reply.chunk)
                else:
                    receiver.progress(progress_from_wire(reply.progress, layout))
                if receiver.done or (delivery.complete() and not delivery.has_side_parts):
                    break
        except grpc.RpcError as error:
            raise error_from_call(error) from error
        finally:
            call.cancel()


def news_of(link: Link, layout: Layout, lease: int, *, deadline: Deadline) -> Iterator[Progress]:
    """Yield the news of a lease taken elsewhere: what is resident now, then what becomes so.

    Errors: as `fetch_framed`.
    """
    request = pb.FetchRequest(lease=lease, payload=False)
    call = link.invoke(link.stub().Fetch, request, deadline=deadline)
    try:
        for reply in call:
            yield progress_from_wire(reply.progress, layout)
    except grpc.RpcError as error:
        raise error_from_call(error) from error
    finally:
        call.cancel()


@dataclass(slots=True)
class _Awaited:
    """A block announced by a progress event, and how much of it has come."""

    length: int
    digests: bytes
    received: int = 0


class _Receiver:
    """Puts chunks where they belong and checks each block when it is whole."""

    def __init__(
        self, layout: Layout, into: Mapping[int, Buffer], delivery: Delivery, *, verify: bool
    ) -> None:
        self._layout = layout
        self._into = into
        self._delivery = delivery
        self._verify = verify
        self._awaited: dict[tuple[int, int], _Awaited] = {}
        self._last: Progress | None = None

    @property
    def done(self) -> bool:
        """Say whether the last news said done and all that was announced has come."""
        return self._last is not None and self._last.done and not self._awaited

    def progress(self, progress: Progress) -> None:
        """Take note of the blocks whose chunks follow."""
        for extent in progress.extents:
            if extent.part not in self._into:
                continue
            width = DIGEST_BYTES * len(self._layout.parts[extent.part].segments)
            for index in np.flatnonzero(extent.slots).tolist():
                digests = extent.digests[index * width : (index + 1) * width]
                awaited = _Awaited(int(extent.lengths[index]), digests)
                if awaited.length:
                    self._awaited[extent.part, extent.first + index] = awaited
                else:
                    self._finish(extent.part, extent.first + index, awaited)  # no chunk follows
        self._last = progress
        self._delivery.cut(progress.blocks, progress.reason)

    def chunk(self, chunk: pb.FetchReply.Chunk) -> None:
        """Put a chunk in its place.

        Errors: TierUnavailable when it belongs to no announced block, or leaves a gap.
        """
        awaited = self._awaited.get((chunk.part, chunk.block))
        if awaited is None or chunk.offset != awaited.received:
            raise TierUnavailable(
                f"fetch: chunk of part {chunk.part}, block {chunk.block} was not announced so"
            )
        awaited.received += len(chunk.data)
        if awaited.received > awaited.length:
            raise TierUnavailable(
                f"fetch: block {chunk.block} is longer than the {awaited.length} bytes announced"
            )
        # Outside of the buffers' rows nothing was asked for; the lease may be longer than the fetch.
        if self._delivery.first <= chunk.block < self._delivery.limit:
            row = chunk.block - self._delivery.first
            _place(self._into[chunk.part], chunk, row, awaited.length)
        if awaited.received == awaited.length:
            del self._awaited[chunk.part, chunk.block]
            self._finish(chunk.part, chunk.block, awaited)

    def _finish(self, index: int, block: int, awaited: _Awaited) -> None:
        if not self._delivery.first <= block < self._delivery.limit:
            return
        row = block - self._delivery.first
        block_rows, lengths = rows_of(self._into[index], row, row + 1), np.array([awaited.length], np.uint32)
        if self._verify and digest_rows(self._layout.parts[index], block_rows, lengths) != awaited.digests:
            self._delivery.cut(block, MissReason.CORRUPT)
        else:
            self._delivery.arrive(index, block, block + 1)


def _place(buffer: Buffer, chunk: pb.FetchReply.Chunk, row: int, length: int) -> None:
    data, offset = np.frombuffer(chunk.data, dtype=np.uint8), chunk.offset
    position = 0
    for view in pieces_of(buffer, row, length):
        start = max(0, offset - position)
        count = min(len(view) - start, len(data))
        if count > 0:
            np.copyto(view[start : start + count], data[:count])
            data, offset = data[count:], offset + count
        position += len(view)


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

    Errors: what the daemon says; DeadlineExceeded; TierUnavailable when the link is over.
    """
    sources = list(sources)
    digests = [_digests(layout.parts[source.blocks.part], source) for source in sources]
    header = put_header_to_wire(reserve, digests, ack=ack)
    with link.use():
        try:
            # As a future: the blocking form misses its deadline when the daemon hangs in mid-stream.
            requests = _messages(header, layout, sources, chunk_bytes)
            call = link.invoke(link.stub().Put.future, requests, deadline=deadline)
            reply = call.result(deadline.left() + GRACE_SECONDS)
        except grpc.FutureTimeoutError as error:
            call.cancel()
            raise deadline.exceeded("put: no answer from the daemon") from error
        except grpc.RpcError as error:
            raise error_from_call(error) from error
    return commit_answer_from_wire(reply)


def _digests(part: Part, source: Source) -> PartDigests:
    digests = digest_rows(part, source.buffer, source.lengths)
    return PartDigests(part.index, source.blocks.first, u32_to_wire(source.lengths), digests)


def _messages(
    header: pb.PutRequest, layout: Layout, sources: Iterable[Source], chunk_bytes: int
) -> Iterator[pb.PutRequest]:
    yield header
    for source in sources:
        part = layout.parts[source.blocks.part]
        for row, length in enumerate(source.lengths.tolist()):
            block = source.blocks.first + row
            for offset, data in chunks_of(pieces_of(source.buffer, row, length), chunk_bytes):
                chunk = pb.PutRequest.Chunk(part=part.index, block=block, offset=offset, data=data)
                yield pb.PutRequest(chunk=chunk)
