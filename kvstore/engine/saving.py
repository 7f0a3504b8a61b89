"""Blocks on their way from pages of the pool to the daemon, behind the answer.

What is saved here may leave the pool at any time: this is the demotion from hbm, done ahead of need.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass

from kvstore.api import PartBlocks
from kvstore.client.namespace import OpenNamespace
from kvstore.engine.hbm import Hbm, Held
from kvstore.engine.pool import KvPool, neighbours
from kvstore.engine.windows import WindowFormat, WindowRows
from kvstore.types import HASH_BYTES, BlockHash, key_at, key_count

QUEUE_MAX = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks [first, len(keys)) of a chain, held in the pool; none of them: just a touch of the chain.
    `checkpoint` is a boundary within it, and the window rows there.
    """

    keys: bytes
    first: int
    held: Held
    retention_class: str
    checkpoint: tuple[int, WindowRows] | None = None


class Saver:
    """One thread that puts blocks, and renews those whose hits never reach the daemon.

    The queue is bounded; what finds no place is not saved, and counted.
    """

    def __init__(self, store: OpenNamespace, pool: KvPool, hbm: Hbm) -> None:
        self._store = store
        self._pool = pool
        self._hbm = hbm
        self._queue: queue.Queue[Save | None] = queue.Queue(QUEUE_MAX)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="engine-save", daemon=True)
        self._thread.start()

    def submit(self, save: Save) -> bool:
        """Queue a save, which takes over `held`; False when there is no place for it."""
        try:
            self._queue.put_nowait(save)
        except queue.Full:
            self.dropped += 1
            self._hbm.release(save.held, used=0)
            return False
        return True

    def _run(self) -> None:
        while (save := self._queue.get()) is not None:
            try:
                self._save(save)
            except Exception:  # the store failing never fails a request; what broke is in the log
                _log.exception("event=engine_save_failed")
            finally:
                self._hbm.release(save.held, used=0)
                self._queue.task_done()
        self._queue.task_done()

    def _save(self, save: Save) -> None:
        if save.first == key_count(save.keys):
            self._store.touch(save.keys, save.retention_class)
        elif not self._save_blocks(save):
            return
        if save.checkpoint is not None and self._pool.windows is not None:
            self._save_window(save, *save.checkpoint, form=self._pool.windows)

    def _save_blocks(self, save: Save) -> bool:
        """Put blocks; False when the last ones did not find room."""
        copies = self._pool.copies()
        for first, stop in neighbours(save.held.pages, save.first):
            pages = save.held.pages[first:stop]
            source = {
                stage: copies.receive(self._pool.views(stage, pages))
                for stage in range(len(self._pool.stages))
            }
            parent = key_at(save.keys, first - 1) if first else self._store.root
            put = self._store.put(
                BlockHash(parent),
                save.keys[first * HASH_BYTES : stop * HASH_BYTES],
                source,
                retention_class=save.retention_class,
            )
            if put.present < stop - first:
                return False  # what follows would be an orphan
        return True

    def _save_window(self, save: Save, boundary: int, window: WindowRows, *, form: WindowFormat) -> None:
        parent = key_at(save.keys, boundary - 2) if boundary > 1 else self._store.root
        self._store.put(
            BlockHash(parent),
            key_at(save.keys, boundary - 1),
            {form.part.index: form.pack(window)},
            parts=[PartBlocks(form.part.index, 0, 1)],
            retention_class=save.retention_class,
        )

    def flush(self) -> None:
        """Wait until everything queued is saved."""
        self._queue.join()

    def close(self) -> None:
        """Save what is queued, then end."""
        self._queue.put(None)
        self._thread.join()
