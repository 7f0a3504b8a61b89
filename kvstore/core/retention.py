"""Who stays how long: class lookup, expiry, and a wall clock that does not jump."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from kvstore.clock import Clock
from kvstore.core.frames import Node
from kvstore.retention import DEFAULT_CLASS, ClassTable, RetentionClass
from kvstore.types import MissReason, TtlMode

SLEW = 0.05
"""A corrected clock is followed by at most this share of the time that really passed."""
JUMP_SECONDS = 5.0


class Touch(Enum):
    """How a run is touched: by a read, by a write of its own blocks, or by a write of what follows it."""

    READ = auto()
    WRITE = auto()
    BELOW = auto()


class SteadyWall:
    """Wall time for TTLs: follows the system's wall clock, but a jump is taken up slowly.

    A clock set forward must not expire the store at once, one set back must not make it immortal.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now = clock.wall()
        self._at = clock.monotonic()

    def now(self) -> float:
        """Return seconds since the epoch, monotonic within a process."""
        at, wall = self._clock.monotonic(), self._clock.wall()
        passed = max(0.0, at - self._at)
        expected = self._now + passed
        error = wall - expected
        if abs(error) > JUMP_SECONDS:
            error = max(-SLEW * passed, min(SLEW * passed, error))
        self._at = at
        self._now = max(self._now, expected + error)
        return self._now


class Retention:
    """The class table and what follows from it. Expiry is derived, never stored: changing a TTL costs
    nothing.
    """

    def __init__(self, table: ClassTable, wall: SteadyWall) -> None:
        self.table = table
        self.classes: Mapping[str, RetentionClass] = table.classes
        self._wall = wall

    def adopt(self, table: ClassTable) -> None:
        """Let another table be in force from now on."""
        self.table, self.classes = table, table.classes

    def now(self) -> float:
        """Return the steady wall time."""
        return self._wall.now()

    def named(self, name: str) -> RetentionClass:
        """Return a class by name; empty means the default.

        Errors: InvalidArgument naming the known classes.
        """
        return self.table.named(name)

    def held_by(self, name: str) -> RetentionClass:
        """Return the class of stored data; data of a class that is no longer configured lives by the
        default.
        """
        return self.classes.get(name) or self.classes[DEFAULT_CLASS]

    def end(self, node: Node) -> float:
        """Return when a node expires."""
        return node.since + self.held_by(node.retention_class).ttl_seconds

    def alive(self, node: Node, now: float) -> bool:
        """Say whether a node is still visible."""
        return now < self.end(node)

    def may_go(self, node: Node, now: float) -> bool:
        """Say whether a node may be removed for its age: it has expired, and no undo would show it again."""
        return now >= node.since + self.keep_seconds(node.retention_class, now)

    def left_at(self, end: float, reason: MissReason) -> float:
        """Return since when what is removed now, and expires at its end, is gone: from then on if it has."""
        return min(end, self.now()) if reason is MissReason.EXPIRED else self.now()

    def keep_seconds(self, name: str, now: float) -> float:
        """Return how long after its touch stored data of a class is kept."""
        return self.table.keep_seconds(self.held_by(name).name, now)

    def touch(self, node: Node, *, by: str, now: float, how: Touch) -> None:
        """Let a class touch a node: the class whose touch ends last holds it. A fixed life counts from the
        write: no read renews it, and a write of what follows only hands the node to another class.
        """
        toucher = self.held_by(by or node.retention_class)
        is_same = toucher.name == node.retention_class
        if toucher.mode is TtlMode.FIXED and (how is Touch.READ or (how is Touch.BELOW and is_same)):
            return
        is_dead_write = how is Touch.WRITE and not self.alive(node, now)
        if is_dead_write or now + toucher.ttl_seconds >= self.end(node):
            node.retention_class = toucher.name
            node.since = now
