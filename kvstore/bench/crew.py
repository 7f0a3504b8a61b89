"""Client processes that all do the same thing at the same time, each on a connection of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from enum import StrEnum
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.bench import prompt
from kvstore.bench.harness import no_collection, timed
from kvstore.bench.prompt import BLOCK_BYTES, BLOCKS, DEADLINE_SECONDS, Prompt, copy_blocks
from kvstore.cli.connection import Daemon
from kvstore.client import Client, ClientLimits
from kvstore.errors import TierUnavailable

ANSWER_SECONDS = 120.0


class Deed(StrEnum):
    """What a worker does when it is told to; the parent stores what is hit."""

    HIT = "hit"
    COPY = "copy"
    MATCH = "match"
    EMPTY = "empty"


class Crew:
    """So many workers; a context manager that ends them.

    Threads: one at a time.
    """

    def __init__(self, address: str, seeds: Sequence[int]) -> None:
        """Worker i works with the prompt of `seeds[i]`, in the namespace `clients`."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._workers = []
        for seed in seeds:
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, address, seed), daemon=True)
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)

    def __enter__(self) -> Self:
        self._answers(self._pipes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join(ANSWER_SECONDS)

    def do(self, deed: Deed, *, repeat: int, workers: int | None = None) -> list[float]:
        """Let the first workers do something at once, so many times each; returns the seconds of every time.

        Errors: TierUnavailable with what went wrong in a worker.
        """
        pipes = self._pipes[:workers]
        for pipe in pipes:
            pipe.send((deed, repeat))
        return self._answers(pipes)

    @staticmethod
    def _answers(pipes: Sequence[Connection]) -> list[float]:
        found: list[float] = []
        for pipe in pipes:
            try:
                answer = pipe.recv() if pipe.poll(ANSWER_SECONDS) else f"no answer in {ANSWER_SECONDS:g} s"
            except EOFError:
                answer = "it ended"
            if isinstance(answer, str):
                raise TierUnavailable(f"a client process failed: {answer}")
            found += answer
        return found


class _Worker:
    def __init__(self, client: Client, admin: Daemon, seed: int) -> None:
        self._prompt = Prompt.draw(client.open(prompt.block_major("clients")), BLOCKS, seed=seed)
        self._into = prompt.warm_buffer(0, BLOCK_BYTES)
        self._source = self._into
        self._empty = health_pb2_grpc.HealthStub(admin.channel).Check

    def do(self, deed: Deed, repeat: int) -> list[float]:
        if deed in (Deed.HIT, Deed.COPY) and not len(self._into):
            self._into, self._source = (prompt.warm_buffer(BLOCKS, BLOCK_BYTES) for _ in range(2))
        action = {Deed.HIT: self._hit, Deed.COPY: self._copy, Deed.MATCH: self._match, Deed.EMPTY: self._ask}
        with no_collection():
            return [timed(action[deed]) for _ in range(repeat)]

    def _hit(self) -> None:
        self._prompt.fetch(self._into, verify=False)

    def _copy(self) -> None:
        copy_blocks(self._source, self._into)

    def _match(self) -> None:
        self._prompt.match_once()

    def _ask(self) -> None:
        self._empty(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)


def _work(pipe: Connection, address: str, seed: int) -> None:
    with Client(address, limits=ClientLimits(copy_threads=1)) as client, Daemon(address) as admin:
        try:
            worker = _Worker(client, admin, seed)
            pipe.send([])
            while True:
                pipe.send(worker.do(*pipe.recv()))
        except (EOFError, BrokenPipeError):
            return
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            raise
