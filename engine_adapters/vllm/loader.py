"""Brings leased blocks into the engine's memory, a window at a time, on threads of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine_adapters.vllm.memory import KvMemory
from engine_adapters.vllm.messages import Loaded, LoadJob
from engine_adapters.vllm.options import LOADER_THREADS
from engine_adapters.vllm.tally import Tally
from kvstore.client import Match, OpenNamespace
from kvstore.client.recompute import TierSpeeds, tiers_between
from kvstore.clock import Clock
from kvstore.copying import Bytes
from kvstore.types import MissReason, Tier

_log = logging.getLogger(__name__)


class Loader:
    """Loads jobs, and measures what each tier gives, copying into the engine included; whatever goes
    wrong ends in a shorter result, by the job's deadline.
    """

    def __init__(
        self,
        memory: KvMemory,
        opened: Callable[[bytes], OpenNamespace],
        tally: Tally,
        *,
        part: int,
        staging_bytes: int,
        clock: Clock,
    ) -> None:
        self._memory = memory
        self._opened = opened
        self._tally = tally
        self._part = part
        self._block_bytes = sum(memory.row_bytes)
        self._window = max(1, staging_bytes // self._block_bytes)
        self._speeds = TierSpeeds(clock)
        self._clock = clock
        self._mine = threading.local()
        self._pool = ThreadPoolExecutor(LOADER_THREADS, thread_name_prefix="kvstore-load")

    def submit(self, job: LoadJob) -> Future[Loaded]:
        """Begin a load; its deadline runs from now."""
        return self._pool.submit(self._load, job, self._clock.monotonic())

    def block_seconds(self) -> dict[Tier, float]:
        """Return how long a block takes from each tier that was ever loaded from."""
        return {tier: seconds * self._block_bytes for tier, seconds in self._speeds.known().items()}

    def close(self) -> None:
        """End the threads; loads under way end by their deadlines."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _load(self, job: LoadJob, started: float) -> Loaded:
        begun = self._clock.monotonic()
        try:
            good, reason = self._windows(job, started)
        except Exception:  # the store failing never fails a request; what broke is in the log
            _log.exception("event=vllm_load_failed")
            good, reason = 0, MissReason.TIER_DOWN
        ended = self._clock.monotonic()
        self._note(job, good, seconds=ended - begun)
        self._tally.add("loads")
        self._tally.add("load_seconds", ended - started)
        self._tally.add("load_bytes", good * self._block_bytes)
        return Loaded(request_id=job.request_id, blocks=good, reason=reason)

    def _note(self, job: LoadJob, good: int, *, seconds: float) -> None:
        """Learn from a load; time that it waited for a thread says nothing about its tiers."""
        end = job.first + max(1, good)
        tiers = tiers_between(job.tiers, job.first, end)
        self._speeds.note(tiers, block_bytes=self._block_bytes, seconds=seconds, came=good > 0)

    def _windows(self, job: LoadJob, started: float) -> tuple[int, MissReason | None]:
        """Fetch and place window after window; return how many blocks are in place, and why not more."""
        namespace = self._opened(job.namespace)
        match = Match(blocks=job.blocks, lease=job.lease, parts=(self._part,), ready=False)
        wanted = min(len(job.block_ids), max(0, job.blocks - job.first))
        staging = self._staging(wanted)
        done = 0
        while done < wanted:
            count = min(len(staging), wanted - done)
            left = job.seconds - (self._clock.monotonic() - started)
            if left <= 0:
                return done, MissReason.DEADLINE
            fetched = namespace.fetch(
                match,
                {self._part: staging[:count]},
                first=job.first + done,
                blocks=count,
                deadline_seconds=left,
            )
            if fetched.blocks:
                self._memory.scatter(staging[: fetched.blocks], job.block_ids[done : done + fetched.blocks])
            done += fetched.blocks
            if fetched.blocks < count:
                return done, fetched.reason or MissReason.TIER_DOWN
        # What the lease lacks of the promise was there when vLLM asked.
        return done, None if done == len(job.block_ids) else MissReason.EVICTED

    def _staging(self, wanted: int) -> Bytes:
        """Return this thread's staging memory, as much as it needs and at most a window."""
        rows: Bytes | None = getattr(self._mine, "rows", None)
        blocks = min(wanted, self._window)
        if rows is None or len(rows) < blocks:
            rows = self._mine.rows = self._memory.staging(blocks)
        return rows
