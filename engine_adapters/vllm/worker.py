"""The worker's side of the connector: carries out a step's orders on one rank; knows no vLLM."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from engine_adapters.vllm.loader import Loader
from engine_adapters.vllm.memory import KvMemory
from engine_adapters.vllm.messages import Answers, Loaded, LoadJob, RankSpeed, Step
from engine_adapters.vllm.options import Options
from engine_adapters.vllm.saver import Saver
from engine_adapters.vllm.tally import Tally
from kvstore.clock import Clock, SystemClock
from kvstore.namespace import Namespace

if TYPE_CHECKING:
    from kvstore.client import Client, OpenNamespace

IDLE_SECONDS = 0.005
"""A step that computes nothing waits so long for a transfer instead of spinning."""


class WorkerSide:
    """The rank of that name. Its part of every block is the shard of that name; `writes` is false where ranks
    hold equal bytes and another one stores them.

    Call order in a step: begin, start_loads, (the engine computes,) end, finished, errors, answers.
    Threads: the engine's only.
    """

    def __init__(
        self,
        client: Client,
        options: Options,
        memory: KvMemory,
        *,
        rank: str,
        shard: str,
        writes: bool,
        num_blocks: int,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._options = options
        self._memory = memory
        self._rank = rank
        self._shard = shard
        self._writes = writes
        self._queue_blocks = options.save_queue_blocks or max(1, num_blocks // 4)
        self._clock = clock or SystemClock()
        self.tally = Tally()
        self._namespaces: dict[bytes, OpenNamespace] = {}
        self._step = Step()
        self._loads: dict[str, tuple[LoadJob, Future[Loaded]]] = {}
        self._draining: set[str] = set()
        self._errors: set[int] = set()
        self._loaded: list[Loaded] = []
        self._tainted_epoch = -1
        self._loader: Loader | None = None
        self._saver: Saver | None = None

    def begin(self, step: Step) -> None:
        """Take a step's orders, before anything of it is computed or overwritten."""
        self._step = step
        if step.preempted and self._saver is not None:
            self._saver.cancel(step.preempted)

    def start_loads(self) -> None:
        """Begin the step's loads, and finish them when it computes with them."""
        for job in self._step.loads:
            self._loads[job.request_id] = (job, self._make_loader(job.namespace).submit(job))
        if self._step.waits:
            for job in self._step.loads:
                self._end_load(job.request_id, taints=True)

    def end(self) -> None:
        """What the step computed may be stored now."""
        step = self._step
        if step.saves and self._writes:
            if step.epoch <= self._tainted_epoch:
                dropped = sum(len(job.block_ids) for job in step.saves)
                self.tally.add("dropped_blocks", dropped, "behind_failed_load")
            else:
                self._make_saver(step.saves[0].namespace).submit(step.saves)
        if step.idle:
            self._wait()

    def finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose saves have been read, of those the engine waits for; and the loaded."""
        self._draining |= self._step.draining
        unread = self._saver.unread(self._draining) if self._saver is not None else set[str]()
        read = self._draining - unread
        if read and self._saver is not None:
            self._saver.forget(read)
        self._draining = unread
        done = {request for request, (_, future) in self._loads.items() if future.done()}
        for request in done:
            self._end_load(request, taints=False)
        return read, done

    def errors(self) -> set[int]:
        """Return the engine's blocks that hold nothing usable, of the loads ended so far."""
        errors, self._errors = self._errors, set()
        return errors

    def answers(self) -> Answers | None:
        """Return what became of the loads that ended, and how fast they came."""
        loaded, self._loaded = self._loaded, []
        if not loaded or self._loader is None:
            return None
        speeds = self._loader.block_seconds().items()
        return Answers(
            tuple(loaded),
            tuple(RankSpeed(rank=self._rank, tier=tier, block_seconds=seconds) for tier, seconds in speeds),
        )

    def flush(self, seconds: float) -> bool:
        """Wait until everything is put, at most `seconds`; say whether it is."""
        return self._saver is None or self._saver.flush(seconds)

    def close(self) -> None:
        """Put what is queued within the flush time, and let go of the store."""
        if self._saver is not None:
            self._saver.close(self._options.flush_seconds)
        if self._loader is not None:
            self._loader.close()
        self._client.close()

    def _end_load(self, request_id: str, *, taints: bool) -> None:
        job, future = self._loads.pop(request_id)
        loaded = future.result()
        self._loaded.append(loaded)
        failed = job.block_ids[loaded.blocks :]
        self._errors.update(failed)
        if failed and taints:
            # The step computes on garbage now, for all requests that share these blocks.
            self._tainted_epoch = max(self._tainted_epoch, self._step.epoch)

    def _wait(self) -> None:
        if self._loads:
            wait([future for _, future in self._loads.values()], IDLE_SECONDS, FIRST_COMPLETED)
        if self._saver is not None and (self._draining or self._step.draining):
            self._saver.wait_read(IDLE_SECONDS)

    def _make_loader(self, namespace: bytes) -> Loader:
        if self._loader is None:
            self._loader = Loader(
                self._memory,
                self._opened,
                self.tally,
                part=part_of(namespace, self._shard),
                staging_bytes=self._options.staging_bytes,
                clock=self._clock,
            )
        return self._loader

    def _make_saver(self, namespace: bytes) -> Saver:
        if self._saver is None:
            self._saver = Saver(
                self._memory,
                self._opened,
                self.tally,
                part=part_of(namespace, self._shard),
                queue_blocks=self._queue_blocks,
                put_seconds=self._options.put_seconds,
                clock=self._clock,
            )
        return self._saver

    def _opened(self, canonical: bytes) -> OpenNamespace:
        found = self._namespaces.get(canonical)
        if found is None:
            found = self._client.open(
                Namespace.from_canonical(canonical), retention_class=self._options.retention_class
            )
            self._namespaces[canonical] = found
        return found


def part_of(canonical: bytes, shard: str) -> int:
    """Return the index of the part that a shard stores; all namespaces of an engine have the same parts."""
    layout = Namespace.from_canonical(canonical).layout
    return next(part.index for part in layout.parts if part.shard == shard)
