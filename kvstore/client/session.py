"""One session stream: requests out of a queue, replies to whoever asked, progress to whoever listens.

Knows request ids and the end of the stream; not what the verbs mean.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from kvstore.client.streams import Outgoing, Stream
from kvstore.errors import DeadlineExceeded, KVStoreError, Overloaded, PermissionRefused, TierUnavailable
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import error_from_wire

_log = logging.getLogger(__name__)
RIDE_SECONDS = 0.003
"""How long a release waits for a match that it can ride on: a message of its own wakes both ends."""
_WAKE = pb.SessionRequest()
"""Goes into the queue, not onto the wire: releases wait while the sender sleeps."""
RIDERS_MAX = 64
CLOSE_SECONDS = 0.2

Outcome = pb.SessionReply | KVStoreError
"""What becomes of a request: its reply, the daemon's error, or the session's end."""
OnReply = Callable[[Outcome], None]
OnProgress = Callable[[pb.ProgressEvent | None], None]
"""Hears each progress event of its request, and None when the session ends first."""


class Session:
    """A live stream to the daemon.

    `on_orphan` gets each reply that nobody waits for any more, so that what it carries can be given back;
    `on_end` hears once that the stream is over.
    Threads: any may submit. Callbacks run on the reader thread: they are short and never wait for a reply.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        requests_max: int,
        on_orphan: Callable[[pb.SessionReply], None],
        on_end: Callable[[], None],
    ) -> None:
        self.boot_id = 0
        self._requests_max = requests_max
        self._on_orphan = on_orphan
        self._on_end = on_end
        self._outgoing: SimpleQueue[Outgoing | None] = SimpleQueue()
        self._queued = 0
        self._riders: list[pb.ReleaseRequest] = []
        self._sender_sleeps = False
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, OnReply | None] = {}
        self._listening: dict[int, OnProgress] = {}
        self._end: KVStoreError | None = None
        self._stream = stream
        stream.start(self._requests())
        self._reader = threading.Thread(target=self._read, name="kvstore-session", daemon=True)
        self._reader.start()

    def submit(
        self, request: pb.SessionRequest, on_reply: OnReply, *, on_progress: OnProgress | None = None
    ) -> int:
        """Send a request and return its number; `on_reply` is called once unless the request is abandoned.

        Errors: Overloaded when too many requests are unanswered; TierUnavailable when the session is over,
        PermissionRefused when it was refused.
        """
        with self._lock:
            if isinstance(self._end, PermissionRefused):
                # The refusal of the stream may come before the first request is said.
                raise PermissionRefused(str(self._end))
            if self._end is not None:
                raise TierUnavailable(f"session: over: {self._end}")
            if len(self._waiting) >= self._requests_max:
                raise Overloaded(f"session: {self._requests_max} requests are unanswered, the limit")
            self._number += 1
            number = request.request_id = self._number
            self._waiting[number] = on_reply
            if on_progress is not None:
                self._listening[number] = on_progress
            if request.HasField("match"):
                request.match.release.extend(self._riders)
                self._riders.clear()
            self._say(request)
        return number

    def ask(
        self, request: pb.SessionRequest, seconds: float, *, on_progress: OnProgress | None = None
    ) -> pb.SessionReply:
        """Send a request and wait for its reply.

        Errors: DeadlineExceeded after `seconds`; what the daemon says; TierUnavailable when the session ends.
        """
        waiter = _Waiter()
        number = self.submit(request, waiter.put, on_progress=on_progress)
        try:
            arrived = waiter.wait(seconds)
        except BaseException:  # a signal's: what is answered now is nobody's
            self.abandon(number)
            raise
        if not arrived and self.abandon(number):
            verb = request.WhichOneof("verb")
            raise DeadlineExceeded(f"{verb}: no answer from the daemon within {seconds:.3f} s")
        return waiter.take()

    def release(self, release: pb.ReleaseRequest) -> None:
        """Give a lease back, one-way: with the next match, or by itself a moment later. When the session is
        over it is dropped, and so is all that it could end.
        """
        with self._lock:
            if self._end is not None:
                return
            self._riders.append(release)
            if len(self._riders) >= RIDERS_MAX:
                self._say_riders()
            elif self._sender_sleeps:
                self._sender_sleeps = False
                self._outgoing.put(_WAKE)

    def _say(self, request: pb.SessionRequest) -> None:
        """Send a message behind what was said before it, or queue it. Call with the lock."""
        self._say_riders()
        left = request if self._queued else self._stream.send_now(request)
        if left is not None:
            self._queue(left)

    def _say_riders(self) -> None:
        for release in self._riders:
            self._queue(pb.SessionRequest(release=release))
        self._riders.clear()

    def _queue(self, outgoing: Outgoing) -> None:
        self._queued += 1
        self._outgoing.put(outgoing)

    def abandon(self, number: int) -> bool:
        """Stop waiting for a reply; False when it has been delivered. A late one goes to `on_orphan`."""
        with self._lock:
            if number not in self._waiting:
                return False
            self._waiting[number] = None
            self._listening.pop(number, None)
            return True

    def forget(self, number: int) -> None:
        """Stop listening to the progress of a request."""
        with self._lock:
            self._listening.pop(number, None)

    @property
    def end(self) -> KVStoreError | None:
        """Why the session is over, None while it lives."""
        return self._end

    def close(self) -> None:
        """End the stream; everybody who waits hears of it. One-way messages said before still go out."""
        self._finish(TierUnavailable("session: closed by this client"))
        if threading.current_thread() is not self._reader:
            self._reader.join(CLOSE_SECONDS)
        self._stream.close()

    def leave_to_parent(self) -> None:
        """In a forked child: let go of the stream; nobody here reads it or sends on it."""
        if self._end is None:
            self._stream.leave_to_parent()

    def _requests(self) -> Iterator[Outgoing]:
        """Yield what goes out, on the stream's own thread."""
        while (request := self._next()) is not None:
            if request is not _WAKE:
                yield request
                with self._lock:
                    self._queued -= 1

    def _next(self) -> Outgoing | None:
        """Return what is to go out next, None at the end.

        While messages follow each other, releases wait without a word to this thread: the next match takes
        them along, or it finds them when it has waited in vain. Only a sender that sleeps is woken for one.
        """
        with contextlib.suppress(Empty):
            return self._outgoing.get(timeout=RIDE_SECONDS)
        with self._lock:
            self._sender_sleeps = not self._riders
            self._say_riders()
        request = self._outgoing.get()
        self._sender_sleeps = False
        return request

    def _read(self) -> None:
        error: KVStoreError = TierUnavailable("session: the daemon ended it")
        try:
            for reply in self._stream.replies():
                if self.boot_id and reply.boot_id != self.boot_id:
                    error = TierUnavailable("session: another daemon answers on this stream")
                    break
                self._deliver(reply)
        except KVStoreError as broken:
            error = broken
        except Exception as broken:
            _log.exception("session reader failed")
            error = TierUnavailable(f"session: the reader failed: {broken}")
        self._finish(error)

    def _deliver(self, reply: pb.SessionReply) -> None:
        number, kind = reply.request_id, reply.WhichOneof("answer")
        if kind == "progress":
            with self._lock:
                listener = self._listening.get(number)
                if reply.progress.done:
                    self._listening.pop(number, None)
            if listener is not None:
                listener(reply.progress)
            return
        with self._lock:
            known = number in self._waiting
            on_reply = self._waiting.pop(number, None)
            if not (kind == "match" and reply.match.lease and not reply.match.ready):
                self._listening.pop(number, None)
        if on_reply is not None:
            on_reply(error_from_wire(reply.error) if kind == "error" else reply)
        elif known:
            self._on_orphan(reply)

    def _finish(self, error: KVStoreError) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = error
            waiting = [on_reply for on_reply in self._waiting.values() if on_reply is not None]
            listening = list(self._listening.values())
            self._waiting.clear()
            self._listening.clear()
            self._say_riders()
            self._outgoing.put(None)
        for on_reply in waiting:
            on_reply(error)
        for listener in listening:
            listener(None)
        self._on_end()


class _Waiter:
    """Where a blocking caller waits for its outcome: a lock is woken sooner than an Event."""

    __slots__ = ("_arrived", "_outcome")

    def __init__(self) -> None:
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self._outcome: Outcome | None = None

    def put(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._arrived.release()

    def wait(self, seconds: float) -> bool:
        return self._arrived.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))

    def take(self) -> pb.SessionReply:
        if self._outcome is None:
            self._arrived.acquire()
        assert self._outcome is not None
        if isinstance(self._outcome, KVStoreError):
            raise self._outcome
        return self._outcome
