"""Administration: what administrators change on a running ladder, and the counts to decide it by."""

from __future__ import annotations

from kvstore.core.oversight import Oversight
from kvstore.core.sweep import Comparison, Effect, Forecast, Pause, no_pause, sweep
from kvstore.retention import ClassTable, RetentionClass
from kvstore.types import Tier


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
