"""Retention classes: how long each kind of traffic deserves to stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from kvstore.errors import InvalidArgument
from kvstore.types import Admission, Tier, TtlMode

HOUR = 3600.0
DAY = 24 * HOUR


@dataclass(frozen=True, slots=True)
class RetentionClass:
    """A traffic class and the life it gives to the blocks it touches.

    Units: ttl_seconds is wall time, math.inf means "until evicted"; quota_bytes 0 means no quota.
    """

    name: str
    ttl_seconds: float
    mode: TtlMode = TtlMode.SLIDING
    lowest_tier: Tier = Tier.SSD
    quota_bytes: int = 0
    admission: Admission = Admission.FIRST

    def end(self, *, touched_at: float, written_at: float) -> float:
        """Return the wall time at which a run held by this class expires."""
        return (touched_at if self.mode is TtlMode.SLIDING else written_at) + self.ttl_seconds

    @property
    def reaches_ssd(self) -> bool:
        """Say whether blocks of this class may leave host memory."""
        return self.lowest_tier in (Tier.SSD, Tier.SHARED)


SHIPPED_CLASSES: tuple[RetentionClass, ...] = (
    RetentionClass("agent", 3 * DAY),
    RetentionClass("chat", 7 * DAY),
    RetentionClass("batch", 1 * HOUR),
    RetentionClass("system", 30 * DAY),
    RetentionClass("handoff", 60.0, TtlMode.FIXED, Tier.HOST),
    RetentionClass("swa", 180.0, TtlMode.SLIDING, Tier.HOST),
)
DEFAULT_CLASS = "agent"

UNDO_SECONDS = 600.0
"""So long a change can be undone, and what it hid is not removed for its sake."""
CHANGES_MAX = 64


@dataclass(frozen=True, slots=True)
class ClassChange:
    """What a class was and what it became at a wall time, while the store ran."""

    before: RetentionClass
    after: RetentionClass
    at: float


@dataclass(frozen=True, slots=True)
class ClassTable:
    """The classes in force, and the changes that can still be undone, oldest first. A value: every change
    makes a new one.
    """

    classes: Mapping[str, RetentionClass]
    changes: tuple[ClassChange, ...] = ()

    @classmethod
    def of(cls, classes: Iterable[RetentionClass], *, changes: tuple[ClassChange, ...] = ()) -> Self:
        """Return a table.

        Errors: InvalidArgument when the default class is missing.
        """
        table = {c.name: c for c in classes}
        if DEFAULT_CLASS not in table:
            raise InvalidArgument(f"classes: {DEFAULT_CLASS!r} must be among them, got {sorted(table)}")
        return cls(table, changes)

    def named(self, name: str) -> RetentionClass:
        """Return a class by name; empty means the default.

        Errors: InvalidArgument naming the known classes.
        """
        found = self.classes.get(name or DEFAULT_CLASS)
        if found is None:
            known = ", ".join(sorted(self.classes))
            raise InvalidArgument(f"retention class {name!r} is unknown; known: {known}")
        return found

    def changed(self, after: RetentionClass, *, at: float) -> ClassTable:
        """Return the table with a class changed.

        Errors: InvalidArgument: an unknown class, nothing to change, too many changes at a time.
        """
        before = self.named(after.name)
        if before == after:
            raise InvalidArgument(f"retention class {after.name!r} is like that already: nothing changes")
        recent = self.recent(at)
        if len(recent) >= CHANGES_MAX:
            raise InvalidArgument(
                f"retention: the limit is {CHANGES_MAX} changes in {UNDO_SECONDS:.0f} s, got one more"
            )
        return ClassTable({**self.classes, after.name: after}, (*recent, ClassChange(before, after, at)))

    def undone(self, name: str, *, at: float) -> ClassTable:
        """Return the table without the latest change, with a name without the latest of that class.

        Errors: InvalidArgument when none is young enough.
        """
        recent = self.recent(at)
        last = next((c for c in reversed(recent) if name in ("", c.after.name)), None)
        if last is None:
            whose = f"of class {name!r} " if name else ""
            raise InvalidArgument(
                f"retention: no change {whose}in the last {UNDO_SECONDS:.0f} s, so nothing to undo"
            )
        kept = tuple(change for change in recent if change is not last)
        return ClassTable({**self.classes, last.before.name: last.before}, kept)

    def recent(self, now: float) -> tuple[ClassChange, ...]:
        """Return the changes that can be undone now."""
        return tuple(change for change in self.changes if now - change.at < UNDO_SECONDS)

    def keep_seconds(self, name: str, now: float) -> float:
        """Return how long after its touch a block is kept: its life, or a longer one that an undo would
        bring back.
        """
        lives = [c.before.ttl_seconds for c in self.recent(now) if c.before.name == name]
        return max(self.classes[name].ttl_seconds, *lives) if lives else self.classes[name].ttl_seconds
