"""One client's session: requests come in, answers, progress and late commits go out on the same stream.

The loop reads a request, calls the ladder and writes the answer; what tiers report later is put behind it.
There is one writer at a time, and a client that does not read is cut off: memory for it is bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore import __version__
from kvstore.api import CommitAnswer, Progress
from kvstore.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    Overloaded,
    PermissionRefused,
    TierUnavailable,
)
from kvstore.events import Events
from kvstore.layout import Layout
from kvstore.news import joined
from kvstore.rpc import wire
from kvstore.rpc.channel import PROTOCOL
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.access import TRUSTED, Caller
from kvstore.service.mailbox import Mailbox
from kvstore.service.parsing import Malformed
from kvstore.service.streams import Stream, counted_error
from kvstore.service.turns import ALONE, Turn
from kvstore.service.verbs import Deleted, Verbs, leaves_loop
from kvstore.service.waking import when_awake

_log = logging.getLogger(__name__)
CUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a listener offers to its sessions. Without `arena_path` payload goes through the daemon: over the
    byte port of the TCP listener, 0 for none, or the framed streams.
    """

    arena_path: str = ""
    arena_bytes: int = 0
    arena_id: int = 0
    lock_path: str = ""
    byte_port: int = 0
    message_bytes_max: int
    requests_max: int
    queue_max: int
    hello_seconds: float = 30.0


