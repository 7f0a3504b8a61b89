"""What arrives and is no message: refused like any other bad request.

Left to itself, grpc.aio answers such a call with UNKNOWN and writes a traceback into the log for each.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvstore.errors import InvalidArgument
from kvstore.rpc.status import error_metadata, status_of

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
OURS = "/kvstore.v1."


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands for a message that could not be read."""

    size: int

    def error(self) -> InvalidArgument:
        """Return the error to answer with."""
        return InvalidArgument(f"message: {self.size} bytes that are no message of this call")


class ParseCheck(grpc.aio.ServerInterceptor):
    """Hands `Malformed` to streams, which refuse it themselves, and refuses it for calls with one request."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler with a reader that never raises."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OURS):
            return handler
        return lenient(handler)


def lenient(handler: Any) -> Handler:
    """Return a handler that answers malformed requests."""
    codecs = {
        "request_deserializer": _reader(handler.request_deserializer),
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(_checked(handler.unary_unary), **codecs)
    if handler.unary_stream:
        check = _checked_replies if inspect.isasyncgenfunction(handler.unary_stream) else _checked
        return grpc.unary_stream_rpc_method_handler(check(handler.unary_stream), **codecs)
    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(handler.stream_unary, **codecs)
    return grpc.stream_stream_rpc_method_handler(handler.stream_stream, **codecs)


def _reader(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    # A handler that refuses whatever comes reads nothing.
    if parse is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Malformed(len(data))

    return read


def _checked(act: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        if isinstance(request, Malformed):
            await _refuse(request, context)
        return await act(request, context)

    return answer


def _checked_replies(act: Callable[[Any, Any], AsyncIterator[Any]]) -> Any:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        if isinstance(request, Malformed):
            await _refuse(request, context)
        async for reply in act(request, context):
            yield reply

    return answer


async def _refuse(request: Malformed, context: Any) -> None:
    error = request.error()
    await context.abort(status_of(error), str(error), error_metadata(error))
