"""Walks over all runs that never hold the lock for long, and what is counted on such walks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvstore.core.beds import Floats, Names, Rows, apart
from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.frames import Node
from kvstore.retention import DEFAULT_CLASS, ClassTable

SEGMENTS_AT_ONCE = 16
"""What sleeps in as many is copied in a third of a millisecond."""
HOUR_SECONDS = 3600.0
Pause = Callable[[], None]
Lock = AbstractContextManager[object]


def no_pause() -> None:
    """Go on at once: for callers that nobody waits for."""


class Visitor(Protocol):
    """What counts runs."""

    def visit(self, node: Node) -> None:
        """Count a run that is awake, under the lock."""

    def visit_asleep(self, slices: Rows) -> None:
        """Count what sleeps, each slice of a frame as a run; without the lock. Shapes: SLICE[n]."""


def sweep(lock: Lock, catalog: Catalog, visitor: Visitor, *, pause: Pause) -> None:
    """Visit every run. Traffic between the stretches goes on, so a run may be missed or change under way:
    good enough for a count.

    Threads: `pause` is called between stretches without the lock, to let others have the interpreter.
    """
    sweep_awake(lock, catalog, visitor.visit, pause=pause)
    with lock:
        segments = list(catalog.segments)
    for start in range(0, len(segments), SEGMENTS_AT_ONCE):
        with lock:
            beds = [segment.bed for segment in segments[start : start + SEGMENTS_AT_ONCE]]
            found = [bed.slices() for bed in beds if bed.count]
        if found:
            visitor.visit_asleep(np.concatenate(found))
            pause()


def sweep_awake(lock: Lock, catalog: Catalog, visit: Callable[[Node], None], *, pause: Pause) -> None:
    """Visit every run that is awake."""
    with lock:
        states = list(catalog.namespaces.values())
    for nodes in stretches(lock, states):
        with lock:
            for node in nodes:
                if node.count:
                    visit(node)
        pause()


def stretches(lock: Lock, states: Iterable[NamespaceState]) -> Iterator[list[Node]]:
    """Yield the runs of some namespaces that are awake, some at a time; the lock is held to look for them
    only.
    """
    for state in states:
        waiting = state.stretches()
        while True:
            with lock:
                nodes = next(waiting, None)
            if nodes is None:
                break
            if nodes:
                yield nodes


@dataclass(slots=True)
class Amount:
    """So many runs, blocks, and bytes of blocks. Units: a block counts once, in however many tiers it is."""

    runs: int = 0
    blocks: int = 0
    bytes: int = 0

    def add(self, node: Node) -> None:
        """Count a run."""
        self.runs += 1
        self.blocks += node.count
        self.bytes += node_bytes(node)

    def add_asleep(self, slices: Rows, names: Names) -> None:
        """Count what sleeps."""
        self.runs += len(slices)
        for number, mine in apart(slices, "shape"):
            blocks = int(mine["blocks"].sum())
            self.blocks += blocks
            self.bytes += blocks * names.shapes[number].block_stride_bytes


def node_bytes(node: Node) -> int:
    """Return the bytes of a run's blocks."""
    return sum(piece.count * piece.frame.block_stride_bytes for piece in node.slices)


@dataclass(slots=True)
class Effect:
    """What another class table would hide of what is visible, and show of what has expired."""

    hides: Amount = field(default_factory=Amount)
    shows: Amount = field(default_factory=Amount)


class Comparison:
    """Visits runs and compares two class tables at one time.

    A run is visible while it and all before it live. Runs whose beginning is gone count like others: they
    are visible again when it returns.
    """

    def __init__(self, before: ClassTable, after: ClassTable, *, names: Names, now: float) -> None:
        self.effect = Effect()
        self._lives = tuple({name: c.ttl_seconds for name, c in t.classes.items()} for t in (before, after))
        self._names = names
        self._now = now
        self._known: dict[Node, tuple[bool, bool]] = {}

    def visit(self, node: Node) -> None:
        """Count a run if the tables differ about it."""
        before, after = self._visible(node)
        if before != after:
            (self.effect.shows if after else self.effect.hides).add(node)

    def visit_asleep(self, slices: Rows) -> None:
        """Count what the tables differ about of what sleeps; of what is before it nothing is known."""
        before, after = (
            self._now < slices["since"] + _by_class(lives, self._names)[slices["name"]]
            for lives in self._lives
        )
        self.effect.hides.add_asleep(slices[before & ~after], self._names)
        self.effect.shows.add_asleep(slices[after & ~before], self._names)

    def _visible(self, node: Node) -> tuple[bool, bool]:
        path: list[Node] = []
        item: Node | None = node
        while item is not None and item.count and item not in self._known:
            path.append(item)
            item = item.parent
        visible = self._known.get(item, (True, True)) if item is not None else (True, True)
        for item in reversed(path):
            before, after = (self._lives_now(item, lives) for lives in self._lives)
            visible = self._known[item] = (visible[0] and before, visible[1] and after)
        return visible

    def _lives_now(self, node: Node, lives: dict[str, float]) -> bool:
        seconds = lives.get(node.retention_class, lives[DEFAULT_CLASS])
        return self._now < node.since + seconds


def _by_class(lives: dict[str, float], names: Names) -> Floats:
    return np.array([lives.get(name, lives[DEFAULT_CLASS]) for name in names.classes], np.float64)


class Forecast:
    """Visits runs and counts what ends in which hour from now, if nothing is touched again.

    `hours[name][h]` ends in hour h, `expired` is hidden already, `later` ends after the last hour or never.
    """

    def __init__(self, catalog: Catalog, *, now: float, hours: int) -> None:
        self._retention = catalog.retention
        self._names = catalog.sleepers.names
        self._now = now
        self._count = hours
        self.hours: dict[str, dict[int, Amount]] = defaultdict(lambda: defaultdict(Amount))
        self.expired: dict[str, Amount] = defaultdict(Amount)
        self.later: dict[str, Amount] = defaultdict(Amount)

    def visit(self, node: Node) -> None:
        """Count a run."""
        left = min(self._retention.end(node) - self._now, self._count * HOUR_SECONDS)
        self._amount(node.retention_class, -1 if left <= 0 else int(left // HOUR_SECONDS)).add(node)

    def visit_asleep(self, slices: Rows) -> None:
        """Count what sleeps."""
        for number, mine in apart(slices, "name"):
            name = self._names.classes[number]
            left = mine["since"] + self._retention.held_by(name).ttl_seconds - self._now
            hours = np.where(left <= 0, -1, np.minimum(left, self._count * HOUR_SECONDS) // HOUR_SECONDS)
            for hour in np.unique(hours).tolist():
                self._amount(name, int(hour)).add_asleep(mine[hours == hour], self._names)

    def _amount(self, name: str, hour: int) -> Amount:
        """Return where is counted what ends in an hour; what has ended did so in hour -1."""
        name = self._retention.held_by(name).name
        if hour < 0:
            return self.expired[name]
        return self.hours[name][hour] if hour < self._count else self.later[name]
