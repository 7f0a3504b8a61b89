"""The byte port: payload on plain sockets, for clients that do not map the arena.

Several times as fast as the framed streams of gRPC, behind the same fence, limits and errors.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvstore.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Overloaded, ShuttingDown
from kvstore.events import Events
from kvstore.rpc.packets import Header, Kind
from kvstore.rpc.pipe import Pipe, countdown
from kvstore.service.access import Caller
from kvstore.service.byte_fetch import FetchExchange
from kvstore.service.byte_put import PutExchange
from kvstore.service.exchange import Desk, Exchange, Then
from kvstore.service.limits import Budget
from kvstore.service.streams import error_packet
from kvstore.service.verbs import Verbs

_log = logging.getLogger(__name__)
CONNECTIONS_PER_STREAM = 4
"""So many connections may be open for each stream that may be served; the others are between requests."""
FETCH_BYTES_MAX = 64 << 10
TELL_SECONDS = JOIN_SECONDS = 1.0
EXCHANGES: dict[Kind, type[Exchange]] = {Kind.FETCH: FetchExchange, Kind.PUT: PutExchange}


class BytePort:
    """Serves payload on connections that have been greeted, each on a thread of its own.

    A connection between requests holds no place for a stream. Where one is too many, that which has been so
    for longest is closed.
    Threads: any.
    """

    def __init__(
        self,
        verbs: Verbs,
        *,
        generations: npt.NDArray[np.uint32],
        events: Events,
        budget: Budget,
        streams_max: int,
        idle_seconds: float,
        message_bytes_max: int,
    ) -> None:
        self._stopping = threading.Event()
        self._desk = Desk(
            verbs=verbs,
            generations=generations,
            events=events,
            budget=budget,
            idle_seconds=idle_seconds,
            stopping=self._stopping,
        )
        self._limits = {Kind.FETCH: FETCH_BYTES_MAX, Kind.PUT: message_bytes_max}
        self._max = CONNECTIONS_PER_STREAM * streams_max
        self._lock = threading.Lock()
        self._resting: dict[Pipe, None] = {}
        self._serving: dict[Pipe, None] = {}
        self._threads: dict[Pipe, threading.Thread] = {}

    def serve(self, sock: socket.socket, caller: Caller, *, peer: str) -> None:
        """Take over a connection and return; it is served until it ends."""
        thread = threading.Thread(
            target=self.attend,
            args=(sock, caller),
            kwargs={"peer": peer},
            name="kvstore-payload",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("payload connection refused", extra={"peer": peer, "error": str(error)})
            sock.close()

    def attend(self, sock: socket.socket, caller: Caller, *, peer: str) -> None:
        """Serve a connection on this thread until it ends."""
        try:
            pipe = Pipe(sock)
        except OSError:
            sock.close()
            return
        try:
            with self._entered(pipe):
                while (header := self._next(pipe)) is not None:
                    if not self._answered(pipe, header, caller):
                        return
        except KVStoreError as error:
            with contextlib.suppress(OSError):
                pipe.write([error_packet(error, self._desk.events)], countdown(TELL_SECONDS))
                pipe.linger()
        except OSError as error:
            _log.debug("payload connection lost", extra={"peer": peer, "error": repr(error)})
        finally:
            pipe.close()

    def stop(self, *, grace_seconds: float) -> None:
        """Close connections between requests now, the others after a grace, and wait for their threads."""
        with self._lock:
            self._stopping.set()
            threads = list(self._threads.values())
            for pipe in self._resting:
                pipe.cut()
        left = countdown(grace_seconds)
        for thread in threads:
            thread.join(max(0.0, left()))
        with self._lock:
            for pipe in (*self._resting, *self._serving):
                pipe.cut()
        left = countdown(JOIN_SECONDS)
        for thread in threads:
            thread.join(max(0.0, left()))

    @contextlib.contextmanager
    def _entered(self, pipe: Pipe) -> Iterator[None]:
        with self._lock:
            if self._stopping.is_set():
                raise ShuttingDown("daemon: it ends, nothing new is admitted")
            if len(self._threads) >= self._max:
                if not self._resting:
                    raise Overloaded(
                        f"payload: {self._max} connections at a time, all in use", retry_after_ms=1000
                    )
                oldest = next(iter(self._resting))
                del self._resting[oldest]
                self._serving[oldest] = None
                oldest.cut()
            self._threads[pipe] = threading.current_thread()
            self._resting[pipe] = None
        try:
            yield
        finally:
            with self._lock:
                del self._threads[pipe]
                self._resting.pop(pipe, None)
                self._serving.pop(pipe, None)

    @contextlib.contextmanager
    def _busy(self, pipe: Pipe) -> Iterator[None]:
        with self._lock:
            self._resting.pop(pipe, None)
            self._serving[pipe] = None
        try:
            yield
        finally:
            with self._lock:
                self._serving.pop(pipe, None)
                self._resting[pipe] = None
                if self._stopping.is_set():
                    pipe.cut()

    def _next(self, pipe: Pipe) -> Header | None:
        """Wait for the next request; None when the client ends, or has not asked for so long.

        Errors: InvalidArgument: what comes cannot be read.
        """
        try:
            header = pipe.header(lambda: self._desk.idle_seconds, limit=max(self._limits.values()))
        except OSError:
            return None
        limit = self._limits.get(header.kind)
        if limit is None:
            raise InvalidArgument(f"payload: a request is a FETCH or a PUT, got {header.kind.name}")
        if header.size > limit:
            raise InvalidArgument(f"packet: the limit is {limit} bytes, got {header.size}")
        return header

    def _answered(self, pipe: Pipe, header: Header, caller: Caller) -> bool:
        """Answer a request and say whether the connection goes on."""
        with self._busy(pipe):
            exchange = EXCHANGES[header.kind](self._desk, pipe)
            error = self._error_of(exchange, header, caller)
            if error is None:
                return True
            message = error_packet(error, self._desk.events)
            then = Then.CLOSE if caller.withdrawn and exchange.then is Then.GO_ON else exchange.then
            if then is not Then.CUT:
                pipe.write([message], countdown(TELL_SECONDS))
            if then is Then.CLOSE:
                pipe.linger()
            return then is Then.GO_ON

    def _error_of(self, exchange: Exchange, header: Header, caller: Caller) -> Exception | None:
        try:
            exchange.answer(header, caller)
        except KVStoreError as error:
            return error
        except DecodeError:
            return InvalidArgument(f"message: {header.size} bytes that are no message of this request")
        except TimeoutError:
            return DeadlineExceeded(
                f"payload: the limit is {self._desk.idle_seconds:g} s for something to come or to be taken"
            )
        except OSError:
            raise
        except Exception as error:
            _log.exception("exchange failed", extra={"request": header.kind.name})
            exchange.then = Then.CLOSE if exchange.then is Then.GO_ON else exchange.then
            return error
        return None
