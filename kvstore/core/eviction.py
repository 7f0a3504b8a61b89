"""Which node leaves first. Policies order nodes; the host residency code decides what of them may go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from kvstore.core.frames import Node


class EvictionPolicy(Protocol):
    """An order over nodes with host-resident blocks. Paths are touched leaf first, so that ancestors
    outlive descendants.
    """

    def add(self, node: Node) -> None:
        """Learn of a node; no effect when it is known."""
        ...

    def touch(self, node: Node) -> None:
        """Note a use of a known node."""
        ...

    def split(self, head: Node, tail: Node) -> None:
        """A node was cut: the tail takes a place next to the head, to leave before it."""
        ...

    def remove(self, node: Node) -> None:
        """Forget a node; no effect when it is unknown."""
        ...

    def victims(self) -> Iterator[Node]:
        """Yield nodes in the order in which they should leave; callers may remove the one they were given."""
        ...

    def nodes(self) -> list[Node]:
        """Return all known nodes."""
        ...

    def __contains__(self, node: object) -> bool:
        """Say whether a node is known."""
        ...

    def __len__(self) -> int:
        """Return how many nodes are known."""
        ...


class ExactLru:
    """Least recently touched first. Ancestors are touched after their descendants, so leaves leave first by
    construction.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        """Put a new node at the recent end."""
        self._order.setdefault(node)

    def touch(self, node: Node) -> None:
        """Move a node to the recent end."""
        if node in self._order:
            self._order.move_to_end(node)

    def split(self, head: Node, tail: Node) -> None:
        """Re-insert the head behind its tail; both become recent, as a split comes with a touch of the
        head.
        """
        if head in self._order:
            self._order[tail] = None
            self._order.move_to_end(head)

    def remove(self, node: Node) -> None:
        """Forget a node."""
        self._order.pop(node, None)

    def victims(self) -> Iterator[Node]:
        """Yield the least recent first."""
        kept = 0
        while batch := list(islice(self._order, kept, kept + 32)):
            for node in batch:
                yield node
                kept += node in self._order

    def nodes(self) -> list[Node]:
        """Return all known nodes, least recent first."""
        return list(self._order)

    def __contains__(self, node: object) -> bool:
        return node in self._order

    def __len__(self) -> int:
        return len(self._order)


class S3Fifo:
    """S3-FIFO over nodes: a small queue for newcomers, a main queue for the reused, a ghost list of heads.

    Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
    """

    SMALL_SHARE = 0.1
    USES_MAX = 3

    def __init__(self, *, ghosts_max: int = 65536) -> None:
        self._small: OrderedDict[Node, int] = OrderedDict()
        self._main: OrderedDict[Node, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts_max = ghosts_max

    def add(self, node: Node) -> None:
        """Queue a newcomer in small, one that left small not long ago in main."""
        if node in self:
            return
        if node.head in self._ghosts:
            del self._ghosts[node.head]
            self._main[node] = 0
        else:
            self._small[node] = 0

    def touch(self, node: Node) -> None:
        """Count a use, at most three."""
        queue = self._main if node in self._main else self._small
        if node in queue:
            queue[node] = min(self.USES_MAX, queue[node] + 1)

    def split(self, head: Node, tail: Node) -> None:
        """The tail inherits the uses of the head."""
        queue = self._main if head in self._main else self._small
        if head in queue:
            queue[tail] = queue[head]

    def remove(self, node: Node) -> None:
        """Forget a node; its head is remembered as a ghost when it leaves from small."""
        if self._small.pop(node, None) is not None and node.slices:
            self._ghosts[node.head] = None
            while len(self._ghosts) > self._ghosts_max:
                self._ghosts.popitem(last=False)
        self._main.pop(node, None)

    def victims(self) -> Iterator[Node]:
        """Yield from small while it holds more than its share, reused nodes moving to main; then from main
        by second chance.
        """
        for _ in range((self.USES_MAX + 2) * (len(self) + 1)):
            from_small = self._small and len(self._small) >= self.SMALL_SHARE * len(self)
            queue = self._small if from_small else (self._main or self._small)
            if not queue:
                return
            node, uses = next(iter(queue.items()))
            if queue is self._small and uses > 0:
                del self._small[node]
                self._main[node] = 0
            elif uses > 0:
                del queue[node]
                queue[node] = uses - 1
            else:
                yield node
                if node in queue:
                    queue.move_to_end(node)

    def nodes(self) -> list[Node]:
        """Return all known nodes, small queue first."""
        return [*self._small, *self._main]

    def __contains__(self, node: object) -> bool:
        return node in self._small or node in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)
