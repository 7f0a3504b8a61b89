"""A unix socket between engines and their daemon: it hands everything on, unless a rule says otherwise.

The engine's side cannot know it: payload still goes through the daemon's own arena, and what the tap does to
a stream is what a daemon, a disk or a neighbour could have done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from kvstore.rpc.channel import AUTHORIZATION, CLIENT_OPTIONS, SERVER_OPTIONS
from kvstore.rpc.v1 import data_pb2 as pb

SESSION, FETCH = "/kvstore.v1.Data/Session", "/kvstore.v1.Data/Fetch"
REPLIES: dict[str, type[pb.SessionReply] | type[pb.FetchReply]] = {
    SESSION: pb.SessionReply,
    FETCH: pb.FetchReply,
}
"""Where news of a load travel: to who matched, or, on a stream of its own, to who was handed the lease."""
STREAMS_MAX = 64
CALL_SECONDS_MAX = 1e6
Message = pb.SessionRequest | pb.SessionReply | pb.FetchReply
Act = Callable[[Any], Message | None]
"""Gets a message and returns what is handed on in its place; None for nothing. It may take its time."""


@dataclass(slots=True)
class Rule:
    """What befalls messages of one kind: the first `times` that `applies` says it concerns.

    `met` is set before the first is acted upon.
    """

    kind: str
    act: Act
    applies: Callable[[Any], bool]
    times: int
    met: threading.Event = field(default_factory=threading.Event)


class Tap:
    """Listens in `directory` and speaks to the daemon at `daemon_address`, a channel for every call.

    Threads: rules are set by the test's thread and act on the streams' own.
    """

    def __init__(self, directory: Path, daemon_address: str) -> None:
        self.address = f"unix:{directory / 'tap.sock'}"
        self.hello: pb.HelloReply | None = None
        self._daemon_address = daemon_address
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._server = grpc.server(ThreadPoolExecutor(STREAMS_MAX), options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((_Everything(self._hand_on),))
        self._server.add_insecure_port(self.address)
        self._server.start()

    def close(self) -> None:
        """End all streams."""
        self._server.stop(None).wait()

    def on(
        self, kind: str, act: Act, *, times: int = 1 << 30, applies: Callable[[Any], bool] = lambda _: True
    ) -> Rule:
        """Set a rule for a kind of message, such as `match request` or `progress reply`."""
        rule = Rule(kind, act, applies, times)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget all rules."""
        with self._lock:
            self._rules.clear()

    def _hand_on(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        said = context.invocation_metadata()
        metadata = tuple((key, value) for key, value in said if key == AUTHORIZATION)
        with grpc.insecure_channel(self._daemon_address, CLIENT_OPTIONS) as channel:
            stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
            left = (
                context.time_remaining()
            )  # centuries for a call without a deadline: the library chokes on it
            timeout = left if left < CALL_SECONDS_MAX else None
            call = stream(self._requests(method, requests), timeout=timeout, metadata=metadata)
            context.add_callback(lambda: _cancel(call))
            try:
                for reply in call:
                    handed = self._reply(method, reply)
                    if handed is not None:
                        yield handed
            except grpc.RpcError as error:
                ended = cast(grpc.Call, error)
                context.set_trailing_metadata(tuple((k, v) for k, v in ended.trailing_metadata() or ()))
                context.abort(ended.code(), ended.details() or "")

    def _requests(self, method: str, requests: Iterator[bytes]) -> Iterator[bytes]:
        with contextlib.suppress(Exception):  # the engine is gone; so is its stream to the daemon
            for request in requests:
                if method != SESSION:
                    yield request
                    continue
                message = pb.SessionRequest.FromString(request)
                handed = self._apply(f"{message.WhichOneof('verb')} request", message)
                if handed is not None:
                    yield handed.SerializeToString()

    def _reply(self, method: str, reply: bytes) -> bytes | None:
        kind = REPLIES.get(method)
        if kind is None:
            return reply
        message = kind.FromString(reply)
        said = message.WhichOneof("answer" if isinstance(message, pb.SessionReply) else "message")
        if isinstance(message, pb.SessionReply) and said == "hello":
            self.hello = message.hello
        handed = self._apply(f"{said} reply", message)
        return None if handed is None else handed.SerializeToString()

    def _apply(self, kind: str, message: Message) -> Message | None:
        with self._lock:
            rules = [r for r in self._rules if r.kind == kind and r.times > 0 and r.applies(message)]
            for rule in rules[:1]:
                rule.times -= 1
        for rule in rules[:1]:
            rule.met.set()
            return rule.act(message)
        return message


def _cancel(call: grpc.RpcContext) -> None:
    call.cancel()


class _Everything(grpc.GenericRpcHandler):
    """Serves every method as a stream of bytes: on the wire a single message is a stream of one."""

    def __init__(
        self, hand_on: Callable[[str, Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
    ) -> None:
        self._hand_on = hand_on

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._hand_on(method, requests, context)
        )
