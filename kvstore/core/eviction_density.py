"""Hit density: what is worth least per block leaves first, by what was learned of traffic like it.

Knows chains: how many requests built a session, how long it pauses, what many sessions share, the last block
of a request (often cut short and never read again), and branches that a session left behind. Knows classes:
each learns of its own traffic. Every node stands in a cell of its kind and age; the cell of least worth gives
first, and of a chain the leaf.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvstore.core.frames import Node
from kvstore.core.reuse import (
    AGE_STARTS,
    AGES,
    BODIES,
    LEFT_BEHIND,
    SHARED,
    TAIL,
    Birth,
    ReuseTable,
    age_of,
    body_kind,
)
from kvstore.types import key_at

SHARED_CHILDREN = 4
"""What so many continue belongs to none of them."""
LEARN_EVERY_PATHS = 256
CHILDREN_ASKED = 64
FRESH = body_kind(0, -1.0)
CellName = tuple[str, int, int]
"""Retention class, kind, age."""


@dataclass(slots=True, eq=False)
class _Place:
    """What is known of a node: its births (of the body, and of the last block when a request ended there),
    which request used it last, how many requests built it, its cells, and the key of what left behind it.
    """

    node: Node
    body: Birth
    tail: Birth | None
    blocks: int
    path: int
    depth: int
    body_cell: CellName | None = None
    tail_cell: CellName | None = None
    gone: bytes = b""

    @property
    def body_blocks(self) -> int:
        """The blocks that the body's birth counts."""
        return self.blocks - (self.tail is not None)


@dataclass(slots=True)
class _Gone:
    """Blocks that left, to be known again by the key of the first: a body and the last block of a request."""

    body: Birth
    blocks: int
    depth: int
    tail: Birth | None
    tail_key: bytes


class _Path:
    """One request as the order sees it: reads from the deepest node up, then writes below."""

    def __init__(self, serial: int, kind: int, depth: int) -> None:
        self.serial = serial
        self.kind = kind
        self.depth = depth
        self.last: Node | None = None
        self.births: dict[tuple[str, int], Birth] = {}


