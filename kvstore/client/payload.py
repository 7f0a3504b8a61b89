"""Connections for payload beside a link's session: dialled when needed, kept for the next request."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import DecodeError

from kvstore.client import fork
from kvstore.client.deadline import Deadline
from kvstore.client.dial import Target
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.rpc.channel import MESSAGE_BYTES_MAX
from kvstore.rpc.packets import (
    HEADER_BYTES,
    SOCKET_SUFFIX,
    Header,
    Kind,
    error_from_body,
    greet,
    header_of,
    packet,
)
from kvstore.rpc.pipe import Left, Pipe
from kvstore.rpc.v1 import data_pb2 as pb

M = TypeVar("M")
_log = logging.getLogger(__name__)
DIAL_SECONDS = 1.0
IDLE_MAX = 8


class NoPayload(Exception):
    """There is no connection for payload: it goes through gRPC."""


class Asked:
    """One request on a connection, and its answer as it comes.

    Threads: one.
    """

    def __init__(self, pipe: Pipe, left: Left) -> None:
        self.pipe = pipe
        self.left = left
        self.is_over = False
        """Whether the whole answer has come: the connection can take another request."""

    def send(self, kind: Kind, body: bytes) -> None:
        """Send the request.

        Errors: OSError.
        """
        self.pipe.write([packet(kind, body)], self.left)

    def header(self) -> Header:
        """Read the next header.

        Errors: OSError; TierUnavailable on one that cannot be read.
        """
        head = bytearray(HEADER_BYTES)
        self.pipe.read([memoryview(head)], self.left)
        return self.header_in(head)

    @staticmethod
    def header_in(head: bytearray | memoryview) -> Header:
        """Return the header that was read.

        Errors: TierUnavailable on one that cannot be read.
        """
        try:
            return header_of(head, limit=MESSAGE_BYTES_MAX)
        except InvalidArgument as error:
            raise TierUnavailable(f"payload: the daemon's answer cannot be read: {error}") from error

    def message(self, header: Header, parse: Callable[[bytes], M]) -> M:
        """Read the body of a packet as a message.

        Errors: OSError; what the daemon says, where it tells of an error; TierUnavailable.
        """
        body = self.pipe.body(header, self.left)
        try:
            if header.kind is Kind.ERROR:
                raise error_from_body(body)
            return parse(body)
        except DecodeError as error:
            raise TierUnavailable(f"payload: {len(body)} bytes that are no {header.kind.name}") from error


class Payload:
    """The connections of one link. Without a byte port, or when it cannot be dialled, there are none.

    Each request has a connection of its own while it lasts.
    Threads: any.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._place: str | tuple[str, int] | None = None
        if target.is_unix:
            self._place = f"{target.path}{SOCKET_SUFFIX}"
        self._lock = threading.Lock()
        self._idle: list[Pipe] = []
        self._pipes: set[Pipe] = set()
        self._tls: ssl.SSLContext | None = None
        self._closed = False
        fork.watch(self)

    def offer(self, port: int) -> None:
        """Take note of the byte port that a TCP listener has, 0 for none."""
        if not self._target.is_unix:
            self._place = (self._target.host, port) if port else None

    def __len__(self) -> int:
        """Return how many connections there are."""
        return len(self._pipes)

    @contextmanager
    def asking(self, kind: Kind, body: bytes, deadline: Deadline) -> Iterator[tuple[Asked, Header]]:
        """Send a request; yield the exchange and the first header of the answer. The connection is kept if
        the whole answer was read.

        Errors: NoPayload; DeadlineExceeded; TierUnavailable; what the daemon greets with.
        """
        try:
            asked, header = self._begun(kind, body, deadline)
        except TimeoutError as error:
            raise deadline.exceeded("payload: no answer from the daemon") from error
        except OSError as error:
            raise TierUnavailable(f"payload: the connection broke: {error}") from error
        try:
            yield asked, header
        except TimeoutError as error:
            raise deadline.exceeded("payload: the daemon stopped") from error
        except OSError as error:
            raise TierUnavailable(f"payload: the connection broke: {error}") from error
        finally:
            self._give_back(asked)

    def close(self) -> None:
        """End all connections, also under who uses them; idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for pipe in self._pipes:
                pipe.cut()
        for pipe in idle:
            self._end(pipe)

    def after_fork(self) -> None:
        """Let go of the parent's connections, which are not ours to end."""
        pipes, self._pipes, self._idle, self._closed = self._pipes, set(), [], True
        for pipe in pipes:
            pipe.drop()

    def _begun(self, kind: Kind, body: bytes, deadline: Deadline) -> tuple[Asked, Header]:
        while True:
            pipe = self._kept()
            is_new = pipe is None
            asked = Asked(pipe or self._dial(deadline), deadline.left)
            try:
                asked.send(kind, body)
                return asked, asked.header()
            except TimeoutError:
                self._end(asked.pipe)
                raise
            except OSError:
                self._end(asked.pipe)
                # A kept connection may have been closed at this very moment; nothing was answered on it.
                if is_new:
                    raise
            except BaseException:
                self._end(asked.pipe)
                raise

    def _kept(self) -> Pipe | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                pipe = self._idle.pop()
            if pipe.is_quiet():
                return pipe
            self._end(pipe)

    def _give_back(self, asked: Asked) -> None:
        with self._lock:
            if asked.is_over and not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append(asked.pipe)
                return
        self._end(asked.pipe)

    def _end(self, pipe: Pipe) -> None:
        with self._lock:
            self._pipes.discard(pipe)
        pipe.close()

    def _dial(self, deadline: Deadline) -> Pipe:
        place = self._place
        if place is None:
            raise NoPayload
        limit = min(DIAL_SECONDS, deadline.left())
        if limit <= 0:
            raise TimeoutError
        try:
            sock = _connected(place, limit)
        except OSError as error:
            if limit < DIAL_SECONDS and isinstance(error, TimeoutError):
                raise  # the caller's time, not the port's fault
            self._give_up(error)
            raise NoPayload from error
        try:
            sock.settimeout(max(0.001, min(DIAL_SECONDS, deadline.left())))
            sock = self._secured(sock)
            greet(sock, pb.PURPOSE_PAYLOAD, token=self._target.token)
            pipe = Pipe(sock)
        except (InvalidArgument, ssl.SSLCertVerificationError) as error:
            sock.close()
            self._give_up(error)
            raise NoPayload from error
        except (OSError, TierUnavailable, DecodeError) as error:
            # Somebody listens: a daemon that is hung, or just ends. The next request may try again.
            sock.close()
            raise NoPayload from error
        except BaseException:
            sock.close()
            raise
        with self._lock:
            if not self._closed:
                self._pipes.add(pipe)
                return pipe
        pipe.close()
        raise TierUnavailable("link: the connection this came from is over")

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            place, self._place = self._place, None
        if place is not None:
            _log.warning(
                "payload goes through gRPC, which is slower: its own port cannot be dialled",
                extra={"address": str(place), "cause": str(error) or repr(error)},
            )

    def _secured(self, sock: socket.socket) -> socket.socket:
        if self._target.tls is None:
            return sock
        if self._tls is None:
            self._tls = self._target.tls_context()
        return self._tls.wrap_socket(sock, server_hostname=self._target.host)


def _connected(place: str | tuple[str, int], seconds: float) -> socket.socket:
    if not isinstance(place, str):
        return socket.create_connection(place, timeout=seconds)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(seconds)
        sock.connect(place)
    except BaseException:
        sock.close()
        raise
    return sock
