"""Bytes written by day and class, and which of them the index does not know yet."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.retention import DAY
from kvstore.tiers.base import WrittenBytes
from kvstore.tiers.ssd.index_rows import FrameRow

Amounts = dict[tuple[int, str], int]
"""Bytes by day (UTC, counted from the epoch) and class."""


class WrittenDays:
    """Totals since the index was made. Threads: whoever uses it holds the keeper's lock."""

    def __init__(self, before: Mapping[tuple[int, str], int]) -> None:
        self._amounts: Amounts = dict(before)
        self._unsaved: Amounts = {}

    def add(self, rows: tuple[FrameRow, ...], *, wall: float) -> None:
        """Count frames that became durable."""
        for row in rows:
            key = (int(wall // DAY), row.retention_class)
            self._amounts[key] = self._unsaved[key] = self._amounts.get(key, 0) + row.length_bytes

    def take(self) -> Amounts:
        """Return the totals that have changed since the last call."""
        taken, self._unsaved = self._unsaved, {}
        return taken

    def put_back(self, taken: Amounts) -> None:
        """What was taken could not be saved."""
        self._unsaved = taken | self._unsaved

    def rows(self) -> list[WrittenBytes]:
        """Return all totals, the oldest day first."""
        return [WrittenBytes(day, name, amount) for (day, name), amount in sorted(self._amounts.items())]
