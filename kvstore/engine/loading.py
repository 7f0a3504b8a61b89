"""Blocks on their way from the daemon into pages of the pool, a stage of layers at a time.

The forward pass computes a layer while the next stages still arrive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.api import TierRun
from kvstore.client import Fetched, Match
from kvstore.client.namespace import OpenNamespace
from kvstore.clock import Clock
from kvstore.engine.pool import KvPool, neighbours
from kvstore.engine.streams import InPlace, Mark
from kvstore.engine.windows import WindowFormat, WindowRows
from kvstore.types import MissReason, ReleaseOutcome

LOADS_AT_ONCE = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a load: the first `blocks` of it are in their pages, in every layer. It is `whole` when
    these are all, and the window rows behind them came where there are any.
    """

    blocks: int
    whole: bool
    tiers: tuple[TierRun, ...] = ()
    reason: MissReason | None = None
    seconds: float = 0.0


class Load:
    """Blocks [first, first + len(pages)) of a match, on their way into `pages`; ahead of the first stage the
    `window` rows behind the last of them, for a model that has window layers.

    Threads: one fills it, any may wait.
    """

    def __init__(self, match: Match, *, first: int, pages: Sequence[int]) -> None:
        self.match = match
        self.first = first
        self.pages = tuple(pages)
        self.window: WindowRows | None = None
        self._changed = threading.Condition()
        self._stages: list[Mark | None] = []
        self._result: Loaded | None = None

    @property
    def result(self) -> Loaded | None:
        """What became of it; None while it is on its way."""
        return self._result

    @property
    def boundary(self) -> int:
        """The block behind the last one."""
        return self.first + len(self.pages)

    def has(self, stage: int) -> bool:
        """Say whether a stage is there."""
        return len(self._stages) > stage

    def wait(self, stage: int, *, seconds: float) -> bool:
        """Wait until a stage is there, the load is over, or time is up; say whether the stage is there. What
        the caller issues for the device from then on comes behind it.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._stages) > stage or self._result is not None, timeout=max(0.0, seconds)
            )
        if not self.has(stage):
            return False
        if (mark := self._stages[stage]) is not None:
            mark.wait()
        return True

    def wait_end(self, *, seconds: float) -> bool:
        """Wait until the load is over or time is up; say whether it is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._result is not None, timeout=seconds)

    def arrive(self, mark: Mark | None) -> None:
        """The next stage is there, for a device behind its mark."""
        with self._changed:
            self._stages.append(mark)
            self._changed.notify_all()

    def end(self, result: Loaded) -> None:
        """Nothing more will arrive."""
        with self._changed:
            self._result = result
            self._changed.notify_all()


class Loader:
    """Threads that fill pages from the daemon."""

    def __init__(self, store: OpenNamespace, pool: KvPool, clock: Clock) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self._threads = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="engine-load")

    def start(self, match: Match, *, first: int, pages: Sequence[int], seconds: float) -> Load:
        """Begin to load blocks [first, first + len(pages)) of a match, for at most `seconds`. The lease is
        released at the end.
        """
        load = Load(match, first=first, pages=pages)
        self._threads.submit(self._run, load, self._clock.monotonic() + seconds)
        return load

    def _run(self, load: Load, deadline: float) -> None:
        begun = self._clock.monotonic()
        good, tiers = len(load.pages), tuple[TierRun, ...]()
        reason: MissReason | None = None
        try:
            if self._pool.windows is not None:
                load.window = self._window(load, self._pool.windows, deadline)
                if load.window is None:
                    good, reason = 0, MissReason.PART_MISSING
            copies = self._pool.copies()
            try:
                for stage in range(len(self._pool.stages)):
                    if not good:
                        break
                    come, mark = self._stage(load, stage, load.pages[:good], copies, deadline)
                    tiers = tuple(run for one in come for run in one.tiers)
                    if (there := sum(one.blocks for one in come)) < good:
                        # Of the later stages just these blocks are wanted; nobody waits for them any more.
                        good, reason = there, come[-1].reason or MissReason.EVICTED
                    elif reason is None:
                        load.arrive(mark)
            finally:  # also when it fails: nobody else gets the pages before
                copies.finish()
        except Exception:  # the store failing never fails a request; what broke is in the log
            _log.exception("event=engine_load_failed")
            good, reason = 0, MissReason.TIER_DOWN
        whole = reason is None
        outcome = ReleaseOutcome.USED if good or whole else ReleaseOutcome.UNUSED
        self._store.release(load.match, used=load.first + good if good or whole else 0, outcome=outcome)
        load.end(Loaded(good, whole, tiers, reason, self._clock.monotonic() - begun))

    def _window(self, load: Load, form: WindowFormat, deadline: float) -> WindowRows | None:
        record, block = form.blank(), load.boundary - 1
        seconds = max(0.0, deadline - self._clock.monotonic())
        self._store.fetch(
            load.match, {form.part.index: record}, first=block, blocks=1, deadline_seconds=seconds
        )
        return form.unpack(record, tokens=load.boundary * self._pool.block_tokens)

    def _stage(
        self, load: Load, stage: int, pages: Sequence[int], copies: InPlace, deadline: float
    ) -> tuple[list[Fetched], Mark | None]:
        """Fetch a stage, a stretch of neighbouring pages at a time, up to a block that does not come."""
        come: list[Fetched] = []
        mark: Mark | None = None
        for start, stop in neighbours(pages):
            views = self._pool.views(stage, pages[start:stop])
            fetched = self._store.fetch(
                load.match,
                {stage: copies.staging(views)},
                first=load.first + start,
                blocks=stop - start,
                deadline_seconds=max(0.0, deadline - self._clock.monotonic()),
            )
            mark = copies.send(views)
            come.append(fetched)
            if fetched.blocks < stop - start:
                break
        return come, mark

    def close(self) -> None:
        """Wait for the loads under way."""
        self._threads.shutdown()
