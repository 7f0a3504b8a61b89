"""Waking frames: the tier reads their headers, outside the lock; then all hang into the tree at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial

from kvstore.clock import Clock
from kvstore.core.catalog import Catalog
from kvstore.core.sleepers import RunsAsleep, Sleeper
from kvstore.core.waking import Waker
from kvstore.tiers.base import RecoveredFrame, Tier
from kvstore.types import key_count

SLOW_SECONDS = 1.0
Found = dict[Sleeper, RecoveredFrame | None]


class Alarm:
    """Wakes frames.

    Threads: any; `done` is called on the tier's, at once when it answers at once.
    """

    def __init__(
        self,
        catalog: Catalog,
        tier: Tier | None,
        clock: Clock,
        decision: Callable[[], AbstractContextManager[None]],
        *,
        wake_seconds: float,
    ) -> None:
        self._catalog = catalog
        self._tier = tier
        self._clock = clock
        self._decision = decision
        self._waker = Waker(catalog)
        self._wake_seconds = wake_seconds
        self._slow_until = -math.inf
        self.never_waits = 0
        """The thread that must not wait for a disk: a service's event loop."""

    def wait(self, asleep: RunsAsleep, *, seconds: float | None = None) -> None:
        """Wake what a decision needs, and go on without what the disk does not tell in time.

        Errors: RunsAsleep on the thread that never waits: there `wake`, `patience` and `give_up` do the same.
        """
        if threading.get_ident() == self.never_waits:
            raise asleep
        over = threading.Event()
        self.wake(asleep.sleepers, asleep.keys, over.set)
        if not over.wait(self.patience if seconds is None else seconds):
            self.give_up(asleep)

    @property
    def patience(self) -> float:
        """So long is a header worth waiting for now. One who waits for a disk that is slow is enough: what it
        tells late is taken all the same.
        """
        return 0.0 if self._clock.monotonic() < self._slow_until else self._wake_seconds

    def give_up(self, asleep: RunsAsleep) -> None:
        """Go on without frames of which the disk did not tell in time."""
        with self._decision():
            now = self._clock.monotonic()
            self._slow_until = now + SLOW_SECONDS
            self._catalog.sleepers.leave(asleep.sleepers, now=now)
            self._catalog.events.add("kvstore_frames_unreadable_total", len(asleep.sleepers))

    def wake(self, sleepers: Iterable[Sleeper], keys: bytes, done: Callable[[], None]) -> None:
        """Wake frames, and those that share blocks with them; `keys` are those of the request, if any."""
        self._ask({}, list(sleepers), keys, done)

    def _ask(self, found: Found, sleepers: list[Sleeper], keys: bytes, done: Callable[[], None]) -> None:
        assert self._tier is not None, "what sleeps lies on SSD"
        with self._decision():
            there, locations = self._catalog.sleepers.located(sleepers)
        if not locations:
            done()
            return
        came = partial(self._came, found, there, keys, done)
        self._tier.headers(locations).add_done_callback(came)

    def _came(
        self,
        found: Found,
        sleepers: list[Sleeper],
        keys: bytes,
        done: Callable[[], None],
        headers: Future[list[RecoveredFrame | None]],
    ) -> None:
        failed = headers.exception() is not None
        items: list[RecoveredFrame | None] = [None] * len(sleepers) if failed else headers.result()
        try:
            with self._decision():
                found.update(zip(sleepers, items, strict=True))
                more = self._sharing(found, items)
                if not more:
                    self._wake(found, keys)
        except BaseException:
            done()
            raise
        if more:
            self._ask(found, more, keys, done)
        else:
            done()

    def _sharing(self, found: Found, items: Iterable[RecoveredFrame | None]) -> list[Sleeper]:
        """Return frames that begin inside of these: the newer of two copies of a block is the one to take, so
        both come at once.
        """
        more: dict[Sleeper, None] = {}
        for item in items:
            if item is not None:
                along = self._catalog.sleepers.along(item.header.namespace, item.header.keys)
                more.update(dict.fromkeys(sleeper for sleeper in along if sleeper not in found))
        return list(more)

    def _wake(self, found: Found, keys: bytes) -> None:
        sleepers, events = self._catalog.sleepers, self._catalog.events
        here = {sleeper: item for sleeper, item in found.items() if sleepers.is_here(sleeper)}
        good = [(s, item) for s, item in here.items() if item is not None and self._is_same(s, item)]
        self._waker.wake(good, keys)
        events.add("kvstore_frames_woken_total", len(good))
        unreadable = here.keys() - {sleeper for sleeper, _ in good}
        sleepers.leave(unreadable, now=self._clock.monotonic())
        if unreadable:
            events.add("kvstore_frames_unreadable_total", len(unreadable))

    def _is_same(self, sleeper: Sleeper, item: RecoveredFrame) -> bool:
        sleepers = self._catalog.sleepers
        return (
            item.location == sleepers.location(sleeper)
            and item.header.namespace == sleepers.shape(sleeper).namespace
            and key_count(item.header.keys) == sleepers.blocks(sleeper)
        )
