"""Oversight: what administrators and tools ask of a running ladder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from kvstore.api import ListAnswer, RunInfo, StatusSnapshot
from kvstore.core import report
from kvstore.core.catalog import NamespaceState
from kvstore.core.searching import ADMIN_SECONDS, Described
from kvstore.core.sleepers import RunsAsleep, Sleeper
from kvstore.core.sweep import Pause, no_pause, stretches, sweep_awake
from kvstore.core.verifying import VerifyStep, verify
from kvstore.core.wiring import Wiring
from kvstore.tiers.base import SegmentInfo
from kvstore.types import PAGE_BYTES, Fingerprint, MissReason, split_keys

WAKE_AT_ONCE = 16
"""As many wake in a millisecond or two under the lock."""


class Oversight(Wiring):
    """Listing, inspection, verification and totals; none of it touches or counts anything."""

    def list(self, namespace: Fingerprint, *, cursor: str = "", limit: int = 100) -> ListAnswer:
        """Return one page of a namespace's runs."""
        with self._lock:
            state = self._catalog.state(namespace)
        page = report.Page(self._catalog, after=report.place_of(cursor, limit=limit), limit=limit)
        for nodes in stretches(self._lock, [state]):
            with self._lock:
                page.take(nodes)
        described = self._search.described(self._search.after(namespace, page.after, limit=limit + 1))
        for start in range(0, len(described), report.RUNS_AT_ONCE):
            with self._lock:
                page.take(report.stand_ins(self._catalog, described[start : start + report.RUNS_AT_ONCE]))
        return page.answer(self._lock)

    def inspect(
        self, namespace: Fingerprint, *, keys: bytes = b"", hash_prefix: bytes = b"", limit: int = 100
    ) -> tuple[tuple[RunInfo, ...], int, MissReason | None]:
        """Return the runs behind the keys of a prompt, or those with a hash; how many blocks are visible,
        and why no more.
        """
        if keys:
            self._check_keys(keys)
            return self._when_awake(lambda: self._inspect(namespace, keys, limit))
        with self._lock:
            state = self._catalog.state(namespace)
        return tuple(run for _, _, run in self._present([state], hash_prefix, limit=limit)), 0, None

    def _present(
        self, states: Collection[NamespaceState], hash_prefix: bytes, *, limit: int, pause: Pause = no_pause
    ) -> report.Present:
        """Return runs that hold a block whose hash starts so."""
        found: report.Present = []
        for nodes in stretches(self._lock, states):
            with self._lock:
                report.find_runs(self._catalog, nodes, found, hash_prefix=hash_prefix, limit=limit)
            pause()
        described = self._holding([state.fingerprint for state in states], hash_prefix, limit=limit)
        with self._lock:
            shadows = report.stand_ins(self._catalog, described)
            report.find_runs(self._catalog, shadows, found, hash_prefix=hash_prefix, limit=limit)
        return found

    def _inspect(
        self, namespace: Fingerprint, keys: bytes, limit: int
    ) -> tuple[tuple[RunInfo, ...], int, MissReason | None]:
        with self._lock:
            state = self._catalog.state(namespace)
            now = self._retention.now()
            found = self._matcher.find(state, keys, now=now, exact_only=False, undeclared=True)
            path = [node for node, _ in state.runs.walk(keys, undeclared=True)]
            nodes = path if not state.flat else list(found.loose.values())
            return (
                tuple(report.run_info(self._catalog, node) for node in nodes[:limit]),
                found.blocks,
                found.reason,
            )

    def _wake(self, sleepers: Sequence[Sleeper]) -> None:
        """Wake frames for an administrator, who has time."""
        with self._lock:
            wanted = self._catalog.sleepers.wanted(sleepers)
        for start in range(0, len(wanted), WAKE_AT_ONCE):
            self._alarm.wait(RunsAsleep(wanted[start : start + WAKE_AT_ONCE]), seconds=ADMIN_SECONDS)

    def _holding(
        self, spaces: Collection[Fingerprint], hash_prefix: bytes, *, limit: int
    ) -> Sequence[Described]:
        """Return frames asleep that hold a block whose hash starts so."""

        def holds(keys: bytes) -> bool:
            return hash_prefix in keys and any(key.startswith(hash_prefix) for key in split_keys(keys))

        return self._search.by_keys(spaces, holds, limit=limit)

    def verify(self, namespace: Fingerprint | None = None) -> Iterator[VerifyStep]:
        """Re-read and check every digest in every tier; blocking, for an administrator's thread."""
        with self._lock:
            states = [self._catalog.state(namespace)] if namespace else [*self._catalog.namespaces.values()]
        return verify(self._catalog, self._ssd, self._decision, states, search=self._search, wake=self._wake)

    def status(self, *, pause: Pause = no_pause) -> StatusSnapshot:
        """Return totals by tier, class and namespace, counters and gauges; `pause` as in a sweep: what is
        awake is walked.
        """
        totals = report.Totals()
        sweep_awake(self._lock, self._catalog, totals.visit, pause=pause)
        with self._lock:
            totals.add_asleep(self._catalog.sleepers)
            return report.status(self._catalog, self._ssd, self.gauges(), totals)

    def gauges(self) -> dict[str, float]:
        """Return the present levels, cheaply."""
        with self._lock:
            return {
                "kvstore_leases": len(self._leases),
                "kvstore_reservations": len(self._putting),
                "kvstore_prefetches": len(self._prefetches),
                "kvstore_quarantined_slots": self._putting.quarantined_slots,
                "kvstore_write_queue_bytes": self._writeback.queued_bytes + self._writeback.in_flight_bytes,
                "kvstore_loads_in_flight": self._loads.in_flight,
                "kvstore_loads_queued": self._loads.queued,
                "kvstore_host_used_bytes": self._catalog.slabs.used_pages * PAGE_BYTES,
                "kvstore_ssd_used_bytes": self._catalog.segments.used_bytes,
                "kvstore_nodes": sum(len(s.runs) for s in self._catalog.namespaces.values()),
                "kvstore_frames_asleep": self._catalog.sleepers.count,
                "kvstore_segments": len(self._catalog.segments),
                "kvstore_deletions_pending": len(self._catalog.graves),
            }

    def segments(self) -> Sequence[SegmentInfo]:
        """Return the SSD tier's segments."""
        return self._ssd.segments() if self._ssd is not None else []
