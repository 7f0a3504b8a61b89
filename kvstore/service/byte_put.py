"""One put on a payload connection: what is wanted is told first, then received straight into its slots."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from kvstore.api import CommitAnswer, CommitRequest, OutcomeRun, PartDigests, ReserveAnswer, ReserveRequest
from kvstore.errors import DeadlineExceeded, InvalidArgument, ShuttingDown
from kvstore.rpc import wire
from kvstore.rpc.channel import CHUNK_BYTES_MAX
from kvstore.rpc.packets import HEADER_BYTES, Header, Kind, header_of, packet
from kvstore.rpc.pipe import countdown
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.access import STREAMS_SHARE, Caller
from kvstore.service.exchange import Exchange, Then
from kvstore.service.landing import Announced, Landing, Place, merged
from kvstore.types import AckTier

DURABLE_CHECK_SECONDS = 1.0


class PutExchange(Exchange):
    """Takes what one put brings.

    It is answered twice: after the header with the outcomes of the reservation, of which RESERVED blocks are
    now awaited, and at the end. A put of which nothing is wanted is over with the first answer.
    """

    def answer(self, header: Header, caller: Caller) -> None:
        """Reserve, receive, check against the writer's digests, commit what is right.

        Errors: InvalidArgument on what was not announced, or out of order; DeadlineExceeded; those of
        admission, reserve and commit.
        """
        self.then = Then.CLOSE
        with self._desk.verbs.gate.place("streams"), caller.stream(), self._desk.budget.holding(header.size):
            body = self._pipe.body(header, countdown(self._desk.idle_seconds))
            self.then = Then.GO_ON
            message = pb.PutRequest(header=pb.PutRequest.Header.FromString(body))
            reserve, source, ack = wire.put_header_from_wire(message, session=caller.share or STREAMS_SHARE)
            self._desk.verbs.admit_put(reserve, caller)
            outcomes = self._put(reserve, source, ack)
        self._reply(outcomes)

    def _put(
        self, reserve: ReserveRequest, source: Sequence[PartDigests], ack: AckTier
    ) -> tuple[OutcomeRun, ...]:
        answer = self._desk.verbs.ladder.reserve(reserve)
        if not answer.reservation:
            return answer.outcomes
        try:
            return self._take(reserve, answer, source, ack)
        except BaseException:
            # Nothing of ours writes to the slots any more: they can be lent again at once.
            self._desk.verbs.ladder.abort(answer.reservation)
            raise

    def _take(
        self, reserve: ReserveRequest, answer: ReserveAnswer, source: Sequence[PartDigests], ack: AckTier
    ) -> tuple[OutcomeRun, ...]:
        ladder = self._desk.verbs.ladder
        layout = ladder.namespace(reserve.namespace).layout
        landing = Landing(layout, answer.extents, source, images=ladder.images)
        self.then = Then.CLOSE
        self._reply(answer.outcomes)
        try:
            self._receive(landing, Announced(layout, reserve), seconds=answer.seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"put: the limits are {self._desk.idle_seconds:g} s for a chunk and {answer.seconds:g} s for "
                "all of them; not all arrived"
            ) from None
        self.then = Then.GO_ON
        good = landing.good_blocks()
        request = CommitRequest(
            reservation=answer.reservation, blocks=good, parts=landing.landed(good), ack=ack
        )
        return merged(answer.outcomes, self._commit(request).outcomes, good=good)

    def _receive(self, landing: Landing, announced: Announced, *, seconds: float) -> None:
        """Receive chunks until the end; behind each follows a header, which is read with it."""
        pipe, in_all = self._pipe, countdown(seconds)  # what comes later cannot be committed
        scratch = memoryview(bytearray(HEADER_BYTES))

        def left() -> float:
            return min(self._desk.idle_seconds, in_all())

        header = pipe.header(left, limit=CHUNK_BYTES_MAX)
        while header.kind is Kind.CHUNK:
            place = Place(header.part, header.block, header.offset, header.size)
            announced.admit(place)
            room = landing.room(place)
            if room is None:
                with self._desk.budget.holding(place.size):
                    pipe.read([memoryview(bytearray(place.size)), scratch], left)
            else:
                pipe.read([room, scratch], left)
                landing.filled(place)
            self._desk.events.add("kvstore_framed_bytes_total", place.size, direction="in")
            header = header_of(scratch, limit=CHUNK_BYTES_MAX)
        if header.kind is not Kind.END or header.size:
            raise InvalidArgument("put: only chunks follow the header, and an end")

    def _commit(self, request: CommitRequest) -> CommitAnswer:
        durable: Future[CommitAnswer] = Future()
        answer = self._desk.verbs.ladder.commit(request, durable.set_result)
        while answer is None:
            try:
                answer = durable.result(DURABLE_CHECK_SECONDS)
            except TimeoutError:
                if self._desk.stopping.is_set():
                    raise ShuttingDown("daemon: it ends, a put was waiting for the disk") from None
        return answer

    def _reply(self, outcomes: tuple[OutcomeRun, ...]) -> None:
        message = pb.PutReply(outcomes=wire.outcomes_to_wire(outcomes), boot_id=self._desk.verbs.boot_id)
        self._pipe.write(
            [packet(Kind.PUT_REPLY, message.SerializeToString())], countdown(self._desk.idle_seconds)
        )
