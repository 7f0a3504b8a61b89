"""Administration: what administrators change on a running ladder, and the counts to decide it by."""

from __future__ import annotations

from dataclasses import replace

from kvstore.api import RunInfo
from kvstore.core.asked import Asked
from kvstore.core.frames import Node
from kvstore.core.hitrate import Cell, Key, summed
from kvstore.core.ledger import Departed, LedgerImage
from kvstore.core.oversight import Oversight
from kvstore.core.report import run_info
from kvstore.core.sweep import Comparison, Effect, Forecast, Pause, no_pause, sweep
from kvstore.retention import ClassTable, RetentionClass
from kvstore.types import Fingerprint, MissReason, Tier, split_keys

PRESENT_MAX = 16
IMAGE_ENTRIES = 1 << 14


class Administration(Oversight):
    """The class table in force and what follows from another one.

    Threads: any; walks hold the lock for a batch of runs at a time and call `pause` between batches.
    """

    def class_table(self) -> ClassTable:
        """Return the class table in force."""
        with self._lock:
            return self._retention.table

    def wall(self) -> float:
        """Return the steady wall time that lives are judged by."""
        with self._lock:
            return self._retention.now()

    def adopt(self, table: ClassTable) -> None:
        """Let another class table be in force. What it hides stays for UNDO_SECONDS unless room is needed."""
        with self._decision():
            self._retention.adopt(table)

    def effect(self, table: ClassTable, *, pause: Pause = no_pause) -> Effect:
        """Count what a class table would hide and show now; changes nothing."""
        with self._lock:
            comparison = Comparison(self._retention.table, table, now=self._retention.now())
        sweep(self._lock, self._catalog, comparison.visit, pause=pause)
        return comparison.effect

    def over_quota(self, wanted: RetentionClass) -> dict[Tier, int]:
        """Return by how many bytes a class is above what a quota would allow, by tier: those would leave."""
        with self._lock:
            held = self._catalog.quotas.held_bytes(wanted.name)
        quota = wanted.quota_bytes
        return {tier: max(0, size - quota) if quota else 0 for tier, size in held.items()}

    def forecast(self, *, hours: int, pause: Pause = no_pause) -> Forecast:
        """Count what expires in each of the next hours if nothing is touched again."""
        with self._lock:
            forecast = Forecast(self._catalog, now=self._retention.now(), hours=hours)
        sweep(self._lock, self._catalog, forecast.visit, pause=pause)
        return forecast

    # The recent past

    def hit_rates(self, seconds: float) -> dict[Key, Cell]:
        """Return what was asked for and delivered in the last so many seconds, by namespace and class."""
        with self._lock:
            stretches = self._asked.rates.within(seconds, monotonic=self._clock.monotonic())
        return summed(stretches)

    def request(self, owner: str) -> Asked | None:
        """Return what came of the latest match of an owner, None when it is not remembered."""
        with self._lock:
            found = self._asked.request(owner)
            return None if found is None else replace(found)

    def present(
        self, hash_prefix: bytes, *, pause: Pause = no_pause
    ) -> list[tuple[Fingerprint, bytes, RunInfo]]:
        """Return the runs that hold a block whose hash starts so, each with its namespace and that hash."""
        found: list[tuple[Fingerprint, bytes, RunInfo]] = []

        def visit(node: Node) -> None:
            if hash_prefix in node.keys and len(found) < PRESENT_MAX:
                for key in split_keys(node.keys):
                    if key.startswith(hash_prefix):
                        found.append((node.slices[0].frame.fingerprint, key, run_info(self._catalog, node)))
                        return

        sweep(self._lock, self._catalog, visit, pause=pause)
        return found

    def departed(self, key: bytes) -> list[tuple[Fingerprint, MissReason, Departed | None]]:
        """Return per namespace why a block is not there; the first 8 bytes of its hash are enough."""
        with self._lock:
            ledger = self._catalog.ledger
            return [
                (space, ledger.reason(key, space=space), ledger.look(key, space=space))
                for space in self._catalog.namespaces
            ]

    # The ledger across restarts

    @property
    def departures(self) -> int:
        """How often something has left: whether the ledger is worth writing again."""
        return self._catalog.ledger.notes

    def ledger_image(self) -> LedgerImage:
        """Return the ledger as it is to be kept, copied a stretch at a time."""
        ledger = self._catalog.ledger
        parts = []
        for start in range(0, len(ledger), IMAGE_ENTRIES):
            with self._lock:
                parts.append(ledger.image(start, IMAGE_ENTRIES))
        with self._lock:
            return ledger.whole(parts)

    def restore_ledger(self, image: LedgerImage) -> bool:
        """Take over a ledger that was kept; says whether it fits. Before the first verb only."""
        with self._lock:
            return self._catalog.ledger.restore(image)

    def forget_unknown(self) -> None:
        """Blocks that the ledger does not know are `forgotten` from now on: it may lack some that left."""
        with self._lock:
            self._catalog.ledger.forget_all()

    def has_unwritten(self) -> bool:
        """Say whether blocks lie in host memory alone: an end would lose them."""
        with self._lock:
            return any(
                piece.frame.location is None
                for state in self._catalog.namespaces.values()
                for node in state.nodes()
                for piece in node.slices
            )
