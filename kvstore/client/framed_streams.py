"""Payload in the gRPC streams Put and Fetch, where there is no connection of its own for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import grpc
import numpy as np

from kvstore.api import CommitAnswer, Progress
from kvstore.client.buffers import Source, chunks_of, pieces_of
from kvstore.client.deadline import Deadline
from kvstore.client.link import Link
from kvstore.client.receiving import Receiver
from kvstore.layout import Layout
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import commit_answer_from_wire, error_from_call, progress_from_wire

GRACE_SECONDS = 0.05
"""gRPC is given this long to end a call by itself at its deadline."""


def fetch(
    link: Link, layout: Layout, request: pb.FetchRequest, receiver: Receiver, *, deadline: Deadline
) -> None:
    """Receive a lease's blocks.

    Errors: what the daemon says; DeadlineExceeded; TierUnavailable on an ended link or a stream of nonsense.
    """
    call = link.invoke(link.stub().Fetch, request, deadline=deadline)
    try:
        for reply in call:
            if reply.WhichOneof("message") == "chunk":
                _place(reply.chunk, receiver)
            else:
                receiver.progress(progress_from_wire(reply.progress, layout))
            if receiver.has_enough:
                break
    except grpc.RpcError as error:
        raise error_from_call(error) from error
    finally:
        call.cancel()


def _place(chunk: pb.FetchReply.Chunk, receiver: Receiver) -> None:
    data, size = np.frombuffer(chunk.data, dtype=np.uint8), len(chunk.data)
    for view in receiver.room(chunk.part, chunk.block, offset=chunk.offset, size=size):
        np.copyto(view, data[: len(view)])
        data = data[len(view) :]
    receiver.arrived(chunk.part, chunk.block, size=size)


def news(link: Link, layout: Layout, request: pb.FetchRequest, *, deadline: Deadline) -> Iterator[Progress]:
    """Yield the news of a lease.

    Errors: as `fetch`.
    """
    call = link.invoke(link.stub().Fetch, request, deadline=deadline)
    try:
        for reply in call:
            yield progress_from_wire(reply.progress, layout)
    except grpc.RpcError as error:
        raise error_from_call(error) from error
    finally:
        call.cancel()


def put(
    link: Link,
    layout: Layout,
    header: pb.PutRequest,
    sources: Sequence[Source],
    *,
    deadline: Deadline,
    chunk_bytes: int,
) -> CommitAnswer:
    """Send blocks.

    Errors: what the daemon says; DeadlineExceeded; TierUnavailable when the link is over.
    """
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
