"""The thread that stores blocks: copies them out of the engine's memory first, then puts them.

The engine keeps the blocks of a finished request until its saves have been read. A preempted request's are
overwritten at once: its saves are cancelled, and what was read meanwhile is thrown away, not stored.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_adapters.vllm.memory import KvMemory
from engine_adapters.vllm.messages import SaveJob
from engine_adapters.vllm.tally import Tally
from kvstore.api import PartBlocks
from kvstore.clock import Clock

if TYPE_CHECKING:
    from kvstore.client import OpenNamespace

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    job: SaveJob
    fence: Any
    cancelled: bool = False


class Saver:
    """Stores blocks behind the engine's back, in order, a job at a time.

    A queue of more than `queue_blocks` drops what comes: the engine must not run out of blocks for it.
    """

    def __init__(
        self,
        memory: KvMemory,
        opened: Callable[[bytes], OpenNamespace],
        tally: Tally,
        *,
        part: int,
        queue_blocks: int,
        put_seconds: float,
        clock: Clock,
    ) -> None:
        self._memory = memory
        self._opened = opened
        self._tally = tally
        self._part = part
        self._queue_blocks = queue_blocks
        self._put_seconds = put_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[_Entry] = deque()
        self._unread: list[_Entry] = []  # queued, or being copied out now
        self._cut: set[str] = set()  # dropped a job: what follows it would be an orphan
        self._busy = False
        self._ending = False
        self._staging = memory.staging(0)
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
        self._thread.start()

    def submit(self, jobs: Collection[SaveJob]) -> None:
        """Queue jobs of what the engine has been told to compute by now."""
        fence = self._memory.fence()
        with self._changed:
            waiting = sum(len(entry.job.block_ids) for entry in self._queue)
            for job in jobs:
                waiting += len(job.block_ids)
                if waiting > self._queue_blocks or job.request_id in self._cut or self._ending:
                    self._cut.add(job.request_id)
                    self._tally.add("dropped_blocks", len(job.block_ids), "queue_full")
                    continue
                entry = _Entry(job, fence)
                self._queue.append(entry)
                self._unread.append(entry)
            self._changed.notify_all()

    def cancel(self, request_ids: Collection[str]) -> None:
        """Forget the jobs of requests whose blocks are about to be overwritten."""
        with self._changed:
            for entry in self._unread:
                entry.cancelled = entry.cancelled or entry.job.request_id in request_ids
            self._cut.difference_update(request_ids)

    def unread(self, request_ids: Collection[str]) -> set[str]:
        """Return which of these requests have blocks that were not copied out yet."""
        with self._changed:
            return {entry.job.request_id for entry in self._unread} & set(request_ids)

    def forget(self, request_ids: Collection[str]) -> None:
        """These requests are over."""
        with self._changed:
            self._cut.difference_update(request_ids)

    def wait_read(self, seconds: float) -> None:
        """Wait until everything is copied out, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unread, seconds)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is put, at most `seconds`; say whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, seconds)

    def close(self, flush_seconds: float) -> None:
        """Put what is queued, as far as `flush_seconds` go, and end the thread."""
        done = self.flush(flush_seconds)
        with self._changed:
            self._ending = True
            lost = sum(len(entry.job.block_ids) for entry in self._queue)
            self._queue.clear()
            self._unread.clear()
            self._changed.notify_all()
        if not done:
            _log.warning("event=vllm_flush_incomplete blocks=%d seconds=%.1f", lost, flush_seconds)
        self._thread.join(self._put_seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ending)
                if self._ending:
                    return
                entry = self._queue.popleft()
                self._busy = True
            try:
                self._save(entry)
            except Exception:  # the store failing never fails a request; what broke is in the log
                _log.exception("event=vllm_save_failed")
                self._tally.add("stored_blocks", len(entry.job.block_ids), "failed")
            finally:
                with self._changed:
                    self._busy = False
                    self._read(entry)
                    self._changed.notify_all()

    def _save(self, entry: _Entry) -> None:
        job = entry.job
        count = len(job.block_ids)
        started = self._clock.monotonic()
        if not entry.cancelled:
            if len(self._staging) < count:
                self._staging = self._memory.staging(count)
            self._memory.gather(job.block_ids, self._staging, after=entry.fence)
        with self._changed:
            self._read(entry)
            if entry.cancelled:  # then what was read may be another request's
                self._tally.add("dropped_blocks", count, "preempted")
                return
        self._put(job, count)
        self._tally.add("save_seconds", self._clock.monotonic() - started)
        self._tally.add("save_bytes", count * self._staging.shape[1])

    def _put(self, job: SaveJob, count: int) -> None:
        put = self._opened(job.namespace).put(
            job.parent,
            job.keys,
            {self._part: self._staging[:count]},
            retention_class=job.retention_class,
            put_id=job.put_id,
            parts=(PartBlocks(self._part, 0, count),),
            deadline_seconds=self._put_seconds,
        )
        for run in put.outcomes:
            self._tally.add("stored_blocks", run.count, str(run.outcome))
        if put.reason is not None:
            self._tally.add("stored_blocks", count, str(put.reason))

    def _read(self, entry: _Entry) -> None:
        if entry in self._unread:
            self._unread.remove(entry)
            self._changed.notify_all()
