"""What has to happen as time passes: deadlines, expiry, quarantine. A bounded amount each time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from kvstore.core.bedtime import Bedtime
from kvstore.core.catalog import Catalog
from kvstore.core.frames import Node
from kvstore.core.leases import LeaseTable
from kvstore.core.loads import Loads
from kvstore.core.prefetches import PrefetchTable
from kvstore.core.putting import Putting
from kvstore.core.reclaim import Reclaim
from kvstore.core.writeback import WriteBack

SWEEP_NODES = 64
SWEEP_EXPIRED = 1
CENSUS_STEPS, SLEEP_STEPS, SWEEP_STEPS = 4, 4, 64
STEPS_MAX = 256
"""Of a turn, each under the lock for about as long as a match takes: who matches meanwhile waits for one.
The first CENSUS_STEPS measure what lives on SSD, SLEEP_STEPS put a frame to sleep each, the next SWEEP_STEPS
look at host memory, and of SWEEP_NODES that one looks at SWEEP_EXPIRED at most give up their slots.
"""
PAUSE_SECONDS = 0.001
"""Between steps of a turn: whoever waits for the lock, or for the interpreter, has it meanwhile. A frame a
millisecond gives SSD back faster than it is written.
"""
LENT_SECONDS = 4 * PAUSE_SECONDS
"""Between steps that others do: the tick leaves it to them unless they are slower."""
LOSSES_EVERY_SECONDS = 1.0
RETRY_EVERY_SECONDS = 5.0


class Housekeeping:
    """Bounded work per call: all deadlines at once, a share of the nodes and segments in each step."""

    def __init__(
        self,
        catalog: Catalog,
        leases: LeaseTable,
        prefetches: PrefetchTable,
        putting: Putting,
        writeback: WriteBack,
        loads: Loads,
        reclaim: Reclaim,
        bedtime: Bedtime,
    ) -> None:
        self._catalog = catalog
        self._leases = leases
        self._prefetches = prefetches
        self._putting = putting
        self._writeback = writeback
        self._loads = loads
        self._reclaim = reclaim
        self._bedtime = bedtime
        self._retry_due = 0.0
        self._pass: Iterator[list[Node]] | None = None
        self._sweep: list[Node] = []
        self._losses_due = 0.0
        self._steps, self._step_due = 0, math.inf
        self._lent, self._looked_at = 0, 0.0

    @property
    def has_more(self) -> bool:
        """Say whether a turn is under way."""
        return self._step_due < math.inf

    def is_due(self, monotonic: float) -> bool:
        """Say whether a turn is under way and its last step was PAUSE_SECONDS ago."""
        return monotonic >= self._step_due

    def is_lent(self, monotonic: float) -> bool:
        """Say whether others have done the steps since the last look, at a pace that will do."""
        lent, elapsed = self._lent, monotonic - self._looked_at
        self._lent, self._looked_at = 0, monotonic
        return lent > 1 and lent * LENT_SECONDS >= elapsed

    def run(self, *, monotonic: float) -> None:
        """Do what is due, and begin a turn of steps, which do what takes longer, unless one is under way."""
        self._loads.expire(monotonic)
        self._writeback.expire(monotonic)
        self._catalog.graves.expire(monotonic)
        self._catalog.sleepers.expire(monotonic)
        self._leases.expire(monotonic)
        self._prefetches.expire(monotonic)
        self._putting.expire(monotonic=monotonic)
        self._putting.sweep_quarantine()
        self._catalog.quotas.shrink()
        self._retry(monotonic)
        if monotonic >= self._losses_due:
            self._losses_due = monotonic + LOSSES_EVERY_SECONDS
            self._writeback.take_losses()
        if not self.has_more:
            self._step_due, self._steps = monotonic, 0

    def step(self, *, monotonic: float, now: float, is_lent: bool) -> None:
        """Do a little of what expiry asks for. A step `is_lent` by whoever passes, not by the tick."""
        self._lent += is_lent
        self._step_due = math.inf  # a step that fails ends the turn
        if self._step(monotonic, now):
            self._step_due = monotonic + PAUSE_SECONDS

    def _step(self, monotonic: float, now: float) -> bool:
        self._steps += 1
        if self._steps <= CENSUS_STEPS:
            self._reclaim.look_around(now)
            return True
        if self._steps <= CENSUS_STEPS + SLEEP_STEPS:
            if not self._bedtime.step(now):
                self._steps = CENSUS_STEPS + SLEEP_STEPS
            return True
        # One pass a turn is enough: a store of few nodes is not looked through again and again.
        swept = self._steps - CENSUS_STEPS - SLEEP_STEPS
        if swept == 1 or (swept <= SWEEP_STEPS and self._pass is not None):
            self._sweep_nodes(now)
            return True
        return self._reclaim.step(now, monotonic=monotonic) and self._steps < STEPS_MAX

    def _retry(self, monotonic: float) -> None:
        if monotonic >= self._retry_due:
            self._retry_due = monotonic + RETRY_EVERY_SECONDS
            self._writeback.retry()
            self._catalog.graves.retry()

    def _sweep_nodes(self, now: float) -> None:
        if self._pass is None:
            states = list(self._catalog.namespaces.values())
            self._pass = chain.from_iterable(state.stretches() for state in states)
        if not self._sweep:
            self._sweep = next(filter(None, self._pass), [])
            if not self._sweep:
                self._pass = None
                return
        policy, may_go, expired = self._catalog.policy, self._catalog.retention.may_go, list[Node]()
        for _ in range(min(SWEEP_NODES, len(self._sweep))):
            node = self._sweep.pop()
            if node in policy and may_go(node, now):
                expired.append(node)
                if len(expired) == SWEEP_EXPIRED:
                    break
        self._catalog.expire_host(expired, now)