class Session:
    """Serves one stream until it ends, then lets go of everything taken on it.

    Threads: the event loop; `_announce` and `_durable` hop onto it.
    """

    def __init__(
        self,
        verbs: Verbs,
        stream: Stream,
        *,
        number: int,
        offer: Offer,
        events: Events,
        caller: Caller = TRUSTED,
    ) -> None:
        self.number = number
        self._verbs = verbs
        self._stream = stream
        self._offer = offer
        self._caller = caller
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._handler = asyncio.current_task()
        self._outgoing: deque[pb.SessionReply] = deque()
        self._unsent: dict[int, tuple[Mailbox[Progress], Layout]] = {}
        self._flushing = False
        self._flush_task: asyncio.Task[None] | None = None
        self._loading: set[int] = set()
        self._committing: set[int] = set()
        self._deleting: set[int] = set()
        self._client = ""
        self._turn: Turn | None = None
        self._cut = False
        self._over = False

    async def run(self) -> None:
        """Serve until the client ends the stream, dies, or is cut off."""
        try:
            while isinstance(request := await self._read(), pb.SessionRequest):
                await self._receive(request)
                await self._flush()
                if self._caller.withdrawn:
                    raise PermissionRefused("session: its token is no longer valid")
            if isinstance(request, Malformed):
                raise request.error()
        except asyncio.CancelledError:
            if not self._cut:
                raise
        finally:
            self._over = True
            if self._turn is not None:
                self._verbs.gate.turns.leave(self._turn)
            self._verbs.ladder.end_session(self.number)
            _log.info("session ended", extra={"session": self.number, "client": self._client or "unknown"})
        if self._cut:
            await self._refuse_slow_reader()

    async def _read(self) -> object:
        if self._client:
            return await self._stream.read()
        try:
            async with asyncio.timeout(self._offer.hello_seconds):
                return await self._stream.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"session: the limit is {self._offer.hello_seconds:g} s until hello, nothing arrived"
            ) from None

    async def _receive(self, request: pb.SessionRequest) -> None:
        verb = request.WhichOneof("verb")
        try:
            if verb is not None and leaves_loop(verb, getattr(request, verb)):
                async with self._turn.long() if self._turn else ALONE:
                    reply = await asyncio.to_thread(self._answer, verb, request)
            else:
                async with self._turn.quick() if self._turn else ALONE:
                    reply = await when_awake(self._verbs.ladder, partial(self._answer, verb, request))
        except KVStoreError as error:
            reply = {"error": counted_error(error, self._events)}
        except Exception as error:
            _log.exception("verb failed", extra={"session": self.number, "verb": verb})
            reply = {"error": counted_error(error, self._events)}
        if reply is not None and request.request_id:
            self._send(request.request_id, **reply)

    def _answer(self, verb: str | None, request: pb.SessionRequest) -> dict[str, Any] | None:
        if verb is None:
            raise InvalidArgument("session: a request without a verb, or with one this daemon does not know")
        if verb == "hello":
            return {"hello": self._hello(request.hello)}
        if not self._client:
            raise InvalidArgument(f"session: the first request must be hello, got {verb}")
        if verb == "ping":
            self._caller.admit(ends_work=True)
            return {"ping": pb.PingReply()}
        message = getattr(request, verb)
        if verb == "match":
            return {"match": self._match(message, request.request_id)}
        if verb in ("reserve", "prefetch"):
            return {verb: getattr(self._verbs, verb)(message, session=self.number, caller=self._caller)}
        if verb == "commit":
            reply = self._commit(message, request.request_id)
            return None if reply is None else {"commit": reply}
        if verb == "delete":
            self._delete(message, request.request_id)
            return None
        if verb == "release":
            self._loading.discard(message.lease)
        return {verb: getattr(self._verbs, verb)(message, caller=self._caller)}

    def _hello(self, hello: pb.HelloRequest) -> pb.HelloReply:
        if hello.protocol != PROTOCOL:
            raise InvalidArgument(f"hello: this daemon speaks protocol {PROTOCOL}, got {hello.protocol}")
        if self._turn is None:
            self._turn = self._verbs.gate.turns.join(hello.client[:128] or "unnamed")
        self._client = self._turn.client
        maps = hello.want_mapping and bool(self._offer.arena_path)
        fields = {"session": self.number, "client": self._client, "transport": "mapped" if maps else "framed"}
        _log.info("session started", extra=fields)
        reply = pb.HelloReply(
            protocol=PROTOCOL,
            session=self.number,
            server=f"kvstore {__version__}",
            message_bytes_max=self._offer.message_bytes_max,
            byte_port=self._offer.byte_port,
        )
        if maps:
            reply.arena_path = self._offer.arena_path
            reply.arena_bytes = self._offer.arena_bytes
            reply.arena_id = self._offer.arena_id
            reply.lock_path = self._offer.lock_path
        return reply

    def _match(self, message: pb.MatchRequest, request_id: int) -> pb.MatchReply:
        if not request_id:
            raise InvalidArgument("match: needs a request id, its answer would be lost")
        announce = self._later(request_id, self._announce)
        news: Mailbox[Progress] = Mailbox(lambda: announce(news, self._verbs.layout_of(message.namespace)))
        reply = self._verbs.match(message, session=self.number, on_progress=news.put, caller=self._caller)
        self._loading -= {release.lease for release in message.release}
        if reply.lease and not reply.ready and not message.no_load:
            self._loading.add(reply.lease)
        return reply

    def _commit(self, message: pb.CommitRequest, request_id: int) -> pb.CommitReply | None:
        hear = self._later(request_id, self._durable)
        reply = self._verbs.commit(
            message, on_durable=lambda answer: hear(message.reservation, answer), caller=self._caller
        )
        if reply is None:
            self._committing.add(message.reservation)
        return reply

    def _delete(self, message: pb.DeleteRequest, request_id: int) -> None:
        hear = self._later(request_id, self._deleted)
        self._deleting.add(request_id)
        try:
            self._verbs.delete(message, on_deleted=hear, caller=self._caller)
        except BaseException:
            self._deleting.discard(request_id)
            raise

    def _later(self, request_id: int, act: Callable[..., None]) -> Callable[..., None]:
        """Return a callback for a tier's thread; it runs `act` on the loop, behind the present answer."""
        unfinished = len(self._loading) + len(self._committing) + len(self._deleting)
        if unfinished >= self._offer.requests_max:
            raise Overloaded(f"session: {self._offer.requests_max} requests are unfinished, the limit")

        def hop(*values: object) -> None:
            if self._over:
                return
            try:
                self._loop.call_soon_threadsafe(act, request_id, *values)
            except RuntimeError:
                _log.debug("news after the loop's end", extra={"session": self.number})

        return hop

    def _announce(self, request_id: int, news: Mailbox[Progress], layout: Layout) -> None:
        self._unsent[request_id] = news, layout
        self._flush_soon()

    def _next_news(self) -> pb.SessionReply | None:
        """Return one message with all that has come of a request while others were written."""
        request_id = next(iter(self._unsent))
        news, layout = self._unsent.pop(request_id)
        if not (waiting := news.take()):
            return None
        progress = joined(waiting)
        if progress.done:
            self._loading.discard(progress.lease)
        event = wire.progress_to_wire(progress, layout=layout)
        return pb.SessionReply(request_id=request_id, boot_id=self._verbs.boot_id, progress=event)

    def _durable(self, request_id: int, reservation: int, answer: CommitAnswer) -> None:
        self._committing.discard(reservation)
        if request_id:
            self._send(request_id, commit=wire.commit_answer_to_wire(answer, boot_id=self._verbs.boot_id))
            self._flush_soon()

    def _deleted(self, request_id: int, outcome: Deleted) -> None:
        self._deleting.discard(request_id)
        if not request_id:
            return
        try:
            self._send(request_id, delete=self._verbs.deleted(outcome))
        except TierUnavailable as error:
            self._send(request_id, error=counted_error(error, self._events))
        self._flush_soon()

    def _send(self, request_id: int, **answer: Any) -> None:
        if self._over or self._cut:
            return
        if len(self._outgoing) >= self._offer.queue_max:
            self._cut_off()
            return
        self._outgoing.append(pb.SessionReply(request_id=request_id, boot_id=self._verbs.boot_id, **answer))

    def _cut_off(self) -> None:
        _log.warning(
            "session cut off: its client does not read",
            extra={"session": self.number, "client": self._client, "unread": len(self._outgoing)},
        )
        self._events.add("kvstore_sessions_cut_total")
        self._cut = True
        self._outgoing.clear()
        self._unsent.clear()
        assert self._handler is not None
        self._handler.cancel()

    async def _refuse_slow_reader(self) -> None:
        assert self._handler is not None
        self._handler.uncancel()
        error = Overloaded(f"session {self.number}: {self._offer.queue_max} answers were not read")
        # The refusal itself waits behind what the client does not read.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stream.refuse(error), CUT_SECONDS)

    def _flush_soon(self) -> None:
        if not self._flushing and (self._outgoing or self._unsent):
            self._flush_task = self._loop.create_task(self._flush())

    async def _flush(self) -> None:
        if self._flushing:
            return
        self._flushing = True
        try:
            while (self._outgoing or self._unsent) and not self._over:
                reply = self._outgoing.popleft() if self._outgoing else self._next_news()
                if reply is not None:
                    await self._stream.write(reply)
        except ConnectionError as error:
            # The stream is gone; the reading side hears of it as well and ends the session.
            _log.debug("answer lost", extra={"session": self.number, "error": repr(error)})
            self._outgoing.clear()
            self._unsent.clear()
        finally:
            self._flushing = False


class SessionNumbers:
    """Counts sessions over all listeners; a number is never used twice in a daemon's life."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def take(self) -> int:
        """Return the next number."""
        return next(self._next)


class Sessions:
    """Serves the sessions of one listener, whatever carries them."""

    def __init__(self, verbs: Verbs, *, offer: Offer, numbers: SessionNumbers, events: Events) -> None:
        self._verbs = verbs
        self._offer = offer
        self._numbers = numbers
        self._events = events

    async def serve(self, stream: Stream, caller_of: Callable[[], Caller]) -> None:
        """Serve a client until its stream ends, or is refused."""
        try:
            with self._verbs.gate.place("sessions"):
                self._events.add("kvstore_sessions_total")
                session = Session(
                    self._verbs,
                    stream,
                    number=self._numbers.take(),
                    offer=self._offer,
                    events=self._events,
                    caller=caller_of(),
                )
                await session.run()
        except KVStoreError as error:
            await stream.refuse(error)
