"""A pipe between a client and a daemon of different age: it knows what one end knows, or more than both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import descriptor_pool, message_factory

from kvstore.rpc.channel import CLIENT_OPTIONS, SERVER_OPTIONS

PROTOCOL_1 = Path(__file__).parents[1] / "golden" / "protocol_1.hex"
"""The descriptor of the data service as protocol 1 was recorded; never written anew."""
UNKNOWN = b"\xc0\xbb\x01\x2a" + b"\xc2\xbb\x01\x03new"
THREADS = 32
DEADLINE_SECONDS_MAX = 3600.0
Change = Callable[[Any], None]


def older(message: Any) -> None:
    """Leave of a message what an end of protocol 1 knows."""
    message.DiscardUnknownFields()


def later(message: Any) -> None:
    """Add what an end of a later build would, on two levels."""
    for _, inner in message.ListFields():
        if hasattr(inner, "MergeFromString"):
            inner.MergeFromString(UNKNOWN)
    message.MergeFromString(UNKNOWN)


class Pipe(grpc.GenericRpcHandler):
    """Hands every call on and changes each message on its way, both ways."""

    def __init__(self, address: str, target: str, *, change: Change) -> None:
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(bytes.fromhex(PROTOCOL_1.read_text()))
        self._methods = pool.FindServiceByName("kvstore.v1.Data").methods_by_name
        self._change = change
        self._channel = grpc.insecure_channel(target, CLIENT_OPTIONS)
        self._server = grpc.server(ThreadPoolExecutor(THREADS), handlers=[self], options=SERVER_OPTIONS)
        self._server.add_insecure_port(address)
        self.messages = 0

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self._server.stop(None).wait(10.0)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return what hands a call on."""
        path = handler_call_details.method
        method = self._methods.get(path.rpartition("/")[2])
        if method is None:
            return None
        asked, told = method.input_type, method.output_type
        many_in, many_out = method.client_streaming, method.server_streaming
        kind = f"{'stream' if many_in else 'unary'}_{'stream' if many_out else 'unary'}"
        onward = getattr(self._channel, kind)(path)

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            changed = self._asked(request, asked) if many_in else self._changed(request, asked)
            left = context.time_remaining()  # without a deadline it is beyond any
            timeout = left if 0 < left < DEADLINE_SECONDS_MAX else None
            answer = onward(changed, timeout=timeout)
            context.add_callback(lambda: answer.cancel() if many_out else None)
            return self._each(answer, told) if many_out else self._changed(answer, told)

        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return call(request, context)
            except grpc.RpcError as error:
                _pass_on(error, context)

        def guarded_stream(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            try:
                yield from call(request, context)
            except grpc.RpcError as error:
                _pass_on(error, context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(guarded_stream if many_out else guarded)

    def _asked(self, messages: Iterator[bytes], descriptor: Any) -> Iterator[bytes]:
        with suppress(grpc.RpcError):  # who asks is gone
            yield from self._each(messages, descriptor)

    def _each(self, messages: Iterator[bytes], descriptor: Any) -> Iterator[bytes]:
        for data in messages:
            yield self._changed(data, descriptor)

    def _changed(self, data: bytes, descriptor: Any) -> bytes:
        message = message_factory.GetMessageClass(descriptor).FromString(data)
        self._change(message)
        self.messages += 1
        changed: bytes = message.SerializeToString()
        return changed


def _pass_on(error: Any, context: grpc.ServicerContext) -> None:
    context.set_trailing_metadata(error.trailing_metadata() or ())
    context.abort(error.code(), error.details() or "")
