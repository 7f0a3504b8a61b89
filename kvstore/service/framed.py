"""The framed streams: payload inside messages, for remote and untrusted clients. Copies leave the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import grpc.aio
import numpy as np
import numpy.typing as npt

from kvstore.api import (
    CommitAnswer,
    CommitRequest,
    Extent,
    OutcomeRun,
    PartDigests,
    Progress,
    ReserveAnswer,
    ReserveRequest,
)
from kvstore.errors import DeadlineExceeded, InvalidArgument, LeaseExpired
from kvstore.events import Events
from kvstore.layout import Layout
from kvstore.news import within
from kvstore.rpc import wire
from kvstore.rpc.channel import CHUNK_BYTES_MAX
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.access import STREAMS_SHARE, TRUSTED, Caller
from kvstore.service.durable import DurableAnswer
from kvstore.service.landing import Announced, Landing, merged
from kvstore.service.limits import Budget
from kvstore.service.parsing import Malformed
from kvstore.service.verbs import Verbs
from kvstore.types import AckTier

LEASE_CHECK_SECONDS = 1.0
T = TypeVar("T")
BATCH_BYTES = 4 << 20
"""Payload copied out per hop to a worker thread."""
FetchContext = grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchReply]


class Framed:
    """Serves Put and Fetch.

    `generations` is the arena's table: a block whose slot changed hands while it was copied is not sent on.
    Threads: the event loop; copies on `workers`.
    """

    def __init__(
        self,
        verbs: Verbs,
        *,
        workers: Executor,
        generations: npt.NDArray[np.uint32],
        events: Events,
        budget: Budget,
        idle_seconds: float,
    ) -> None:
        self._verbs = verbs
        self._budget = budget
        self._idle = idle_seconds
        self._workers = workers
        self._generations = generations
        self._events = events

    async def put(self, requests: AsyncIterator[pb.PutRequest], caller: Caller = TRUSTED) -> pb.PutReply:
        """Reserve, copy the chunks in, check them against the writer's digests, commit what is right.

        Errors: InvalidArgument on a stream out of order; those of reserve and commit.
        """
        with self._verbs.gate.place("streams"), caller.stream():
            header = await self._next_message(requests)
            if header is None:
                raise InvalidArgument("put: the stream ended before its header")
            with self._budget.holding(header.ByteSize()):
                reserve, source, ack = wire.put_header_from_wire(
                    header, session=caller.share or STREAMS_SHARE
                )
                self._verbs.admit_put(reserve, caller)
                return await self._take(requests, reserve, source, ack)

    async def _take(
        self,
        requests: AsyncIterator[pb.PutRequest],
        reserve: ReserveRequest,
        source: Sequence[PartDigests],
        ack: AckTier,
    ) -> pb.PutReply:
        ladder = self._verbs.ladder
        answer = await self._reserve(reserve)
        if not answer.reservation:
            # Nothing of the payload is wanted: the call ends here, which also ends the client's sending.
            return self._reply(answer.outcomes)
        try:
            layout = ladder.namespace(reserve.namespace).layout
            make = partial(Landing, layout, answer.extents, source, images=ladder.images)
            landing = await self._off_loop(make)
            await self._receive(requests, landing, Announced(layout, reserve))
            good = landing.good_blocks()
            committed = await self._commit(answer.reservation, landing, good=good, ack=ack)
        except BaseException:
            # Nothing of ours writes to the slots any more: they can be lent again at once.
            ladder.abort(answer.reservation)
            raise
        return self._reply(merged(answer.outcomes, committed.outcomes, good=good))

    async def _next_message(self, requests: AsyncIterator[pb.PutRequest]) -> pb.PutRequest | None:
        try:
            async with asyncio.timeout(self._idle):
                request: pb.PutRequest | Malformed | None = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(
                f"put: the limit is {self._idle:g} s without a message, nothing arrived"
            ) from None
        if isinstance(request, Malformed):
            raise request.error()
        return request

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    async def _reserve(self, request: ReserveRequest) -> ReserveAnswer:
        """Reserve on a worker, where token ids are hashed; a call cancelled meanwhile keeps nothing."""
        loop, ladder = asyncio.get_running_loop(), self._verbs.ladder
        answer = loop.run_in_executor(self._workers, ladder.reserve, request)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(lambda late: late.exception() or ladder.abort(late.result().reservation))
            raise

    async def _receive(
        self, requests: AsyncIterator[pb.PutRequest], landing: Landing, announced: Announced
    ) -> None:
        """Land one chunk while the next one arrives; both are counted as held."""
        loop = asyncio.get_running_loop()
        landing_now: asyncio.Future[None] | None = None
        held: list[int] = []
        try:
            while (request := await self._next_message(requests)) is not None:
                piece = announced.piece(request)
                self._budget.take(len(piece.data))
                held.append(len(piece.data))
                if landing_now is not None:
                    await landing_now
                    self._budget.give(held.pop(0))
                landing_now = loop.run_in_executor(self._workers, landing.land, piece)
                self._events.add("kvstore_framed_bytes_total", len(piece.data), direction="in")
            if landing_now is not None:
                await landing_now
        finally:
            if landing_now is not None:
                # Also of a cancelled call: the slots are given back only when nobody writes to them.
                await asyncio.wait([landing_now])
                landing_now.exception()
            self._budget.give(sum(held))

    async def _commit(self, reservation: int, landing: Landing, *, good: int, ack: AckTier) -> CommitAnswer:
        durable = DurableAnswer[CommitAnswer]()
        parts = await self._off_loop(partial(landing.landed, good))
        request = CommitRequest(reservation=reservation, blocks=good, parts=parts, ack=ack)
        answer = self._verbs.ladder.commit(request, durable.hear)
        return await durable.wait() if answer is None else answer

    def _reply(self, outcomes: tuple[OutcomeRun, ...]) -> pb.PutReply:
        return pb.PutReply(outcomes=wire.outcomes_to_wire(outcomes), boot_id=self._verbs.boot_id)

    async def fetch(self, request: pb.FetchRequest, context: FetchContext, caller: Caller = TRUSTED) -> None:
        """Send progress, and the payload it speaks of, until all of the lease has become resident or failed.

        Errors: LeaseExpired.
        """
        with self._verbs.gate.place("streams"), caller.stream():
            self._verbs.admit_fetch(request.lease, caller)
            loop = asyncio.get_running_loop()
            news: asyncio.Queue[Progress] = asyncio.Queue()  # bounded by the lease: a block arrives once

            def hear(progress: Progress) -> None:
                loop.call_soon_threadsafe(news.put_nowait, progress)

            progress = self._verbs.ladder.watch(request.lease, hear)
            layout = self._verbs.ladder.lease_namespace(request.lease).layout
            while True:
                await self._send(progress, request, context, layout)
                if progress.done:
                    return
                progress = await self._next(news, request.lease)

    async def _next(self, news: asyncio.Queue[Progress], lease: int) -> Progress:
        """Wait for news; a lease that was released meanwhile will bring none."""
        while True:
            try:
                return await asyncio.wait_for(news.get(), LEASE_CHECK_SECONDS)
            except TimeoutError:
                self._verbs.ladder.watch(lease, None)

    async def _send(
        self, progress: Progress, request: pb.FetchRequest, context: FetchContext, layout: Layout
    ) -> None:
        boot_id = self._verbs.boot_id
        progress = within(progress, request.first, request.blocks)
        wanted = [e for e in progress.extents if not request.parts or e.part in request.parts]
        event = wire.progress_to_wire(progress, layout=layout)
        await self._write(context, pb.FetchReply(progress=event, boot_id=boot_id))
        if not request.payload:
            return
        loop = asyncio.get_running_loop()
        for extent in wanted:
            batches = self._batches(extent, layout, boot_id)
            while (batch := await loop.run_in_executor(self._workers, next, batches, None)) is not None:
                for reply in batch:
                    await self._write(context, reply)
                    self._events.add("kvstore_framed_bytes_total", len(reply.chunk.data), direction="out")

    async def _write(self, context: FetchContext, reply: pb.FetchReply) -> None:
        try:
            async with asyncio.timeout(self._idle):
                await context.write(reply)
        except TimeoutError:
            raise DeadlineExceeded(
                f"fetch: the limit is {self._idle:g} s for a message to be taken, nobody reads"
            ) from None

    def _batches(self, extent: Extent, layout: Layout, boot_id: int) -> Iterator[list[pb.FetchReply]]:
        """Yield chunks of about BATCH_BYTES together; runs on a worker thread."""
        part = layout.parts[extent.part]
        batch: list[pb.FetchReply] = []
        size = index = 0
        for view in self._verbs.ladder.images(extent, part):
            for base in range(0, len(view), part.stride_bytes):
                record = view[base : base + int(extent.lengths[index])]
                batch += _chunks(record, part=extent.part, block=extent.first + index, boot_id=boot_id)
                size += len(record)
                index += 1
                if size >= BATCH_BYTES:
                    self._check_unmoved(extent, index)
                    yield batch
                    batch, size = [], 0
        self._check_unmoved(extent, index)
        if batch:
            yield batch

    def _check_unmoved(self, extent: Extent, count: int) -> None:
        slots = extent.slots[:count]
        if not np.array_equal(self._generations[slots], extent.generations[:count]):
            raise LeaseExpired(f"fetch: slots of part {extent.part} changed hands while they were read")


def _chunks(record: memoryview, *, part: int, block: int, boot_id: int) -> Iterator[pb.FetchReply]:
    for offset in range(0, len(record), CHUNK_BYTES_MAX):
        data = record[offset : offset + CHUNK_BYTES_MAX].tobytes()
        chunk = pb.FetchReply.Chunk(part=part, block=block, offset=offset, data=data)
        yield pb.FetchReply(chunk=chunk, boot_id=boot_id)
