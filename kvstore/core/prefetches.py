"""Prefetch: promotion ahead of a fetch, while a request waits in an engine's queue. It has a deadline and
can be cancelled.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.api import NO_SESSION, PrefetchAnswer
from kvstore.core.limits import Limits
from kvstore.core.loads import Load, Loads
from kvstore.core.matching import Found
from kvstore.core.shares import Share
from kvstore.errors import InvalidArgument, Overloaded
from kvstore.types import MissReason


class Prefetch:
    """One prefetch: how many loads it still waits for, and until when."""

    def __init__(self, number: int, *, deadline: float, tenant: str = "", session: int = NO_SESSION) -> None:
        self.number = number
        self.session = session
        self.tenant = tenant
        self.deadline = deadline
        self.waiting = 0

    def arrived(self, load: Load, position: int) -> None:
        """A prefetch waits for whole blocks."""

    def loaded(self, load: Load, good: int, reason: MissReason | None) -> None:
        """A load came back, well or not: a prefetch promises nothing."""
        self.waiting -= 1


class PrefetchTable:
    """All prefetches under way."""

    def __init__(self, loads: Loads, limits: Limits, *, new_number: Callable[[], int]) -> None:
        self._loads = loads
        self._limits = limits
        self._new_number = new_number
        self._living: dict[int, Prefetch] = {}
        self._share = Share("prefetches", limit=limits.session_prefetches_max)

    def start(
        self,
        found: Found,
        *,
        deadline_seconds: float,
        monotonic: float,
        tenant: str = "",
        session: int = NO_SESSION,
    ) -> PrefetchAnswer:
        """Queue loads for what is not resident, behind all fetches.

        Errors: Overloaded at the limits; InvalidArgument on a deadline that is not positive.
        """
        if not deadline_seconds > 0:
            raise InvalidArgument(f"prefetch: deadline_seconds must be positive, got {deadline_seconds}")
        if len(self._living) >= self._limits.prefetches_max:
            raise Overloaded(
                f"prefetch: {len(self._living)} are under way, the limit is {self._limits.prefetches_max}"
            )
        self._share.check(session)
        deadline = monotonic + deadline_seconds
        prefetch = Prefetch(self._new_number(), deadline=deadline, tenant=tenant, session=session)
        resident = sum(
            int(np.count_nonzero(item.frame.resident(item.start, item.count))) for item in found.items
        )
        prefetch.waiting = self._loads.want(
            [(item.frame, item.start, item.count) for item in found.items + found.side],
            prefetch,
            urgent=False,
        )
        if prefetch.waiting:
            self._living[prefetch.number] = prefetch
            self._share.take(session)
        number = prefetch.number if prefetch.waiting else 0
        return PrefetchAnswer(
            prefetch=number,
            blocks=found.blocks,
            resident=resident,
            loading=found.blocks - resident,
            reason=found.reason,
        )

    def tenant(self, number: int) -> str | None:
        """Return whose prefetch that is, None when it is over."""
        prefetch = self._living.get(number)
        return None if prefetch is None else prefetch.tenant

    def cancel(self, number: int) -> bool:
        """Give up a prefetch; loads that nobody else waits for and that are not under way are dropped."""
        prefetch = self._living.pop(number, None)
        if prefetch is None:
            return False
        self._share.give(prefetch.session)
        self._loads.leave(prefetch)
        return True

    def end_session(self, session: int) -> None:
        """A client is gone: nobody waits for what it asked for."""
        for prefetch in [p for p in self._living.values() if p.session == session]:
            self.cancel(prefetch.number)

    def expire(self, monotonic: float) -> None:
        """Give up prefetches whose deadline has passed, forget those that are done."""
        for prefetch in list(self._living.values()):
            if prefetch.deadline <= monotonic or not prefetch.waiting:
                self.cancel(prefetch.number)

    def __len__(self) -> int:
        return len(self._living)