class HitDensity:
    """Least worth first. Amortised constant work per node read or written: it enters a cell, moves to older
    cells, and leaves.
    """

    def __init__(self, *, gone_max: int = 65536) -> None:
        self._places: dict[Node, _Place] = {}
        self._cells: dict[CellName, OrderedDict[_Place, None]] = {}
        self._tables: dict[str, ReuseTable] = {}
        self._gone: OrderedDict[bytes, _Gone] = OrderedDict()
        self._gone_max = gone_max
        self._now = 0.0
        self._passing = 0
        self._path = _Path(0, FRESH, 0)
        self._uncovered: list[CellName] = []

    # What the core tells

    def add(self, node: Node) -> None:
        """Learn of a node; no effect when it is known. It is of the session that its parent is of."""
        if node in self._places:
            return
        above = node.parent
        parent = self._places.get(above) if above is not None else None
        gone = self._gone.pop(node.head, None)
        kind, depth = FRESH, 0
        if gone is not None:
            kind, depth = body_kind(gone.depth + 1, self._now - gone.body.at), gone.depth + 1
        elif parent is not None and parent.body.kind < BODIES:
            kind, depth = parent.body.kind, parent.depth
        if parent is None or parent.path != self._path.serial or kind != self._path.kind:
            self._begin_path(kind, depth)
        if gone is not None:
            self._came_back(gone, node)
        body, tail = self._birth(node, kind), self._birth(node, TAIL)
        place = _Place(node, body, tail, node.count, self._path.serial, depth)
        body.blocks += node.count - 1
        tail.blocks += 1
        self._passing += node.count
        self._places[node] = place
        self._stand(place)
        if parent is not None and above is not None and len(above.children) <= SHARED_CHILDREN:
            self._leave_behind(above, node)

    def touch(self, node: Node, *, is_read: bool) -> None:
        """Note a use of a known node; reads come from the deepest node up, and writes teach nothing."""
        place = self._places.pop(node, None)
        if place is None:
            return
        self._places[node] = place
        if not is_read:
            return
        is_shared = len(node.children) >= SHARED_CHILDREN
        below = self._path.last
        if below is None or below.parent is not node or place.path == self._path.serial:
            depth = 0 if is_shared else place.depth + 1
            self._begin_path(FRESH if is_shared else body_kind(depth, self._age(place)), depth)
        self._path.last = node
        place.body.read(self._now, place.body_blocks)
        if place.tail is not None:
            place.tail.read(self._now, 1)
            place.tail = None
        place.path, place.depth = self._path.serial, self._path.depth
        place.body = self._birth(node, SHARED if is_shared else self._path.kind)
        place.body.blocks += place.blocks
        self._passing += place.blocks
        self._stand(place)

    def split(self, head: Node, tail: Node) -> None:
        """A node was cut: the tail keeps the place, the head hides behind it."""
        place = self._places.pop(head, None)
        if place is not None:
            place.node, place.blocks = tail, tail.count
            self._places[tail] = place
            self._places[head] = _Place(head, place.body, None, head.count, place.path, place.depth)

    def join(self, kept: Node, gone: Node) -> None:
        """A node was merged into its parent: both live on as what was used last, the node below."""
        above, below = self._places.pop(kept, None), self._places.pop(gone, None)
        place = below or above
        if place is None:
            return
        counted = place.body_blocks
        if above is not None and below is not None:
            self._leave_cells(above)
            above.body.blocks -= above.body_blocks
            if above.tail is not None:
                above.tail.blocks -= 1
        place.node, place.blocks = kept, kept.count
        place.body.blocks += place.body_blocks - counted
        self._places[kept] = place

    def leaving(self, node: Node, at: int) -> None:
        """A node's blocks from `at` on are about to leave the store."""
        place = self._places.get(node)
        if place is not None:
            self._remember(place, at)

    def remove(self, node: Node) -> None:
        """Forget a node; no effect when it is unknown."""
        place = self._places.get(node)
        if place is not None:
            if node.count:
                self._remember(place, 0)
            self._leave_cells(place)
            del self._places[node]

    def victims(self) -> Iterator[tuple[Node, int]]:
        """Yield nodes in the order in which they should leave, each with how many blocks may leave now;
        callers may remove the one they were given.
        """
        self._grow_older()
        order = [(self._worth(name), name) for name, cell in self._cells.items() if cell]
        heapq.heapify(order)
        tried: set[_Place] = set()
        while order:
            name = order[0][1]
            place = next(iter(self._cells[name]), None)
            if place is None or place in tried:
                heapq.heappop(order)
            elif self._is_covered(place.node):
                self._leave_cells(place)
            else:
                yield from self._offer(place, name, tried)
                for uncovered in self._uncovered:
                    heapq.heappush(order, (self._worth(uncovered), uncovered))
                self._uncovered.clear()

    def nodes(self) -> list[Node]:
        """Return all known nodes, least recently used first."""
        return list(self._places)

    def __contains__(self, node: object) -> bool:
        return node in self._places

    def __len__(self) -> int:
        return len(self._places)

    # Cells

    def _offer(self, place: _Place, name: CellName, tried: set[_Place]) -> Iterator[tuple[Node, int]]:
        """Yield a place; who does not give way waits behind the others of its cell."""
        blocks = place.blocks
        if name == place.tail_cell:
            # One chance: a copy of it on SSD lets its host slot go without leaving the store.
            self._leave_cell(place, "tail_cell")
            yield place.node, 1
            return
        yield place.node, blocks
        if place.body_cell == name and place.blocks == blocks:
            self._cells[name].move_to_end(place)
            tried.add(place)

    def _stand(self, place: _Place, *, first: bool = False) -> CellName:
        """Enter the cell of a place's kind and age, at its recent end or, with `first`, at the old one."""
        self._leave_cells(place)
        place.body_cell = self._enter(place, place.body, first=first)
        if place.tail is not None:
            place.tail_cell = self._enter(place, place.tail, first=first)
        return place.body_cell

    def _enter(self, place: _Place, birth: Birth, *, first: bool) -> CellName:
        name = (place.node.retention_class, birth.kind, age_of(self._now - birth.at))
        cell = self._cells.setdefault(name, OrderedDict())
        cell[place] = None
        cell.move_to_end(place, last=not first)
        self._table(name[0])
        return name

    def _leave_cells(self, place: _Place) -> None:
        self._leave_cell(place, "body_cell")
        self._leave_cell(place, "tail_cell")

    def _leave_cell(self, place: _Place, which: str) -> None:
        name = getattr(place, which)
        if name is not None:
            del self._cells[name][place]
            setattr(place, which, None)

    def _grow_older(self) -> None:
        """Move what has reached the next age, oldest cells first, so that each stays in order."""
        for name in sorted((name for name, cell in self._cells.items() if cell), key=lambda name: -name[2]):
            cell, older = self._cells[name], AGE_STARTS[name[2] + 1]
            while cell and name[2] < AGES - 1:
                place = next(iter(cell))
                is_tail = place.tail_cell == name
                birth = place.tail if is_tail and place.tail is not None else place.body
                if self._now - birth.at < older:
                    break
                self._leave_cell(place, "tail_cell" if is_tail else "body_cell")
                entered = self._enter(place, birth, first=False)
                if is_tail:
                    place.tail_cell = entered
                else:
                    place.body_cell = entered

    def _worth(self, name: CellName) -> float:
        return float(self._tables[name[0]].worth[name[1], name[2]])

    def _is_covered(self, node: Node) -> bool:
        """Say whether something stands behind a node. Of many children a few are asked: a node that is on SSD
        may go before them, one that is not is refused by who asked.
        """
        return any(child in self._places for child in islice(node.children.values(), CHILDREN_ASKED))

    # Sessions

    def _age(self, place: _Place) -> float:
        return self._now + self._passing - place.body.at

    def _begin_path(self, kind: int, depth: int) -> None:
        self._now += self._passing
        self._passing = 0
        self._path = _Path(self._path.serial + 1, kind, depth)
        for table in self._tables.values():
            table.pass_time(self._now)
            if not self._path.serial % LEARN_EVERY_PATHS:
                table.learn()

    def _table(self, retention_class: str) -> ReuseTable:
        table = self._tables.get(retention_class)
        if table is None:
            table = self._tables[retention_class] = ReuseTable()
        return table

    def _birth(self, node: Node, kind: int) -> Birth:
        key = (node.retention_class, kind)
        birth = self._path.births.get(key)
        if birth is None:
            birth = self._path.births[key] = self._table(node.retention_class).born(self._now, kind)
        return birth

    def _leave_behind(self, parent: Node, node: Node) -> None:
        """The session goes on with `node`: what else it had behind its parent will hardly be read again."""
        waiting = [child for child in parent.children.values() if child is not node]
        while waiting:
            item = waiting.pop()
            place = self._places.get(item)
            if place is None or place.body.kind == LEFT_BEHIND:
                continue
            waiting.extend(item.children.values())
            place.body.blocks -= place.body_blocks
            if place.tail is not None:
                place.tail.blocks -= 1
            self._leave_cells(place)
            place.tail = None
            place.body = self._birth(item, LEFT_BEHIND)
            place.body.blocks += place.blocks
            self._stand(place)

    # What left

    def _remember(self, place: _Place, at: int) -> None:
        """Blocks leave from the tail on: they are followed together with those that left behind them."""
        node = place.node
        key, end = _key_of(node, at), place.blocks
        gone = _Gone(place.body, 0, place.depth, None, b"")
        earlier = self._gone.get(place.gone)
        if earlier is not None and earlier.body is place.body:
            gone = self._gone.pop(place.gone)
        if place.tail is not None:
            gone.tail, gone.tail_key, end = place.tail, node.tail, end - 1
            self._leave_cell(place, "tail_cell")
            place.tail = None
        gone.blocks += max(0, end - at)
        self._gone[key] = gone
        place.gone, place.blocks = key, at
        while len(self._gone) > self._gone_max:
            self._lose(self._gone.popitem(last=False)[1])
        if not at and node.parent is not None:
            self._uncover(node.parent, key)

    def _uncover(self, parent: Node, gone: bytes) -> None:
        """The last that stood behind a node may have left: it is the next of its session to go."""
        place = self._places.get(parent)
        if place is not None:
            place.gone = gone
            if place.body_cell is None:
                self._uncovered.append(self._stand(place, first=True))

    def _came_back(self, gone: _Gone, node: Node) -> None:
        """What left was written again: a read that could have been a hit."""
        blocks = min(gone.blocks, node.count)
        gone.body.read(self._now, blocks)
        gone.blocks -= blocks
        if gone.tail is not None and gone.tail_key in node.keys:
            gone.tail.read(self._now, 1)
            gone.tail = None
        self._lose(gone)

    def _lose(self, gone: _Gone) -> None:
        """Follow blocks no longer."""
        gone.body.blocks -= gone.blocks
        if gone.tail is not None:
            gone.tail.blocks -= 1


def _key_of(node: Node, index: int) -> bytes:
    """Return the key of one block of a node."""
    for piece in node.slices:
        if index < piece.count:
            return key_at(piece.frame.keys, piece.start + index)
        index -= piece.count
    raise IndexError(index)
