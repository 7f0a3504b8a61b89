"""Calls against a running daemon, in bulk: raw bytes, sessions side by side, streams that end anywhere."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from kvstore.rpc.channel import CLIENT_OPTIONS
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import AckTier
from tests.e2e import blocks
from tests.e2e.served import Wire
from tests.fuzz.messages import UNARY, Known, Stranger

DEADLINE_SECONDS = 60.0
IN_FLIGHT = 16
LOITERING_MAX = 12
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
METHODS = tuple(UNARY)
NEVER = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
)


def _and_wait(first: list[bytes], ends: threading.Event) -> Iterator[bytes]:
    """Yield some messages, then nothing until the call has ended."""
    yield from first
    ends.wait(DEADLINE_SECONDS)


class Fault(AssertionError):
    """The daemon did what it never may."""


class Fuzzer:
    """Makes calls of all kinds and judges each answer; counts them by method and status."""

    def __init__(self, address: str, known: Known, *, seed: int, metadata: Any = ()) -> None:
        self.rng = random.Random(seed)
        self.known = known
        self.stranger = Stranger(self.rng, known)
        self.counts: collections.Counter[str] = collections.Counter()
        self._friend = Wire(address, metadata=metadata)
        self._friend_keys = 1000
        self._address = address
        self._loitering: collections.deque[Any] = collections.deque()
        self._channel = grpc.insecure_channel(address, CLIENT_OPTIONS)
        self._metadata = metadata
        self._unary: dict[str, Any] = {
            method: self._channel.unary_unary(method, None, None) for method in METHODS
        }
        self._session: Any = self._channel.stream_stream("/kvstore.v1.Data/Session", None, None)
        self._put: Any = self._channel.stream_unary("/kvstore.v1.Data/Put", None, None)
        self._fetch: Any = self._channel.unary_stream("/kvstore.v1.Data/Fetch", None, None)
        self._verify: Any = self._channel.unary_stream("/kvstore.v1.Admin/Verify", None, None)

    @property
    def calls(self) -> int:
        """Calls and session requests made so far."""
        return sum(self.counts.values())

    def run(self, calls: int) -> None:
        """Make at least so many calls."""
        target = self.calls + calls
        while self.calls < target:
            act = self.rng.choices(
                (
                    self.unary_batch,
                    self.sessions,
                    self.puts,
                    self.fetches,
                    self.friend,
                    self.loiter,
                    self.noise,
                    self.verify,
                ),
                weights=(6, 4, 2, 2, 1, 1, 1, 0.05),
            )[0]
            act()

    def close(self) -> None:
        """End what is open and close the channel."""
        for call in self._loitering:
            call.cancel()
        self._channel.close()
        self._friend.__exit__(None, None, None)

    def friend(self) -> None:
        """Put, match and fetch as one should: what comes back is right, however little it is."""
        self._friend_keys += 1
        keys = blocks.keys_of(6, seed=self._friend_keys)
        blocks.open_namespace(self._friend)
        blocks.put(self._friend, keys, ack=self.rng.choice((AckTier.HOST, AckTier.SSD)))
        answer = blocks.match(self._friend, keys)
        if answer.blocks:
            got = blocks.fetch(self._friend, answer.lease)
            wrong = [block for block, data in got.items() if data != blocks.payload(keys, block)]
            if wrong:
                raise Fault(f"wrong bytes in blocks {wrong} of {answer.blocks}")
            self.counts["friend's blocks"] += len(got)
        # The stranger may use it, too.
        self.known.learn(answer.lease)
        self.known.keys = [*self.known.keys[-8:], keys]

    def unary_batch(self) -> None:
        """Have many single calls under way at once."""
        pending = []
        for _ in range(IN_FLIGHT):
            method = self.rng.choice(METHODS)
            data = self.stranger.wire(self.stranger.request(UNARY[method]))
            call = self._unary[method].future(data, timeout=DEADLINE_SECONDS, metadata=self._metadata)
            pending.append((method, data, call))
        for method, data, call in pending:
            error = call.exception()
            self._judge(method, error, data)
            if error is None:
                self._learn(method, call.result())

    def sessions(self) -> None:
        """Have several sessions under way at once, their requests interleaved, each ended its own way."""
        calls = []
        for _ in range(self.rng.randint(1, 4)):
            requests = self._session_bytes()
            call = self._session(iter(requests), timeout=DEADLINE_SECONDS, metadata=self._metadata)
            calls.append((requests, call))
        for requests, call in calls:
            if self.rng.random() < 0.3:
                call.cancel()
            try:
                for reply in call:
                    self._hear(reply)
            except grpc.RpcError as error:
                self._judge("/kvstore.v1.Data/Session", error, b"|".join(requests))
            self.counts["session requests"] += len(requests)

    def _session_bytes(self) -> list[bytes]:
        rng = self.rng
        requests = []
        if rng.random() < 0.9:
            hello = pb.HelloRequest(protocol=1, client="fuzz", want_mapping=rng.random() < 0.5)
            requests.append(pb.SessionRequest(request_id=1, hello=hello).SerializeToString())
        requests += [self.stranger.session_request().SerializeToString() for _ in range(rng.randint(0, 40))]
        if rng.random() < 0.2:
            requests.append(self.stranger.spoiled(self.stranger.session_request().SerializeToString()))
        return requests

    def puts(self) -> None:
        """Send framed puts of which some end early, by half-close or by cancelling."""
        pending = []
        for _ in range(4):
            messages = [self.stranger.wire(request) for request in self.stranger.put_requests()]
            call = self._put.future(iter(messages), timeout=DEADLINE_SECONDS, metadata=self._metadata)
            pending.append((messages, call))
        for messages, call in pending:
            if self.rng.random() < 0.2:
                call.cancel()
            try:
                error = call.exception()
            except grpc.FutureCancelledError:
                self.counts["Put cancelled"] += 1
                continue
            self._judge("/kvstore.v1.Data/Put", error, b"|".join(messages))

    def fetches(self) -> None:
        """Fetch leases that live, have ended or never were; read some, all or none of the answer."""
        for _ in range(4):
            request = self.stranger.request(pb.FetchRequest)
            if self.known.numbers and self.rng.random() < 0.7:
                request = pb.FetchRequest(lease=self.rng.choice(self.known.numbers), payload=True)
            data = self.stranger.wire(request)
            self._read("/kvstore.v1.Data/Fetch", self._fetch, data)

    def loiter(self) -> None:
        """Begin a put or a session and leave it open, half-said, while other calls go on."""
        ends = threading.Event()
        if self.rng.random() < 0.5:
            first = [self.stranger.wire(request) for request in self.stranger.put_requests()[:2]]
            call = self._put.future(_and_wait(first, ends), timeout=DEADLINE_SECONDS, metadata=self._metadata)
        else:
            first = self._session_bytes()[:5]
            call = self._session(_and_wait(first, ends), timeout=DEADLINE_SECONDS, metadata=self._metadata)
        call.add_callback(ends.set)
        self._loitering.append(call)
        self.counts["loitering"] += 1
        while len(self._loitering) > LOITERING_MAX:
            self._loitering.popleft().cancel()

    def noise(self) -> None:
        """Speak something else than HTTP/2 on the socket, or break off in the middle of it."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address.removeprefix("unix:"))
            begin = self.rng.choice((b"", PREFACE, PREFACE + bytes(9), b"GET / HTTP/1.1\r\n\r\n"))
            with contextlib.suppress(OSError):
                connection.sendall(begin + self.rng.randbytes(self.rng.randint(0, 2000)))
        self.counts["noise"] += 1

    def verify(self) -> None:
        """Ask for a verification, and perhaps walk away."""
        data = self.stranger.wire(self.stranger.request(UNARY["/kvstore.v1.Admin/Inspect"]))
        self._read("/kvstore.v1.Admin/Verify", self._verify, data)

    def _read(self, method: str, stub: Any, data: bytes) -> None:
        call = stub(data, timeout=DEADLINE_SECONDS, metadata=self._metadata)
        walk_away = self.rng.random() < 0.3
        try:
            for _ in call:
                if walk_away:
                    call.cancel()
                    break
        except grpc.RpcError as error:
            self._judge(method, error, data)
            return
        self.counts[f"{method} read"] += 1

    def _hear(self, data: bytes) -> None:
        reply = pb.SessionReply.FromString(data)
        if reply.error.code == pb.ERROR_CODE_INTERNAL:
            raise Fault(f"session: internal error: {reply.error.message}")
        self.known.learn(reply.match.lease)
        self.known.learn(reply.reserve.reservation)
        self.known.learn(reply.prefetch.prefetch)

    def _learn(self, method: str, data: bytes) -> None:
        if method.endswith("/Match"):
            self.known.learn(pb.MatchReply.FromString(data).lease)
        elif method.endswith("/Prefetch"):
            self.known.learn(pb.PrefetchReply.FromString(data).prefetch)

    def _judge(self, method: str, error: Any, data: bytes) -> None:
        code = grpc.StatusCode.OK if error is None else error.code()
        self.counts[f"{method.rpartition('/')[2]} {code.name}"] += 1
        details = "" if error is None else str(error.details())
        if code in NEVER:
            raise Fault(f"{method}: {code.name} {details} for {data[:2000].hex()}")
