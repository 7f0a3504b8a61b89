"""A daemon as a subprocess in directories of its own, and a plain wire client for it."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Self

import grpc

from kvstore.rpc.channel import CLIENT_OPTIONS
from kvstore.rpc.stubs import AdminStub, DataStub, admin_stub, data_stub
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.service.store import owner_tag
from kvstore.tiers.host import remove_leftovers

COMMAND = (sys.executable, "-m", "kvstore.cli.main", "serve")
READY_SECONDS = 60.0
SMALL = {"KVSTORE_HOST__ARENA_BYTES": "64MiB", "KVSTORE_SSD__MIN_FREE_BYTES": "64MiB"}


class Home:
    """Directories of a user who has configured nothing. Short names: the socket's has a limit."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kvs-"))

    @property
    def address(self) -> str:
        """Where the daemon listens by default."""
        return f"unix:{self.root}/run/kvstore/kvstore.sock"

    @property
    def socket(self) -> Path:
        """The socket's path."""
        return Path(self.address.removeprefix("unix:"))

    @property
    def data(self) -> Path:
        """The data directory by default."""
        return self.root / "state" / "kvstore"

    def environ(self, **more: str) -> dict[str, str]:
        """Return the environment of a command."""
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("KVSTORE_", "XDG_"))
        }
        own = {
            "HOME": str(self.root),
            "XDG_RUNTIME_DIR": f"{self.root}/run",
            "XDG_STATE_HOME": f"{self.root}/state",
        }
        return inherited | own | SMALL | {"KVSTORE_SERVER__METRICS_ADDRESS": "127.0.0.1:0"} | more

    def remove(self) -> None:
        """Remove everything, also the arena of a daemon that was killed."""
        remove_leftovers(Path("/dev/shm"), owner_tag(self.data))
        shutil.rmtree(self.root, ignore_errors=True)


class Served:
    """A running daemon; a context manager that stops it."""

    def __init__(self, home: Home, *flags: str, environ: dict[str, str] | None = None) -> None:
        self.home = home
        self.lines: list[str] = []
        self._flags = flags
        self._environ = environ or {}
        self._done = threading.Event()

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [*COMMAND, *self._flags],
            env=self.home.environ(**self._environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # A timer instead of a timeout: reading a pipe has none.
        timer = threading.Timer(READY_SECONDS, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if self.lines[-1] == "ready":
                timer.cancel()
                self._log = threading.Thread(target=self._read_log, daemon=True)
                self._log.start()
                return self
        timer.cancel()
        _, log = self.process.communicate()
        raise AssertionError(f"the daemon did not start: {self.lines} {log}")

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            self.log = stream.read()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.stop()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def fact(self, name: str) -> str:
        """Return what the start screen says of `name`."""
        return next(line.split(maxsplit=1)[1] for line in self.lines if line.startswith(f"  {name} "))

    def send(self, number: Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end and return the exit code; what it said is in `lines` and `log`."""
        code = self.process.wait(READY_SECONDS)
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        self._log.join(READY_SECONDS)
        self.process.stdout.close()
        return code

    def stop(self, number: Signals = Signals.SIGTERM) -> int:
        """Ask it to end and return its exit code."""
        self.send(number)
        return self.wait()


def refused(home: Home, *flags: str, command: Sequence[str] = COMMAND, **environ: str) -> tuple[int, str]:
    """Run a daemon that must not start; returns its exit code and what it complains of."""
    ended = subprocess.run(
        [*command, *flags],
        check=False,
        env=home.environ(**environ),
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "ready" not in ended.stdout.splitlines()
    complaints = [line for line in ended.stderr.splitlines() if line.startswith("kvstore: ")]
    return ended.returncode, "\n".join(complaints)


class Wire:
    """One session and the stubs beside it, on a channel of its own."""

    def __init__(
        self,
        address: str,
        *,
        metadata: tuple[tuple[str, str], ...] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        if credentials is None:
            self.channel = grpc.insecure_channel(address, CLIENT_OPTIONS)
        else:
            self.channel = grpc.secure_channel(address, credentials, CLIENT_OPTIONS)
        self.data: DataStub = data_stub(self.channel)
        self.admin: AdminStub = admin_stub(self.channel)
        self.metadata = metadata
        self._requests: queue.Queue[pb.SessionRequest | None] = queue.Queue()
        self._replies: Iterator[pb.SessionReply] | None = None
        self._next = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.put(None)
        self.channel.close()

    def send(self, *, request_id: int | None = None, **verb: Any) -> int:
        """Send a request and return its id."""
        if self._replies is None:
            requests = iter(self._requests.get, None)
            self._replies = iter(self.data.Session(requests, metadata=self.metadata))
        if request_id is None:
            self._next += 1
            request_id = self._next
        self._requests.put(pb.SessionRequest(request_id=request_id, **verb))
        return request_id

    def receive(self) -> pb.SessionReply:
        """Return the next reply."""
        assert self._replies is not None
        return next(self._replies)

    def ask(self, **verb: Any) -> pb.SessionReply:
        """Send a request and return its answer, whatever comes between."""
        number = self.send(**verb)
        while (reply := self.receive()).request_id != number:
            pass
        return reply

    def hello(self, *, want_mapping: bool = False) -> pb.HelloReply:
        """Say hello."""
        reply = self.ask(hello=pb.HelloRequest(protocol=1, client="test", want_mapping=want_mapping))
        assert reply.WhichOneof("answer") == "hello", reply
        return reply.hello
