"""An engine behind a unix socket, so that prefill and decode can be processes of their own.

Workers know nothing of each other: what one computed, another finds in the daemon. A request is one
connection; both ways go JSON messages: the request, then a token at a time, then the answer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import connection as pipes
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Protocol

from kvstore.engine.engine import Engine
from kvstore.engine.request import Answer, Request, Sampling, Usage
from kvstore.errors import InvalidArgument, KVStoreError, TierUnavailable
from kvstore.types import MissReason

OnToken = Callable[[int], None]
_log = logging.getLogger(__name__)


class Worker(Protocol):
    """Who computes requests: an engine in this process, or one behind a socket."""

    def submit(self, request: Request, *, on_token: OnToken = lambda _: None) -> Future[Answer]:
        """Start a request.

        Errors: InvalidArgument when it can never be served; the future ends with TierUnavailable when the
        worker is gone.
        """
        ...


class RemoteWorker:
    """A worker behind a socket."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def submit(self, request: Request, *, on_token: OnToken = lambda _: None) -> Future[Answer]:
        """Start a request on a thread that listens to its connection."""
        answer: Future[Answer] = Future()
        threading.Thread(
            target=self._follow, args=(request, on_token, answer), name="engine-remote", daemon=True
        ).start()
        return answer

    def _follow(self, request: Request, on_token: OnToken, answer: Future[Answer]) -> None:
        try:
            with pipes.Client(str(self.path), family="AF_UNIX") as connection:
                connection.send_bytes(json.dumps(request_to_plain(request)).encode())
                while not (message := json.loads(connection.recv_bytes())).get("answer"):
                    if "error" in message:
                        raise InvalidArgument(message["error"])
                    on_token(message["token"])
            answer.set_result(answer_from_plain(message["answer"]))
        except KVStoreError as error:
            answer.set_exception(error)
        except (OSError, EOFError, ValueError) as error:
            answer.set_exception(TierUnavailable(f"worker {self.path} is gone: {error!r}"))


class WorkerServer:
    """Serves an engine at a socket, which only this user may use. Closing it ends nothing that runs.

    With `flushes`, an answer is not sent before its blocks are in the daemon: whoever goes on with it finds
    them.
    """

    def __init__(self, engine: Engine, path: Path, *, flushes: bool) -> None:
        self._engine = engine
        self._flushes = flushes
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._listener = Listener(str(path), family="AF_UNIX")
        finally:
            os.umask(before)
        self._thread = threading.Thread(target=self._accept, name="engine-serve", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="engine-request", daemon=True
            ).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        """Serve one request. A client that has gone only stops listening: its blocks are worth keeping."""
        with connection:
            try:
                request = request_from_plain(json.loads(connection.recv_bytes()))
                answer = self._engine.submit(request, on_token=lambda token: _tell(connection, token=token))
                result = answer.result()
                if self._flushes:
                    self._engine.flush()
                _tell(connection, answer=dataclasses.asdict(result))
            except (InvalidArgument, ValueError, KeyError, TypeError) as error:
                _tell(connection, error=str(error))
            except (OSError, EOFError, KVStoreError) as error:
                _log.info("event=engine_request_dropped cause=%r", error)

    def close(self) -> None:
        """Admit nothing more."""
        self._listener.close()


def _tell(connection: Connection[Any, Any], **message: Any) -> None:
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError:
        _log.debug("a client left before its answer")


def request_to_plain(request: Request) -> dict[str, Any]:
    """Return a request as JSON-ready values.

    Errors: InvalidArgument on a logits mask, which is code and stays in its process.
    """
    if request.sampling.mask is not None:
        raise InvalidArgument(f"{request.name}: a logits mask cannot go to another process")
    plain = dataclasses.asdict(request)
    del plain["sampling"]["mask"]
    return plain | {"stop_ids": sorted(request.stop_ids)}


def request_from_plain(plain: dict[str, Any]) -> Request:
    """Rebuild a request."""
    return Request(
        **plain
        | {
            "prompt": tuple(plain["prompt"]),
            "stop_ids": frozenset(plain["stop_ids"]),
            "sampling": Sampling(**plain["sampling"]),
        }
    )


def answer_from_plain(plain: dict[str, Any]) -> Answer:
    """Rebuild an answer."""
    usage = dict(plain["usage"])
    usage["reason"] = MissReason(usage["reason"]) if usage["reason"] else None
    return Answer(tuple(plain["ids"]), Usage(**usage), plain["ended_by"])
