"""One fetch on a payload connection: progress, and blocks sent straight out of their slots."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.api import Extent, Progress
from kvstore.errors import DeadlineExceeded, LeaseExpired, ShuttingDown
from kvstore.layout import Layout
from kvstore.news import within
from kvstore.rpc import wire
from kvstore.rpc.packets import Header, Kind, packet
from kvstore.rpc.pipe import VIEWS_MAX, View, countdown
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.access import Caller
from kvstore.service.exchange import Exchange, Then

LEASE_CHECK_SECONDS = 1.0
BATCH_BYTES = 2 << 20
"""Sent in one system call; also the largest chunk."""


class FetchExchange(Exchange):
    """Sends what a lease covers. Its slots are held while they are sent, also beyond the end of the lease,
    but not for longer than a reader may be idle.
    """

    def answer(self, header: Header, caller: Caller) -> None:
        """Send progress, and the payload it speaks of, until all of the lease is resident or has failed.

        Errors: LeaseExpired, DeadlineExceeded when nobody reads; those of admission.
        """
        request = pb.FetchRequest.FromString(self._pipe.body(header, countdown(self._desk.idle_seconds)))
        with self._desk.verbs.gate.place("streams"), caller.stream():
            self._desk.verbs.admit_fetch(request.lease, caller)
            ladder = self._desk.verbs.ladder
            news: queue.SimpleQueue[Progress] = (
                queue.SimpleQueue()
            )  # bounded by the lease: a block comes once
            progress = ladder.watch(request.lease, news.put)
            layout = ladder.lease_namespace(request.lease).layout
            self._send(progress, request, layout)
            while not progress.done:
                progress = self._next(news, request.lease)
                self._send(progress, request, layout)
        self._write([packet(Kind.END)])

    def _next(self, news: queue.SimpleQueue[Progress], lease: int) -> Progress:
        """Wait for news; a lease that was released meanwhile brings none, and nobody may be left to hear."""
        while True:
            try:
                return news.get(timeout=LEASE_CHECK_SECONDS)
            except queue.Empty:
                self._desk.verbs.ladder.watch(lease, None)
            if self._pipe.has_ended():
                raise ConnectionResetError("the reader is gone")
            if self._desk.stopping.is_set():
                raise ShuttingDown("daemon: it ends, a fetch was under way")

    def _send(self, progress: Progress, request: pb.FetchRequest, layout: Layout) -> None:
        progress = within(progress, request.first, request.blocks)
        message = packet(Kind.PROGRESS, wire.progress_to_wire(progress, layout=layout).SerializeToString())
        wanted = [e for e in progress.extents if not request.parts or e.part in request.parts]
        if not request.payload or not wanted:
            self._write([message])
            return
        batches = self._batches(message, wanted, layout)
        is_over = False
        while not is_over:
            with self._desk.verbs.ladder.sending(request.lease):
                self._check_unmoved(wanted)
                self.then = Then.CUT  # an error would come in the midst of a block
                is_over = self._send_for_a_while(batches)
        self.then = Then.GO_ON

    def _send_for_a_while(self, batches: Iterator[list[View]]) -> bool:
        """Send batches and say whether these were all; else the lease is to be looked at again."""
        end = time.monotonic() + self._desk.idle_seconds
        for batch in batches:
            self._write(batch)
            self._desk.events.add("kvstore_framed_bytes_total", sum(map(len, batch[1::2])), direction="out")
            if time.monotonic() >= end:
                return False
        return True

    def _write(self, views: Sequence[View]) -> None:
        try:
            self._pipe.write(views, countdown(self._desk.idle_seconds))
        except TimeoutError:
            self.then = Then.CUT
            raise DeadlineExceeded(
                f"fetch: the limit is {self._desk.idle_seconds:g} s for a message to be taken, nobody reads"
            ) from None

    def _check_unmoved(self, extents: Sequence[Extent]) -> None:
        # A living lease has kept them; should that ever fail, nobody else's bytes may leave.
        for extent in extents:
            if not np.array_equal(self._desk.generations[extent.slots], extent.generations):
                raise LeaseExpired(f"fetch: slots of part {extent.part} changed hands")

    def _batches(self, message: bytes, extents: Sequence[Extent], layout: Layout) -> Iterator[list[View]]:
        """Yield a message and the blocks of extents as views to send together, a header before each chunk."""
        batch: list[View] = [message, b""]
        size = 0
        for part, block, record in self._records(extents, layout):
            for offset in range(0, len(record), BATCH_BYTES):
                piece = record[offset : offset + BATCH_BYTES]
                batch += [Header(Kind.CHUNK, len(piece), part, block, offset).pack(), piece]
                size += len(piece)
                if size >= BATCH_BYTES or len(batch) >= VIEWS_MAX - 1:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _records(self, extents: Sequence[Extent], layout: Layout) -> Iterator[tuple[int, int, memoryview]]:
        for extent in extents:
            part, block = layout.parts[extent.part], extent.first
            lengths = iter(extent.lengths.tolist())
            for view in self._desk.verbs.ladder.images(extent, part):
                for base in range(0, len(view), part.stride_bytes):
                    yield part.index, block, view[base : base + next(lengths)]
                    block += 1
