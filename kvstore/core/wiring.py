"""How the core is put together: the parts, the one lock, and what happens once it is released."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from kvstore.clock import Clock
from kvstore.core.alarm import Alarm
from kvstore.core.asked import AskedFor
from kvstore.core.bedtime import Bedtime
from kvstore.core.catalog import Catalog
from kvstore.core.census import Census
from kvstore.core.eviction import EvictionPolicy, ExactLru
from kvstore.core.farewells import remember
from kvstore.core.graves import Grave
from kvstore.core.housekeeping import Housekeeping
from kvstore.core.leases import LeaseTable
from kvstore.core.ledger import DepartedLedger
from kvstore.core.limits import Limits
from kvstore.core.loads import Loads
from kvstore.core.matching import Matcher
from kvstore.core.moves import Moves
from kvstore.core.plan import Plan
from kvstore.core.prefetches import PrefetchTable
from kvstore.core.pumps import CopyPump, ReadPump, WritePump
from kvstore.core.putting import Putting
from kvstore.core.reclaim import Reclaim
from kvstore.core.retention import Retention, SteadyWall
from kvstore.core.searching import Search
from kvstore.core.sleepers import RunsAsleep
from kvstore.core.touches import touch_notes
from kvstore.core.writeback import WriteBack
from kvstore.errors import InvalidArgument, ShuttingDown
from kvstore.events import Events
from kvstore.retention import SHIPPED_CLASSES, ClassTable, RetentionClass
from kvstore.tiers.base import HostMemory, RecoveredFrame, Tier, TouchNote
from kvstore.types import key_count

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Wiring:
    """The parts of a ladder over host memory and, if there is one, SSD.

    `new_number` gives unguessable numbers for leases and reservations; `client_alive` says whether a
    session's client still holds its lock. Decisions are made inside `_decision`; the I/O and the news that
    they ask for follow after the lock.
    """

    def __init__(
        self,
        *,
        host: HostMemory,
        ssd: Tier | None,
        clock: Clock,
        events: Events,
        classes: ClassTable | Sequence[RetentionClass] = SHIPPED_CLASSES,
        limits: Limits | None = None,
        policy: EvictionPolicy | None = None,
        new_number: Callable[[], int],
        client_alive: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._lock = threading.RLock()
        self._clock = clock
        self._ssd = ssd
        self._host = host
        self._limits = limits or Limits()
        self._plan = Plan()
        self._news: deque[Callable[[], None]] = deque()
        self._sending = threading.Lock()
        self._retention = Retention(_table(classes), SteadyWall(clock))
        self._catalog = Catalog(
            memory=host,
            policy=ExactLru() if policy is None else policy,
            retention=self._retention,
            ledger=DepartedLedger(self._limits.ledger_entries),
            events=events,
            plan=self._plan,
        )
        self._alarm = Alarm(self._catalog, ssd, clock, self._decision, wake_seconds=self._limits.wake_seconds)
        self._search = Search(self._catalog, ssd, self._lock)
        self._matcher = Matcher(self._catalog, self._limits)
        self._loads = Loads(self._catalog, self._limits)
        self._asked = asked = AskedFor(self._catalog)
        self._leases = LeaseTable(self._catalog, self._loads, self._limits, asked, new_number=new_number)
        self._prefetches = PrefetchTable(self._loads, self._limits, new_number=new_number)
        census = Census(self._catalog)
        self._writeback = WriteBack(self._catalog, self._limits, ssd, census)
        puts = (self._catalog, self._writeback, self._limits)
        self._putting = Putting(*puts, new_number=new_number, client_alive=client_alive)
        self._reads = ReadPump(ssd, self._loads, self._decision)
        self._writes = WritePump(ssd, self._writeback, self._loads, self._decision)
        self._moves = Moves(self._catalog, self._limits)
        self._copies = CopyPump(ssd, self._moves, self._retention, self._decision)
        reclaim = Reclaim(self._catalog, self._limits, ssd, self._moves, census)
        self._housekeeping = Housekeeping(
            self._catalog,
            self._leases,
            self._prefetches,
            self._putting,
            self._writeback,
            self._loads,
            reclaim,
            Bedtime(self._catalog, self._limits),
        )
        self._draining = False

    @property
    def catalog(self) -> Catalog:
        """The structures themselves, for the simulator, which lets time pass between decisions."""
        return self._catalog

    @property
    def alarm(self) -> Alarm:
        """What wakes frames, for a service whose loop must not wait for it."""
        return self._alarm

    @contextmanager
    def _decision(self) -> Iterator[None]:
        """Hold the lock for a decision, then carry out what it asks for."""
        asked: tuple[Plan, list[TouchNote]] | None = None
        try:
            with self._lock:
                try:
                    yield
                finally:
                    asked = self._asked_of_others()
        finally:
            if asked is not None:
                self._carry_out(*asked)

    def _asked_of_others(self) -> tuple[Plan, list[TouchNote]] | None:
        """Return what a decision leaves to do once the lock is released; most leave nothing."""
        if self._plan.is_empty:
            return None
        plan = self._plan.take()
        self._news.extend(plan.calls)
        return plan, touch_notes(self._retention, plan.touched, partial=self._catalog.partial)

    def _carry_out(self, plan: Plan, notes: list[TouchNote]) -> None:
        if self._ssd is not None:
            if notes:
                self._ssd.annotate(notes)
            if plan.farewells:
                places = [farewell.location for farewell in plan.farewells]
                self._ssd.headers(places).add_done_callback(partial(self._dismissed, plan))
            else:
                self._delete(self._ssd, plan)
            if plan.wake:
                self._alarm.wake(plan.wake, b"", lambda: None)
        elif plan.barriers:
            with self._decision():
                self._catalog.graves.confirmed(plan.barriers)
        self._send_news()

    def _delete(self, ssd: Tier, plan: Plan) -> None:
        if plan.unlink:
            unlinked = ssd.unlink(plan.unlink, is_urgent=plan.is_urgent)
            unlinked.add_done_callback(partial(self._unlinked, plan.unlink))
        if plan.delete or plan.barriers:
            graves: list[Grave] = [*plan.delete, *plan.barriers]
            ssd.delete(plan.delete).add_done_callback(partial(self._buried, graves))

    def _dismissed(self, plan: Plan, headers: Future[list[RecoveredFrame | None]]) -> None:
        """Tell the ledger what left asleep, a frame under the lock at a time, and only then delete it."""
        items: list[RecoveredFrame | None] = [] if headers.exception() is not None else headers.result()
        for farewell, item in zip(plan.farewells, items, strict=False):
            with self._lock:
                remember(self._catalog, farewell, item)
        assert self._ssd is not None
        self._delete(self._ssd, plan)

    def _send_news(self) -> None:
        """Send news in the order of the decisions, one thread at a time: an end that overtakes the extents
        before it would make a reader give up on them. Who finds a sender at work leaves its news to it.
        """
        while self._news and self._sending.acquire(blocking=False):
            try:
                while self._news:
                    self._send_one(self._news.popleft())
            finally:
                self._sending.release()

    def _send_one(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # A listener's fault must reach neither the other listeners nor whoever decides at this moment.
            _log.exception("a listener of the store failed")
            self._catalog.events.add("kvstore_listener_failures_total")

    def _unlinked(self, segments: list[int], freed: Future[int]) -> None:
        with self._decision():
            self._writeback.unlinked(segments)
            self._close_graves(segments, freed)

    def _buried(self, graves: Sequence[Grave], freed: Future[int]) -> None:
        with self._decision():
            self._close_graves(graves, freed)

    def _close_graves(self, graves: Sequence[Grave], freed: Future[int]) -> None:
        if freed.exception() is None:
            self._catalog.graves.confirmed(graves)
        else:
            self._catalog.graves.refused(graves)

    def _when_awake(self, decide: Callable[[], T]) -> T:
        """Decide; where that needs frames that sleep, wake them and decide again. Each round wakes some, or
        gives up on some for a while.
        """
        while True:
            try:
                return decide()
            except RunsAsleep as asleep:
                self._alarm.wait(asleep)

    def _admit(self) -> None:
        if self._draining:
            raise ShuttingDown("the daemon is shutting down: nothing new is admitted")

    def _check_keys(self, keys: bytes) -> None:
        count = key_count(keys)
        if not 1 <= count <= self._limits.keys_max:
            raise InvalidArgument(f"1..{self._limits.keys_max} keys allowed, got {count}")


def _table(classes: ClassTable | Sequence[RetentionClass]) -> ClassTable:
    return classes if isinstance(classes, ClassTable) else ClassTable.of(classes)
