"""Moves payload over a connected socket, every wait bounded: what both ends of a payload connection share."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.rpc.packets import HEADER_BYTES, Header, header_of

Left = Callable[[], float]
"""Says how many seconds a wait may take; 0 or less: none."""
View = bytes | bytearray | memoryview
V = TypeVar("V", bound=View)
VIEWS_MAX = min(512, os.sysconf("SC_IOV_MAX"))
"""Of one system call."""
SLACK_SECONDS = 0.02
"""A wait may be longer by so much: to set it anew for each call costs more than a small block."""
LINGER_SECONDS, LINGER_BYTES = 1.0, 64 << 10
LOCAL_BUFFER_BYTES = {socket.AF_UNIX: 512 << 10, socket.AF_INET: 256 << 10, socket.AF_INET6: 256 << 10}
"""Of a socket whose other end is on this machine: what lies between both ends stays in the cache of a core.
Left to itself, the kernel lets megabytes lie there, and TCP moves 3 GB/s in place of 4.5. It takes twice the
number, for its own needs.
"""


class Pipe:
    """A connected socket, plain or TLS.

    A plain one waits in the kernel and moves many views in a call: to poll before each call, as a timeout of
    Python's does, costs a quarter of the speed. A TLS one has Python's timeout and moves one view at a time.
    Threads: one at a time; `cut` and `drop` any.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._waits: dict[int, float] = {}
        _tune(sock)
        if not self._is_tls:
            sock.settimeout(None)

    def read(self, views: Sequence[memoryview], left: Left) -> None:
        """Fill views of bytes, one after the other.

        Errors: OSError: ConnectionResetError when the other end closed, TimeoutError among them.
        """
        missing: Sequence[memoryview] = [view for view in views if len(view)]
        while missing:
            count = self._read_some(missing, left)
            if not count:
                raise ConnectionResetError("payload: the other end closed the connection")
            missing = _behind(missing, count)

    def _read_some(self, views: Sequence[memoryview], left: Left) -> int:
        if self._is_tls:
            self.sock.settimeout(_positive(left()))
            return self.sock.recv_into(views[0])
        self._wait(socket.SO_RCVTIMEO, left())
        try:
            return self.sock.recvmsg_into(views[:VIEWS_MAX], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("payload: nothing arrived in time") from None

    def write(self, views: Sequence[View], left: Left) -> None:
        """Send views of bytes.

        Errors: OSError, TimeoutError among them.
        """
        missing: Sequence[View] = [view for view in views if len(view)]
        while missing:
            missing = _behind(missing, self._write_some(missing, left))

    def _write_some(self, views: Sequence[View], left: Left) -> int:
        if self._is_tls:
            self.sock.settimeout(_positive(left()))
            return self.sock.send(views[0])
        self._wait(socket.SO_SNDTIMEO, left())
        try:
            return self.sock.sendmsg(views[:VIEWS_MAX])
        except BlockingIOError:
            raise TimeoutError("payload: nothing was taken in time") from None

    def header(self, left: Left, *, limit: int) -> Header:
        """Read the next header.

        Errors: as `read`; InvalidArgument.
        """
        data = bytearray(HEADER_BYTES)
        self.read([memoryview(data)], left)
        return header_of(data, limit=limit)

    def body(self, header: Header, left: Left) -> bytes:
        """Read the body of a message.

        Errors: as `read`.
        """
        data = bytearray(header.size)
        self.read([memoryview(data)], left)
        return bytes(data)

    def _wait(self, option: int, seconds: float) -> None:
        if abs(self._waits.get(option, -1.0) - seconds) < SLACK_SECONDS < seconds:
            return
        whole, part = divmod(_positive(seconds), 1.0)
        # A timeval of 0 would mean for ever.
        packed = struct.pack("@ll", int(whole), max(1000, int(part * 1e6)))
        self.sock.setsockopt(socket.SOL_SOCKET, option, packed)
        self._waits[option] = seconds

    def has_ended(self) -> bool:
        """Say whether the other end closed the connection."""
        return self._peek() == b""

    def is_quiet(self) -> bool:
        """Say whether nothing has come, the end included: between a request and the next that is so."""
        return self._peek() is None

    def _peek(self) -> bytes | None:
        if self._is_tls:
            self.sock.settimeout(0.0)  # Python's own timeout waits in spite of the flag
        try:
            # Of the socket below TLS: what comes there unasked is its end.
            return socket.socket.recv(self.sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def linger(self) -> None:
        """Close for writing and let the other end read what was written: bytes of it that nobody reads would
        make the kernel throw both away.
        """
        left, scratch = countdown(LINGER_SECONDS), memoryview(bytearray(LINGER_BYTES))
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_WR)
            while self._read_some([scratch], left):
                pass

    def cut(self) -> None:
        """End the connection under whoever uses it."""
        with contextlib.suppress(OSError):
            # Of the socket itself: TLS would change under the thread that uses it.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self.sock.close()

    def drop(self) -> None:
        """Let go of it without ending it: it belongs to the process that this one was forked from."""
        if (number := self.sock.detach()) >= 0:
            os.close(number)


def countdown(seconds: float) -> Left:
    """Return what is left of so many seconds from now."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise TimeoutError("payload: no time is left")
    return seconds


def _behind(views: Sequence[V], count: int) -> list[V | memoryview]:
    """Return what is left of views behind their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [memoryview(view)[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def _tune(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sock.family == socket.AF_UNIX or _is_here(sock):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, LOCAL_BUFFER_BYTES[sock.family])


def _is_here(sock: socket.socket) -> bool:
    """Say whether both ends of a TCP connection are on this machine."""
    ours, theirs = sock.getsockname()[0], sock.getpeername()[0]
    return bool(ours == theirs or ipaddress.ip_address(theirs.partition("%")[0]).is_loopback)
