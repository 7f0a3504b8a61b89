"""What has to happen as time passes: deadlines, expiry, quarantine. A bounded amount each time."""

from __future__ import annotations

from itertools import islice

from kvstore.core.catalog import Catalog
from kvstore.core.frames import Node
from kvstore.core.leases import LeaseTable
from kvstore.core.loads import Loads
from kvstore.core.prefetches import PrefetchTable
from kvstore.core.putting import Putting
from kvstore.core.writeback import WriteBack
from kvstore.types import MissReason

SWEEP_NODES = 256
SEGMENTS_EVERY_SECONDS = 1.0
RETRY_EVERY_SECONDS = 5.0


class Housekeeping:
    """Bounded work per call: all deadlines, a share of the nodes, all segments once a second."""

    def __init__(
        self,
        catalog: Catalog,
        leases: LeaseTable,
        prefetches: PrefetchTable,
        putting: Putting,
        writeback: WriteBack,
        loads: Loads,
    ) -> None:
        self._catalog = catalog
        self._leases = leases
        self._prefetches = prefetches
        self._putting = putting
        self._writeback = writeback
        self._loads = loads
        self._retry_due = 0.0
        self._sweep: list[Node] = []
        self._segments_due = 0.0

    def run(self, *, monotonic: float, now: float) -> None:
        """Do what is due."""
        self._loads.expire(monotonic)
        self._writeback.expire(monotonic)
        self._leases.expire(monotonic)
        self._prefetches.expire(monotonic)
        self._putting.expire(monotonic=monotonic)
        self._putting.sweep_quarantine()
        self._sweep_nodes(now)
        self._catalog.quotas.shrink()
        self._retry(monotonic)
        if monotonic >= self._segments_due:
            self._segments_due = monotonic + SEGMENTS_EVERY_SECONDS
            self._writeback.take_losses()
            for segment in self._catalog.segments.expired(self._catalog.retention, now):
                self._catalog.release_segment(segment, MissReason.EXPIRED)

    def _retry(self, monotonic: float) -> None:
        if monotonic >= self._retry_due:
            self._retry_due = monotonic + RETRY_EVERY_SECONDS
            self._writeback.retry()

    def _sweep_nodes(self, now: float) -> None:
        if not self._sweep:
            self._sweep = self._catalog.policy.nodes()
        batch = list(islice(self._sweep, SWEEP_NODES))
        del self._sweep[: len(batch)]
        self._catalog.expire_host(batch, now)
