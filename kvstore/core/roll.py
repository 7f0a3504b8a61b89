"""The roll of an index: all its nodes, on shelves of a bounded size, so that nobody has to hold the lock
while looking at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from kvstore.core.frames import NOTHING, Node

SHELF_NODES = 256
"""To count so many takes about a third of a millisecond."""


class Roll:
    """Nodes come and go; one stays on its shelf for life."""

    def __init__(self) -> None:
        self._open: dict[Node, None] = {}
        self._shelves: dict[int, MutableMapping[Node, None]] = {0: self._open}
        self._number = 0
        self._count = 0

    def add(self, node: Node) -> None:
        """Take a node."""
        if len(self._open) >= SHELF_NODES:
            self._open = {}
            self._number += 1
            self._shelves = {number: shelf for number, shelf in self._shelves.items() if shelf}
            self._shelves[self._number] = self._open
        self._open[node] = None
        node.shelf = self._open
        self._count += 1

    def remove(self, node: Node) -> None:
        """Let a node go; no effect when it is not here."""
        if node in node.shelf:
            del node.shelf[node]
            node.shelf = NOTHING
            self._count -= 1

    def stretches(self) -> Iterator[list[Node]]:
        """Yield all nodes, a shelf at a time. Between two of them nodes may come and go: what came to a shelf
        after its turn is missed.
        """
        last = -1
        while numbers := [number for number in self._shelves if number > last]:
            for last in numbers:
                yield list(self._shelves.get(last, ()))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Node]:
        return iter([node for shelf in self._shelves.values() for node in shelf])
