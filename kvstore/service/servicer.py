"""The data service on grpc.aio: the session stream, its unary twins and the framed streams."""
# ruff: noqa: N802 - the contract names the methods

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import grpc.aio

from kvstore.api import CommitAnswer
from kvstore.errors import KVStoreError
from kvstore.events import Events
from kvstore.rpc import wire
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.v1 import data_pb2_grpc
from kvstore.service.access import Caller, CallerOf, trusted
from kvstore.service.durable import DurableAnswer
from kvstore.service.framed import Framed
from kvstore.service.session import Sessions
from kvstore.service.streams import GrpcStream, counted_error
from kvstore.service.verbs import Deleted, Verbs, leaves_loop
from kvstore.service.waking import when_awake

_log = logging.getLogger(__name__)
Q = TypeVar("Q")
R = TypeVar("R")
Context = grpc.aio.ServicerContext[Any, Any]


async def refuse(context: Context, error: Exception, events: Events) -> NoReturn:
    """End a call with the status and the Error message of an exception."""
    if not isinstance(error, KVStoreError):
        _log.error("call failed", exc_info=error)
    message = counted_error(error, events)
    await context.abort(wire.status_of(error), message.message, wire.error_metadata(error))
    raise AssertionError("abort returned")


class DataServicer(data_pb2_grpc.DataServicer):
    """Serves one listener."""

    def __init__(
        self,
        verbs: Verbs,
        framed: Framed,
        *,
        sessions: Sessions,
        events: Events,
        caller_of: CallerOf = trusted,
    ) -> None:
        self._verbs = verbs
        self._framed = framed
        self._sessions = sessions
        self._events = events
        self._caller_of = caller_of

    async def Session(self, request_iterator: object, context: Context) -> None:
        """Serve a client until its stream ends."""
        stream = GrpcStream(context, lambda error: refuse(context, error, self._events))
        await self._sessions.serve(stream, partial(self._caller_of, context))

    async def _unary(self, verb: Callable[..., R], request: Q, context: Context) -> R:
        try:
            caller = self._caller_of(context)
            if leaves_loop(verb.__name__, request):
                return await asyncio.to_thread(verb, request, caller=caller)
            return await when_awake(self._verbs.ladder, partial(verb, request, caller=caller))
        except Exception as error:
            await refuse(context, error, self._events)

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenReply:
        """Open a namespace."""
        return await self._unary(self._verbs.open, request, context)

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        """Match; the progress of a lease that is not ready is there through Fetch."""
        return await self._unary(self._verbs.match, request, context)

    async def Touch(self, request: pb.TouchRequest, context: Context) -> pb.TouchReply:
        """Keep a prefix alive."""
        return await self._unary(self._verbs.touch, request, context)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchReply:
        """Promote ahead of a fetch."""
        return await self._unary(self._verbs.prefetch, request, context)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelReply:
        """Cancel a prefetch."""
        return await self._unary(self._verbs.cancel, request, context)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:
        """Prolong leases."""
        return await self._unary(self._verbs.renew, request, context)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        """End a lease."""
        return await self._unary(self._verbs.release, request, context)

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        """Delete blocks; the call ends when they cannot return."""
        durable = DurableAnswer[Deleted]()
        delete = partial(self._verbs.delete, request, on_deleted=durable.hear)
        try:
            await asyncio.to_thread(delete, caller=self._caller_of(context))
            return self._verbs.deleted(await durable.wait())
        except Exception as error:
            await refuse(context, error, self._events)

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListReply:
        """List runs."""
        return await self._unary(self._verbs.list, request, context)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveReply:
        """Refuse: see Verbs.reserve."""
        return await self._unary(self._verbs.reserve, request, context)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        """Give a reservation back."""
        return await self._unary(self._verbs.abort, request, context)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:
        """Publish; with ack=ssd the call ends when the write is durable."""
        durable = DurableAnswer[CommitAnswer]()
        try:
            reply = self._verbs.commit(request, on_durable=durable.hear, caller=self._caller_of(context))
            if reply is None:
                reply = wire.commit_answer_to_wire(await durable.wait(), boot_id=self._verbs.boot_id)
        except Exception as error:
            await refuse(context, error, self._events)
        return reply

    async def Put(self, request_iterator: AsyncIterator[pb.PutRequest], context: Context) -> pb.PutReply:
        """Take a framed put."""
        # Closed here, or its end would fall to the garbage collector when a put ends before its stream.
        async with aclosing(cast(AsyncGenerator[pb.PutRequest, None], aiter(request_iterator))) as requests:
            return await self._framed_call(partial(self._framed.put, requests), context)

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> None:
        """Send a framed fetch."""
        await self._framed_call(partial(self._framed.fetch, request, context), context)

    async def _framed_call(self, call: Callable[[Caller], Awaitable[R]], context: Context) -> R:
        try:
            return await call(self._caller_of(context))
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            # The stream is gone and with it whoever would hear of a fault: the same as a call cancelled.
            _log.debug("stream lost", extra={"error": repr(error)})
            raise asyncio.CancelledError from error
        except Exception as error:
            await refuse(context, error, self._events)
