"""Keeps book of a fetch: which blocks of which parts are copied and checked, how far all is good."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstore.layout import Layout
from kvstore.types import MissReason


class Delivery:
    """Blocks [first, end) of some parts, on their way into the caller's buffers; row 0 of those is `first`.

    Required parts must all arrive. Of side parts (trailing windows, checkpoints) only some blocks exist, so
    they cannot be waited for by count; a bad one shortens the prefix like any other.
    """

    def __init__(self, layout: Layout, parts: Iterable[int], end: int, *, first: int = 0) -> None:
        parts = tuple(parts)
        required = [part for part in parts if part in layout.required_parts]
        self.has_side_parts = len(required) < len(parts)
        self._there = {part: np.arange(end) < first for part in required}
        self.first = first
        self.limit = end
        self.reason: MissReason | None = None
        self.corrupt = False

    def arrive(self, part: int, start: int, stop: int) -> None:
        """Note blocks [start, stop) of a part as copied and checked."""
        if part in self._there:
            self._there[part][start:stop] = True

    def cut(self, block: int, reason: MissReason | None) -> None:
        """Note that block `block` will not come: nothing from it on is delivered."""
        if block < self.limit:
            self.limit, self.reason = block, reason
        self.corrupt = self.corrupt or reason is MissReason.CORRUPT

    def good(self) -> int:
        """Return the end of what is complete; below `first` when the prefix itself was cut."""
        reach = self.limit
        for there in self._there.values():
            missing = np.flatnonzero(~there[:reach])
            if len(missing):
                reach = int(missing[0])
        return reach

    def complete(self) -> bool:
        """Say whether every block up to the limit is there."""
        return self.good() == self.limit
