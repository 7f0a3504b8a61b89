"""What a decision asks for: the I/O and the news to send once the lock is released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.core.frames import Frame
from kvstore.tiers.base import FrameLocation

if TYPE_CHECKING:
    from kvstore.core.farewells import Farewell
    from kvstore.core.sleepers import Sleeper


class Barrier:
    """Asks the tier whether all before it is gone for good: it alone knows the remains of refused writes."""


@dataclass(slots=True)
class Plan:
    """Collected under the lock, carried out by the ladder outside it."""

    calls: list[Callable[[], None]] = field(default_factory=list)
    unlink: list[int] = field(default_factory=list)
    delete: list[FrameLocation] = field(default_factory=list)
    barriers: list[Barrier] = field(default_factory=list)
    touched: dict[Frame, None] = field(default_factory=dict)
    """Frames on SSD whose touches changed."""
    farewells: list[Farewell] = field(default_factory=list)
    """Frames that left asleep: the ledger hears of them before they are deleted."""
    wake: list[Sleeper] = field(default_factory=list)
    """Frames that have to be woken, soon."""
    is_urgent: bool = False
    """Somebody needs the room of a segment that goes."""

    @property
    def is_empty(self) -> bool:
        """Say whether nothing is asked for."""
        return not (
            self.calls
            or self.touched
            or self.unlink
            or self.delete
            or self.barriers
            or self.farewells
            or self.wake
        )

    def take(self) -> Plan:
        """Return what is collected and start afresh."""
        taken = replace(self)
        self.calls, self.unlink, self.delete, self.barriers, self.touched = [], [], [], [], {}
        self.farewells, self.wake, self.is_urgent = [], [], False
        return taken
