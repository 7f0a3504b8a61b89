"""A walk over all runs that never holds the lock for long, and what is counted on such a walk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kvstore.core.catalog import Catalog
from kvstore.core.frames import Node
from kvstore.retention import DEFAULT_CLASS, ClassTable

BATCH_NODES, BATCH_SLEEPERS = 256, 64
"""As many take about half a millisecond under the lock."""
HOUR_SECONDS = 3600.0
Pause = Callable[[], None]


def no_pause() -> None:
    """Go on at once: for callers that nobody waits for."""


def sweep(
    lock: AbstractContextManager[object], catalog: Catalog, visit: Callable[[Node], None], *, pause: Pause
) -> None:
    """Visit every run, a batch under the lock at a time; of a frame asleep each slice, as a run without keys.
    Traffic between the batches goes on, so a run may be missed or change under way: good enough for a count.

    Threads: `pause` is called between batches without the lock, to let others have the interpreter.
    """
    with lock:
        nodes = [node for state in catalog.namespaces.values() for node in state.nodes()]
    for start in range(0, len(nodes), BATCH_NODES):
        with lock:
            for node in nodes[start : start + BATCH_NODES]:
                if node.count:
                    visit(node)
        pause()
    with lock:
        asleep = list(catalog.sleepers.of_spaces(catalog.namespaces.keys()))
    for start in range(0, len(asleep), BATCH_SLEEPERS):
        with lock:
            for node in catalog.sleepers.stand_ins(asleep[start : start + BATCH_SLEEPERS]):
                visit(node)
        pause()


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

    def __init__(self, before: ClassTable, after: ClassTable, *, now: float) -> None:
        self.effect = Effect()
        self._lives = tuple({name: c.ttl_seconds for name, c in t.classes.items()} for t in (before, after))
        self._now = now
        self._known: dict[Node, tuple[bool, bool]] = {}

    def visit(self, node: Node) -> None:
        """Count a run if the tables differ about it."""
        before, after = self._visible(node)
        if before != after:
            (self.effect.shows if after else self.effect.hides).add(node)

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


class Forecast:
    """Visits runs and counts what ends in which hour from now, if nothing is touched again.

    `hours[name][h]` ends in hour h, `expired` is hidden already, `later` ends after the last hour or never.
    """

    def __init__(self, catalog: Catalog, *, now: float, hours: int) -> None:
        self._retention = catalog.retention
        self._now = now
        self._count = hours
        self.hours: dict[str, dict[int, Amount]] = defaultdict(lambda: defaultdict(Amount))
        self.expired: dict[str, Amount] = defaultdict(Amount)
        self.later: dict[str, Amount] = defaultdict(Amount)

    def visit(self, node: Node) -> None:
        """Count a run."""
        name = self._retention.held_by(node.retention_class).name
        left = self._retention.end(node) - self._now
        if left <= 0:
            self.expired[name].add(node)
        elif left >= self._count * HOUR_SECONDS:
            self.later[name].add(node)
        else:
            self.hours[name][int(left // HOUR_SECONDS)].add(node)
