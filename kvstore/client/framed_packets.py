"""Payload as packets on a connection of its own: straight into the caller's rows, straight out of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

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
from kvstore.rpc.packets import HEADER_BYTES, Header, Kind
from kvstore.rpc.pipe import VIEWS_MAX, View
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import commit_answer_from_wire, progress_from_wire
from kvstore.types import PutOutcome

BATCH_BYTES = 1 << 20
"""Sent or received in one system call."""


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
                following = _blocks(asked, header, receiver)
            elif (progress := _progress(asked, header, layout)) is not None:
                receiver.progress(progress)
            if asked.is_over or (not receiver.done and receiver.has_enough):
                return  # where more would come, the connection ends here
            header = asked.header() if following is None else following


def _blocks(asked: Asked, header: Header, receiver: Receiver) -> Header | None:
    """Receive what a header announces, and whole blocks behind it that are known to follow; returns the next
    header where one is known to follow.
    """
    part, block, size = header.part, header.block, header.size
    blocks = receiver.next_blocks(part, block, bytes_max=BATCH_BYTES, views_max=VIEWS_MAX)
    if not blocks or header.offset or size != sum(map(len, blocks[0])):
        return _chunk(asked, header, receiver)
    # Between two system calls a socket is idle: with many small blocks, for longer than it works.
    heads = [bytearray(HEADER_BYTES) for _ in blocks]
    with _Targets(view for pieces in blocks for view in pieces) as targets:
        views: list[memoryview] = []
        for pieces, head in zip(blocks, heads, strict=True):
            views += [*itertools.islice(targets, len(pieces)), memoryview(head)]
        is_followed = receiver.is_followed(len(blocks))
        asked.pipe.read(views if is_followed else views[:-1], asked.left)
    for index, pieces in enumerate(blocks[1:], start=1):
        if heads[index - 1] != Header(Kind.CHUNK, sum(map(len, pieces)), part, block + index).pack():
            raise TierUnavailable(f"fetch: block {block + index} of part {part} did not follow as announced")
    receiver.arrived_whole(part, block, len(blocks))
    return asked.header_in(heads[-1]) if is_followed else None


def _chunk(asked: Asked, header: Header, receiver: Receiver) -> Header | None:
    """Receive one chunk; returns as `_blocks`."""
    part, block, size = header.part, header.block, header.size
    views = receiver.room(part, block, offset=header.offset, size=size) or [np.empty(size, np.uint8)]
    head, is_followed = memoryview(bytearray(HEADER_BYTES)), receiver.is_followed(1)
    with _Targets(views) as targets:
        asked.pipe.read([*targets, head] if is_followed else [*targets], asked.left)
    receiver.arrived(part, block, size=size)
    return asked.header_in(head) if is_followed else None


class _Targets:
    """Views that a socket can fill in place of those of an array; rows with gaps go over a copy."""

    def __init__(self, views: Iterable[Bytes]) -> None:
        self._copies: list[tuple[Bytes, Bytes]] = []
        self._views = iter([self._filled(view) for view in views])

    def _filled(self, view: Bytes) -> memoryview:
        if not view.flags.c_contiguous:
            self._copies.append((view, np.empty(len(view), np.uint8)))
            view = self._copies[-1][1]
        return memoryview(view)  # type: ignore[arg-type]  # numpy's stubs lag behind the buffer protocol

    def __enter__(self) -> Iterator[memoryview]:
        return self._views

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for view, copy in self._copies:
            np.copyto(view, copy)


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
