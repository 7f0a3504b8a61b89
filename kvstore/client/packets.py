"""Payload as packets on a connection of its own: straight into the caller's rows, straight out of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.api import CommitAnswer, Progress
from kvstore.client.buffers import Source, pieces_of
from kvstore.client.deadline import Deadline
from kvstore.client.payload import Asked, Payload
from kvstore.client.receiving import Receiver
from kvstore.errors import TierUnavailable
from kvstore.layout import Layout
from kvstore.rows import Bytes
from kvstore.rpc.packets import Header, Kind
from kvstore.rpc.pipe import VIEWS_MAX, View
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import commit_answer_from_wire, progress_from_wire
from kvstore.types import PutOutcome

BATCH_BYTES = 2 << 20
"""Sent in one system call, if its socket takes them."""


def fetch(
    payload: Payload, layout: Layout, request: pb.FetchRequest, receiver: Receiver, *, deadline: Deadline
) -> None:
    """Receive a lease's blocks.

    Errors: NoPayload; what the daemon says; DeadlineExceeded; TierUnavailable on a connection that broke, or
    nonsense on it.
    """
    with payload.asking(Kind.FETCH, request.SerializeToString(), deadline) as (asked, header):
        while True:
            following: Header | None = None
            if header.kind is Kind.CHUNK:
                following = _chunk(asked, header, receiver)
            elif (progress := _progress(asked, header, layout)) is not None:
                receiver.progress(progress)
            if asked.is_over or (not receiver.done and receiver.has_enough):
                return  # where more would come, the connection ends here
            header = asked.header() if following is None else following


def _chunk(asked: Asked, header: Header, receiver: Receiver) -> Header | None:
    """Receive a chunk; returns the next header where one is known to follow."""
    part, block, size = header.part, header.block, header.size
    views = receiver.room(part, block, offset=header.offset, size=size) or [np.empty(size, np.uint8)]
    # Rows with gaps go over a copy.
    whole = [view if view.flags.c_contiguous else np.empty(len(view), np.uint8) for view in views]
    targets = [memoryview(view) for view in whole]  # type: ignore[arg-type]  # numpy's stubs lag
    following: Header | None = None
    if receiver.is_followed(part, block):
        following = asked.read_then_header(targets)
    else:
        asked.pipe.read(targets, asked.left)
    for view, copy in zip(views, whole, strict=True):
        if view is not copy:
            np.copyto(view, copy)
    receiver.arrived(part, block, size=size)
    return following


def _progress(asked: Asked, header: Header, layout: Layout) -> Progress | None:
    """Read what is no chunk: progress, or None at the end.

    Errors: what the daemon says; TierUnavailable.
    """
    asked.is_over = header.kind in (Kind.END, Kind.ERROR)
    if header.kind in (Kind.PROGRESS, Kind.ERROR):
        return progress_from_wire(asked.message(header, pb.ProgressEvent.FromString), layout)
    if header.kind is not Kind.END or header.size:
        raise TierUnavailable(f"fetch: the daemon answered with a packet of kind {header.kind.name}")
    return None


def news(
    payload: Payload, layout: Layout, request: pb.FetchRequest, *, deadline: Deadline
) -> Iterator[Progress]:
    """Yield the news of a lease.

    Errors: as `fetch`.
    """
    with payload.asking(Kind.FETCH, request.SerializeToString(), deadline) as (asked, header):
        while (progress := _progress(asked, header, layout)) is not None:
            yield progress
            header = asked.header()


def put(
    payload: Payload,
    layout: Layout,
    begin: pb.PutRequest,
    sources: Sequence[Source],
    *,
    deadline: Deadline,
    chunk_bytes: int,
) -> CommitAnswer:
    """Send those blocks that the daemon wants.

    Errors: as `fetch`.
    """
    with payload.asking(Kind.PUT, begin.header.SerializeToString(), deadline) as (asked, header):
        reply = _put_reply(asked, header)
        wanted = _reserved(reply)
        if not wanted.any():
            return reply
        asked.is_over = False
        if not _sent(asked, _batches(layout, sources, wanted, chunk_bytes)):
            header = asked.header()
            if header.kind is Kind.ERROR:
                asked.message(header, pb.Error.FromString)
            raise TierUnavailable("put: the daemon ended it before all was sent")
        return _put_reply(asked, asked.header())


def _put_reply(asked: Asked, header: Header) -> CommitAnswer:
    asked.is_over = header.kind in (Kind.PUT_REPLY, Kind.ERROR)
    if not asked.is_over:
        raise TierUnavailable(f"put: the daemon answered with a packet of kind {header.kind.name}")
    return commit_answer_from_wire(asked.message(header, pb.PutReply.FromString))


def _reserved(reply: CommitAnswer) -> npt.NDArray[np.bool_]:
    """Return of each block of a put whether it is awaited."""
    counts = [run.count for run in reply.outcomes]
    return np.repeat([run.outcome is PutOutcome.RESERVED for run in reply.outcomes], counts)


def _sent(asked: Asked, batches: Iterator[list[View]]) -> bool:
    """Send all batches; False when the daemon ends the put in its midst, of which it may tell why.

    Errors: TimeoutError.
    """
    try:
        for batch in batches:
            if not asked.pipe.is_quiet():
                return False
            asked.pipe.write(batch, asked.left)
    except TimeoutError:
        raise
    except OSError:
        return False
    return True


def _batches(
    layout: Layout, sources: Sequence[Source], wanted: npt.NDArray[np.bool_], chunk_bytes: int
) -> Iterator[list[View]]:
    """Yield the awaited blocks as views to send together, a header before each chunk, and the end."""
    batch: list[View] = []
    size = 0
    for source in sources:
        part, first = layout.parts[source.blocks.part].index, source.blocks.first
        for row in np.flatnonzero(wanted[first : first + len(source.lengths)]).tolist():
            pieces = pieces_of(source.buffer, row, int(source.lengths[row]))
            for offset, views in _chunks(pieces, chunk_bytes):
                length = sum(map(len, views))
                batch += [Header(Kind.CHUNK, length, part, first + row, offset).pack(), *views]
                size += length
                if size >= BATCH_BYTES or len(batch) >= VIEWS_MAX // 2:
                    yield batch
                    batch, size = [], 0
    yield [*batch, Header(Kind.END, 0).pack()]


def _chunks(pieces: Sequence[Bytes], limit: int) -> Iterator[tuple[int, list[View]]]:
    """Yield a record in pieces as (offset, views) of at most `limit` bytes together."""
    offset, room = 0, limit
    views: list[View] = []
    for piece in pieces:
        whole = memoryview(np.ascontiguousarray(piece))  # type: ignore[arg-type]  # numpy's stubs lag
        while len(whole):
            view, whole = whole[:room], whole[room:]
            views.append(view)
            room -= len(view)
            if not room:
                yield offset, views
                offset, room, views = offset + limit, limit, []
    if views:
        yield offset, views
