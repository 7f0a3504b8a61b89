"""Deletions that the disk has not confirmed yet, and the purges that wait for them.

A purge is over when no restart can bring its blocks back: the writes that were under way have ended, and the
disk has confirmed every deletion of the namespace. What it refuses it is asked again, until it obeys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping

from kvstore.core.plan import Barrier, Plan
from kvstore.tiers.base import FrameLocation
from kvstore.types import Fingerprint

Grave = FrameLocation | int | Barrier
"""A frame, a whole segment by its number, or a barrier."""


class _Purge:
    """One purge: the writes it waits for, then the graves."""

    __slots__ = ("deadline", "done", "graves", "namespace", "writes")

    def __init__(
        self, namespace: Fingerprint, writes: set[Hashable], deadline: float, done: Callable[[bool], None]
    ) -> None:
        self.namespace = namespace
        self.writes = writes
        self.graves: set[Grave] = set()
        self.deadline = deadline
        self.done = done


class Graves:
    """What SSD was asked to forget. Guarded by the ladder's lock."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._open: dict[Grave, frozenset[Fingerprint]] = {}
        self._refused: dict[Grave, None] = {}
        self._purges: list[_Purge] = []

    def bury(self, location: FrameLocation, namespace: Fingerprint) -> None:
        """Have a frame deleted."""
        self._open[location] = frozenset((namespace,))
        self._plan.delete.append(location)

    def bury_all(self, graves: Mapping[FrameLocation, Fingerprint]) -> None:
        """Have several frames deleted."""
        for location, namespace in graves.items():
            self.bury(location, namespace)

    def bury_segment(
        self, segment: int, namespaces: Iterable[Fingerprint], *, is_urgent: bool = True
    ) -> None:
        """Have a whole segment removed; in passing, unless its room is needed."""
        self._open[segment] = frozenset(namespaces)
        self._plan.unlink.append(segment)
        self._plan.is_urgent |= is_urgent

    def confirmed(self, graves: Iterable[Grave]) -> None:
        """The tier has deleted these for good."""
        closed = set(graves)
        for grave in closed:
            self._open.pop(grave, None)
            self._refused.pop(grave, None)
        for purge in self._purges:
            purge.graves -= closed
        self._end([purge for purge in self._purges if not purge.writes and not purge.graves], durable=True)

    def refused(self, graves: Collection[Grave]) -> None:
        """The tier could not delete all of these: it is asked again, and who waits for them hears of it."""
        self._refused.update((grave, None) for grave in graves if grave in self._open)
        self._end([purge for purge in self._purges if not purge.graves.isdisjoint(graves)], durable=False)

    def written(self, write: Hashable) -> None:
        """A write has ended; if blocks of it had left meanwhile, what came of it is in its grave."""
        for purge in self._purges:
            if write in purge.writes:
                purge.writes.discard(write)
                if not purge.writes:
                    self._ask(purge)

    def wait(
        self, namespace: Fingerprint, writes: set[Hashable], *, deadline: float, done: Callable[[bool], None]
    ) -> None:
        """Have a purge told when nothing of its namespace that was deleted can come back: after the `writes`
        under way that hold some of it. `done` hears False at the deadline, or when the disk refuses.
        """
        purge = _Purge(namespace, writes, deadline, done)
        self._purges.append(purge)
        self.retry(namespace)
        if not purge.writes:
            self._ask(purge)

    def _ask(self, purge: _Purge) -> None:
        """All writes that a purge had to wait for have ended: what is open now is all there will be."""
        barrier = Barrier()
        self._open[barrier] = frozenset((purge.namespace,))
        self._plan.barriers.append(barrier)
        purge.graves = {grave for grave, spaces in self._open.items() if purge.namespace in spaces}

    def retry(self, namespace: Fingerprint | None = None) -> None:
        """Ask again for what was refused, of one namespace or of all."""
        for grave in [g for g in self._refused if namespace is None or namespace in self._open[g]]:
            del self._refused[grave]
            if isinstance(grave, int):
                self._plan.unlink.append(grave)
                self._plan.is_urgent = True
            elif isinstance(grave, Barrier):
                self._plan.barriers.append(grave)
            else:
                self._plan.delete.append(grave)

    def expire(self, monotonic: float) -> None:
        """Nobody waits longer for a disk than until the deadline."""
        self._end([purge for purge in self._purges if purge.deadline <= monotonic], durable=False)

    def _end(self, purges: Collection[_Purge], *, durable: bool) -> None:
        for purge in purges:
            self._purges.remove(purge)
            self._plan.calls.append(lambda done=purge.done: done(durable))  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._open)
