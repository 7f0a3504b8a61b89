"""Engines in processes of their own, asked over a socket; the engine's end needs the base install only.

`serve` is the engine's end. A Nursery forks an engine for each that is asked for from a process that has
imported all that is slow, and has dialled nothing yet: fresh processes at the price of a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from kvstore.testing.adapter_suite.harness import Answer, Cancellable, Cancelled, Engine

CLOSE_SECONDS = 10.0
Job = Mapping[str, Any]
"""What an engine is started with, JSON-ready."""


class EngineProcess:
    """The engine at the other end of a socket; `cancel` interrupts its process (SIGINT).

    Errors: ConnectionError when the process has ended, RuntimeError with what it failed with.
    """

    def __init__(self, connection: socket.socket, job: Job) -> None:
        self._connection = connection
        self._lines = connection.makefile("rw")
        self._pid = int(self._ask(dict(job))["pid"])

    @staticmethod
    def start(command: Sequence[str], job: Job) -> EngineProcess:
        """Run a command whose last argument is the descriptor that it is to `serve`."""
        ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        return EngineProcess(ours, job)

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        """Answer, see Engine."""
        reply = self._ask({"prompt": list(prompt), "new_tokens": new_tokens})
        if "cancelled" in reply:
            raise Cancelled
        return Answer(
            ids=tuple(reply["ids"]), hit_tokens=reply["hit_tokens"], reasons=tuple(reply["reasons"])
        )

    def forget(self) -> None:
        """Forget, see Engine."""
        self._ask({"forget": True})

    def cancel(self) -> None:
        """Interrupt the request that runs."""
        os.kill(self._pid, signal.SIGINT)

    def close(self) -> None:
        """Let it end in the orderly way, and by force when it does not."""
        with self._connection, contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(CLOSE_SECONDS)
            try:
                while self._connection.recv(1 << 16):
                    pass
            except TimeoutError:
                os.kill(self._pid, signal.SIGKILL)

    def _ask(self, request: Job) -> dict[str, Any]:
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the engine's process has ended")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply


class Nursery:
    """A process that forks engines; `command` ends in `nurse` on the descriptor that is its last argument."""

    def __init__(self, command: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    def engine(self, job: Job) -> EngineProcess:
        """Fork an engine."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return EngineProcess(ours, job)

    def close(self) -> None:
        """End the process; engines that live do not end with it."""
        self._control.close()
        self._process.terminate()
        self._process.wait()


def nurse(control: socket.socket, open_engine: Callable[[Job], Engine]) -> None:
    """Fork an engine for each socket that comes, until there will be no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                serve(socket.socket(fileno=descriptors[0]), open_engine)
            finally:
                os._exit(0)
        os.close(descriptors[0])


def serve(connection: socket.socket, open_engine: Callable[[Job], Engine]) -> None:
    """Start the engine of the job that comes first, and let it answer until the other end closes.

    SIGINT calls the engine's `cancel`, on a thread; an engine without one gets a KeyboardInterrupt inside its
    `generate`, and nothing at other times.
    """
    lines = connection.makefile("rw")
    host = _Host(open_engine)
    signal.signal(signal.SIGINT, host.interrupt)
    for line in lines:
        try:
            reply = host.answer(json.loads(line))
        except (KeyboardInterrupt, Cancelled):
            reply = {"cancelled": True}
        except Exception as error:
            reply = {"error": repr(error)}
        host.is_busy = False
        lines.write(json.dumps(reply) + "\n")
        lines.flush()
    if host.engine is not None:
        host.engine.close()


class _Host:
    """The engine of this process, once the first request has brought its job."""

    def __init__(self, open_engine: Callable[[Job], Engine]) -> None:
        self.engine: Engine | None = None
        self.is_busy = False
        self._open_engine = open_engine

    def answer(self, request: Job) -> dict[str, Any]:
        if self.engine is None:
            self.engine = self._open_engine(request)
            return {"pid": os.getpid()}
        if "forget" in request:
            self.engine.forget()
            return {}
        self.is_busy = True
        answer = self.engine.generate(request["prompt"], request["new_tokens"])
        self.is_busy = False
        return {"ids": answer.ids, "hit_tokens": dict(answer.hit_tokens), "reasons": answer.reasons}

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        if isinstance(self.engine, Cancellable):
            threading.Thread(target=self.engine.cancel).start()
        elif self.is_busy:
            raise KeyboardInterrupt
