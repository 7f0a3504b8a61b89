"""Which node leaves first. Policies order nodes; the host residency code decides what of them may go."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvstore.core.eviction_density import HitDensity
from kvstore.core.frames import Node


class EvictionPolicy(Protocol):
    """An order over nodes with host-resident blocks. Paths are touched leaf first, so that ancestors
    outlive descendants.
    """

    def add(self, node: Node) -> None:
        """Learn of a node; no effect when it is known."""
        ...

    def touch(self, node: Node, *, is_read: bool) -> None:
        """Note a use of a known node: a read of it, or a write of it or of what follows it."""
        ...

    def split(self, head: Node, tail: Node) -> None:
        """A node was cut: the tail takes a place next to the head, to leave before it."""
        ...

    def join(self, kept: Node, gone: Node) -> None:
        """A node was merged into its parent, which has all its blocks now."""
        ...

    def leaving(self, node: Node, at: int) -> None:
        """A node's blocks from `at` on are about to leave the index; with 0 all, and `remove` follows."""
        ...

    def remove(self, node: Node) -> None:
        """Forget a node; no effect when it is unknown."""
        ...

    def expect(
        self, above: Node | None, names: Sequence[bytes], *, retention_class: str, now: float
    ) -> float:
        """Learn that a run will be written behind a node; returns what it is worth, to be compared with what
        is there. What is worth infinitely much displaces anything.
        """
        ...

    def refuse(self, above: Node | None, names: Sequence[bytes], at: int, *, retention_class: str) -> None:
        """Of what was expected just now the blocks from `at` on are not written."""
        ...

    def victims(self, bar: float = math.inf) -> Iterator[tuple[Node, int]]:
        """Yield nodes in the order in which they should leave, each with how many of its last blocks may
        leave now, as long as they are worth less than `bar`; callers may remove the one they were given.
        """
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


class _Link:
    """A node's place in the order: its older and newer neighbours."""

    __slots__ = ("newer", "node", "older")

    def __init__(self, node: Node | None) -> None:
        self.node = node
        self.older = self
        self.newer = self

    def put_before(self, newer: _Link) -> None:
        """Take the place on the older side of another link."""
        self.older, self.newer = newer.older, newer
        newer.older.newer = self
        newer.older = self

    def leave(self) -> None:
        """Give the place up."""
        self.older.newer, self.newer.older = self.newer, self.older


class _KnowsWhatIsThere:
    """An order that takes in whatever comes, and follows nothing that is not there."""

    def leaving(self, node: Node, at: int) -> None:
        """Blocks that leave are not followed."""

    def expect(
        self, above: Node | None, names: Sequence[bytes], *, retention_class: str, now: float
    ) -> float:
        """Whatever comes is taken in."""
        return math.inf

    def refuse(self, above: Node | None, names: Sequence[bytes], at: int, *, retention_class: str) -> None:
        """What is not written is not followed."""


class ExactLru(_KnowsWhatIsThere):
    """Least recently touched first, exactly as if every block were ordered on its own.

    Ancestors are touched after their descendants, and a split leaves the tail at its old place, so leaves
    leave first by construction. A list with places to cut in, which an OrderedDict does not have.
    """

    def __init__(self) -> None:
        self._ends = _Link(None)
        self._links: dict[Node, _Link] = {}

    def add(self, node: Node) -> None:
        """Put a new node at the recent end."""
        if node not in self._links:
            self._links[node] = link = _Link(node)
            link.put_before(self._ends)

    def touch(self, node: Node, *, is_read: bool) -> None:
        """Move a node to the recent end."""
        link = self._links.get(node)
        if link is not None:
            link.leave()
            link.put_before(self._ends)

    def split(self, head: Node, tail: Node) -> None:
        """Give the tail the place next to its head, on the older side."""
        if head in self._links:
            self._links[tail] = link = _Link(tail)
            link.put_before(self._links[head])

    def remove(self, node: Node) -> None:
        """Forget a node."""
        link = self._links.pop(node, None)
        if link is not None:
            link.leave()

    def join(self, kept: Node, gone: Node) -> None:
        """The node that is left takes the place of both at the recent end, or keeps its own."""
        if gone in self._links:
            self.remove(gone)
            self.add(kept)

    def victims(self, bar: float = math.inf) -> Iterator[tuple[Node, int]]:
        """Yield the least recent first; begins again at the old end when the present node was removed."""
        link = self._ends.newer
        while link.node is not None:
            yield link.node, link.node.count
            link = link.newer if self._links.get(link.node) is link else self._ends.newer

    def nodes(self) -> list[Node]:
        """Return all known nodes, least recent first."""
        found, link = [], self._ends.newer
        while link.node is not None:
            found.append(link.node)
            link = link.newer
        return found

    def __contains__(self, node: object) -> bool:
        return node in self._links

    def __len__(self) -> int:
        return len(self._links)


class S3Fifo(_KnowsWhatIsThere):
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

    def touch(self, node: Node, *, is_read: bool) -> None:
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

    def join(self, kept: Node, gone: Node) -> None:
        """The node that is left keeps its place, or is a newcomer."""
        if gone in self:
            self.remove(gone)
            self.add(kept)

    def victims(self, bar: float = math.inf) -> Iterator[tuple[Node, int]]:
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
                yield node, node.count
                if node in queue:
                    queue.move_to_end(node)

    def nodes(self) -> list[Node]:
        """Return all known nodes, small queue first."""
        return [*self._small, *self._main]

    def __contains__(self, node: object) -> bool:
        return node in self._small or node in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": ExactLru,
    "s3fifo": S3Fifo,
    "density": HitDensity,
}
"""By the names that settings and commands use."""
