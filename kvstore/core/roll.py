"""The roll of an index: all its nodes, on shelves of a bounded size, so that nobody has to hold the lock
while looking at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.core.frames import Node
from kvstore.tiers.base import marks_of

SHELF_NODES = 256
"""To count so many takes about a third of a millisecond."""
MARKS_BYTES = 32 << 10


class Shelf:
    """Some nodes, and the marks of all blocks that they have, among others that they had."""

    __slots__ = ("_marks", "_marks_bytes_max", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[Node, None] = {}
        self._marks = bytearray()
        self._marks_bytes_max = MARKS_BYTES

    def note(self, keys: bytes) -> None:
        """A node has these blocks from now on."""
        self._marks += marks_of(keys).tobytes()
        if len(self._marks) > self._marks_bytes_max:
            # Runs are cut and joined again all the time: their marks come each time.
            self._marks = bytearray(marks_of(b"".join([node.keys for node in self.nodes])).tobytes())
            self._marks_bytes_max = 2 * len(self._marks) + MARKS_BYTES

    def may_hold(self, mark: int) -> bool:
        """Say whether one of the nodes may have a block with a mark."""
        return bool((np.frombuffer(self._marks, np.uint32) == mark).any())


class Roll:
    """Nodes come and go; one stays on its shelf for life."""

    def __init__(self) -> None:
        self._open = Shelf()
        self._shelves: dict[int, Shelf] = {0: self._open}
        self._number = 0
        self._count = 0

    def add(self, node: Node) -> None:
        """Take a node."""
        if len(self._open.nodes) >= SHELF_NODES:
            self._open = Shelf()
            self._number += 1
            self._shelves = {number: shelf for number, shelf in self._shelves.items() if shelf.nodes}
            self._shelves[self._number] = self._open
        self._open.nodes[node] = None
        self._open.note(node.keys)
        node.shelf = self._open
        self._count += 1

    def remove(self, node: Node) -> None:
        """Let a node go; no effect when it is not here."""
        if node.shelf is not None:
            del node.shelf.nodes[node]
            node.shelf = None
            self._count -= 1

    def stretches(self) -> Iterator[list[Node]]:
        """Yield all nodes, a shelf at a time. Between two of them nodes may come and go: what came to a shelf
        after its turn is missed.
        """
        last = -1
        while numbers := [number for number in self._shelves if number > last]:
            for last in numbers:
                if shelf := self._shelves.get(last):
                    yield list(shelf.nodes)

    def holding(self, key: bytes) -> Iterator[Node]:
        """Yield the nodes that may have a block: all on the shelves that may hold it."""
        mark = int(marks_of(key)[0])
        for shelf in self._shelves.values():
            if shelf.nodes and shelf.may_hold(mark):
                yield from shelf.nodes

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Node]:
        return iter([node for shelf in self._shelves.values() for node in shelf.nodes])
