"""Hit density: what is worth least per block leaves first, by what was learned of traffic like it.

Knows chains: how many requests built a session, how long it pauses, how long it is and how much of it is new;
what many sessions share, the last block of a request (often cut short and never read again), and branches
that a session left behind. Knows classes: each learns of its own traffic. What was read together is of one
birth; the birth of least worth gives first, and of a chain the leaf. Time is that of the latest touch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from kvstore.core.frames import Node
from kvstore.core.reuse import Birth, Kind, ReuseTable
from kvstore.core.sessions import Awaited, Gone, Path, Place, Stand, key_of

SHARED_CHILDREN = 4
"""What so many continue belongs to none of them."""
Keys = bytes | Sequence[bytes]
"""Keys of blocks, packed or one by one."""
LEARN_EVERY_PATHS = 64
CHILDREN_ASKED = 64
AWAITED_MAX = 1024
"""Runs about to be written that are known of at once."""
STALE_MAX = 1024
"""Entries of the order that are no longer valid, beyond a few a node."""


class HitDensity:
    """Least worth first. Amortised constant work per node read or written, and a logarithm per birth and age
    that it reaches.
    """

    def __init__(self, *, gone_max: int = 65536) -> None:
        self._places: dict[Node, Place] = {}
        self._order: list[tuple[float, int, Stand]] = []
        self._entries = itertools.count(1).__next__
        self._tables: dict[str, ReuseTable[Stand]] = {}
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()
        self._gone_max = gone_max
        self._now = 0.0
        self._paths = 0
        self._path = Path()
        self._awaited: OrderedDict[bytes, Awaited] = OrderedDict()

    # What the core tells

    def add(self, node: Node) -> None:
        """Learn of a node; no effect when it is known. It is of the session that its parent is of."""
        if node in self._places:
            return
        self._now = max(self._now, node.since)
        above = node.parent
        parent = self._places.get(above) if above is not None else None
        awaited = self._awaited.pop(node.head, None)
        if awaited is None:
            self._write(parent, node.head, node.keys, node.count)
        elif awaited.path is not self._path:
            self._settle(self._path)
            self._path = awaited.path
        name = node.retention_class
        body, tail = self._stand(name, Kind.SESSION), self._stand(name, Kind.TAIL)
        place = Place(node, body, tail, node.count, self._path)
        body.grow(node.count - 1)
        tail.grow(1)
        if awaited is not None:
            place.gone = awaited.gone
        self._places[node] = place
        self._enter(place)
        if parent is not None and above is not None and len(above.children) <= SHARED_CHILDREN:
            self._leave_behind(above, node)

    def expect(
        self, above: Node | None, names: Sequence[bytes], *, retention_class: str, now: float
    ) -> float:
        """Learn of what will be written, which is known as a whole from here on; returns what it is worth."""
        self._now = max(self._now, now)
        parent = self._places.get(above) if above is not None else None
        self._write(parent, names[0], names, len(names))
        newcomer = Birth(self._table(retention_class), self._now, Kind.SESSION)
        newcomer.signature = self._path.signature
        self._awaited[names[0]] = Awaited(self._path)
        while len(self._awaited) > AWAITED_MAX:
            self._awaited.popitem(last=False)
        return newcomer.worth

    def refuse(self, above: Node | None, names: Sequence[bytes], at: int, *, retention_class: str) -> None:
        """Of what was to be written the blocks from `at` on find no room: followed as if they had left."""
        stand = self._stand(retention_class, Kind.SESSION)
        stand.grow(len(names) - at)
        self._follow_gone(names[at], Gone(stand, len(names) - at, self._path, None, b""))
        parent = self._places.get(above) if above is not None else None
        if at:
            self._awaited[names[0]].gone = names[at]
            return
        del self._awaited[names[0]]
        if parent is not None:
            parent.gone = names[0]

    def _write(self, parent: Place | None, head: bytes, keys: Keys, count: int) -> None:
        """Blocks are written, by the session that their parent is of."""
        gone = self._gone.pop(head, None)
        if parent is None or parent.path is not self._path:
            self._follow(parent, gone)
        self._path.blocks += count
        self._path.new_blocks += count if gone is None else count - self._came_back(gone, keys, count)

    def _follow(self, parent: Place | None, gone: Gone | None) -> None:
        """Begin the path of what is written: a session that had left, or more of one that is there."""
        if gone is not None:
            above = parent.path.blocks if parent is not None else 0
            self._begin_path(gone.path.next(self._now - gone.body.at, blocks=above))
        elif parent is not None and parent.body.kind is Kind.SESSION:
            self._begin_path(parent.path.more())
        else:
            self._begin_path(Path())

    def touch(self, node: Node, *, is_read: bool) -> None:
        """Note a use of a known node; reads come from the deepest node up, and writes teach nothing."""
        place = self._places.pop(node, None)
        if place is None:
            return
        self._places[node] = place
        self._now = max(self._now, node.since)
        if not is_read:
            return
        many = len(node.children) >= SHARED_CHILDREN
        below = self._path.last
        if below is None or below.parent is not node or place.path is self._path:
            self._begin_path(Path() if many else place.path.next(self._now - place.body.at))
        path = self._path
        path.last = node
        path.is_shared = path.is_shared or many
        path.blocks += node.count
        place.body.read(self._now, place.body_blocks)
        if place.tail is not None:
            place.tail.read(self._now, 1)
        self._leave(place)
        place.tail, place.path = None, path
        place.body = self._stand(node.retention_class, Kind.SHARED if path.is_shared else Kind.SESSION)
        place.body.grow(place.blocks)
        self._enter(place)

    def split(self, head: Node, tail: Node) -> None:
        """A node was cut: the tail keeps the place, the head hides behind it."""
        place = self._places.pop(head, None)
        if place is not None:
            place.node, place.blocks = tail, tail.count
            self._places[tail] = place
            self._places[head] = Place(head, place.body, None, head.count, place.path)

    def join(self, kept: Node, gone: Node) -> None:
        """A node was merged into its parent: both live on as what was used last, the node below."""
        above, below = self._places.pop(kept, None), self._places.pop(gone, None)
        place = below or above
        if place is None:
            return
        counted = place.body_blocks
        if above is not None and below is not None:
            self._leave(above)
            above.body.blocks -= above.body_blocks
            if above.tail is not None:
                above.tail.blocks -= 1
        place.node, place.blocks = kept, kept.count
        place.body.grow(place.body_blocks - counted)
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
            self._leave(place)
            del self._places[node]

    def victims(self, bar: float = math.inf) -> Iterator[tuple[Node, int]]:
        """Yield nodes in the order in which they should leave, each with how many blocks may leave now, as
        long as they are worth less than `bar`; callers may remove the one they were given.
        """
        self._settle(self._path)
        self._grow_older()
        tried: set[Place] = set()
        waiting: list[tuple[float, int, Stand]] = []
        try:
            while self._order:
                worth, entry, stand = self._order[0]
                place = next(iter(stand.places), None)
                if entry != stand.entry or place is None:
                    heapq.heappop(self._order)
                elif stand.worth > worth:
                    heapq.heapreplace(self._order, self._entry(stand))
                elif worth >= bar:
                    return
                elif self._is_covered(place.node):
                    del stand.places[place]
                elif place in tried:
                    waiting.append(heapq.heappop(self._order))
                else:
                    yield from self._offer(place, stand, tried)
        finally:
            for item in waiting:
                heapq.heappush(self._order, item)

    def nodes(self) -> list[Node]:
        """Return all known nodes, least recently used first."""
        return list(self._places)

    def __contains__(self, node: object) -> bool:
        return node in self._places

    def __len__(self) -> int:
        return len(self._places)

    # The order

    def _offer(self, place: Place, stand: Stand, tried: set[Place]) -> Iterator[tuple[Node, int]]:
        """Yield a place; who does not give way waits behind the others of its birth."""
        blocks = place.blocks
        if stand is place.tail:
            # One chance: a copy of it on SSD lets its host slot go without leaving the store.
            del stand.places[place]
            yield place.node, 1
            return
        yield place.node, blocks
        if place in stand.places and place.blocks == blocks:
            stand.places.move_to_end(place)
            tried.add(place)

    def _enter(self, place: Place, *, first: bool = False) -> None:
        """Stand with the births of a place, behind what is there or, with `first`, before it."""
        for stand in (place.body, place.tail):
            if stand is not None:
                if not stand.places:
                    heapq.heappush(self._order, self._entry(stand))
                stand.places[place] = None
                stand.places.move_to_end(place, last=not first)

    def _leave(self, place: Place) -> None:
        place.body.places.pop(place, None)
        if place.tail is not None:
            place.tail.places.pop(place, None)

    def _entry(self, stand: Stand) -> tuple[float, int, Stand]:
        stand.entry = self._entries()
        return stand.worth, stand.entry, stand

    def _grow_older(self) -> None:
        """Give births their places by the age that they have now."""
        for table in self._tables.values():
            for stand in table.pass_time(self._now):
                self._rank(stand)
        if len(self._order) > 4 * len(self._places) + STALE_MAX:
            self._order = [item for item in self._order if item[1] == item[2].entry and item[2].places]
            heapq.heapify(self._order)

    def _rank(self, stand: Stand) -> None:
        if stand.places:
            heapq.heappush(self._order, self._entry(stand))

    def _is_covered(self, node: Node) -> bool:
        """Say whether something stands behind a node. Of many children a few are asked: a node that is on SSD
        may go before them, one that is not is refused by who asked.
        """
        return any(child in self._places for child in islice(node.children.values(), CHILDREN_ASKED))

    # Sessions

    def _begin_path(self, path: Path) -> None:
        self._settle(self._path)
        self._path = path
        self._paths += 1
        self._grow_older()
        if not self._paths % LEARN_EVERY_PATHS:
            for table in self._tables.values():
                table.learn()

    def _settle(self, path: Path) -> None:
        """A path is known as a whole: so is what it says of its session."""
        signature = path.signature
        for stand in path.stands.values():
            if stand.kind is Kind.SESSION and stand.signature != signature:
                stand.signature = signature
                self._rank(stand)

    def _stand(self, name: str, kind: Kind) -> Stand:
        """Return the birth of the present path that blocks of a class are of."""
        stand = self._path.stands.get((name, kind))
        if stand is None:
            table = self._table(name)
            stand = self._path.stands[name, kind] = Stand(table, self._now, kind)
            table.follow(stand)
        return stand

    def _table(self, name: str) -> ReuseTable[Stand]:
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = ReuseTable()
        return table

    def _leave_behind(self, parent: Node, node: Node) -> None:
        """The session goes on with `node`: what else it had behind its parent will hardly be read again. It
        keeps its age.
        """
        waiting = [child for child in parent.children.values() if child is not node]
        while waiting:
            item = waiting.pop()
            place = self._places.get(item)
            if place is None or place.body.kind is not Kind.SESSION or place.path is self._path:
                continue
            waiting.extend(item.children.values())
            if place.tail is not None:
                place.tail.blocks -= 1
                place.tail.places.pop(place, None)
                place.tail = None
                place.body.grow(1)
            place.body.kind = Kind.LEFT_BEHIND
            self._rank(place.body)

    # What left

    def _remember(self, place: Place, at: int) -> None:
        """Blocks leave from the tail on: they are followed together with those that left behind them."""
        node = place.node
        key, end = key_of(node, at), place.blocks
        gone = Gone(place.body, 0, place.path, None, b"")
        earlier = self._gone.get(place.gone)
        if earlier is not None and earlier.body is place.body:
            gone = self._gone.pop(place.gone)
        if place.tail is not None:
            gone.tail, gone.tail_key, end = place.tail, node.tail, end - 1
            place.tail.places.pop(place, None)
            place.tail = None
        gone.blocks += max(0, end - at)
        self._follow_gone(key, gone)
        place.gone, place.blocks = key, at
        if not at and node.parent is not None:
            self._uncover(node.parent, key)

    def _follow_gone(self, key: bytes, gone: Gone) -> None:
        self._gone[key] = gone
        while len(self._gone) > self._gone_max:
            self._lose(self._gone.popitem(last=False)[1])

    def _uncover(self, parent: Node, gone: bytes) -> None:
        """The last that stood behind a node may have left: it is the next of its session to go."""
        place = self._places.get(parent)
        if place is not None:
            place.gone = gone
            if place not in place.body.places:
                self._enter(place, first=True)

    def _came_back(self, gone: Gone, keys: Keys, count: int) -> int:
        """What left was written again, a read that could have been a hit; returns how many blocks it was."""
        blocks = min(gone.blocks, count)
        gone.body.read(self._now, blocks)
        gone.blocks -= blocks
        if gone.tail is not None and gone.tail_key in keys:
            gone.tail.read(self._now, 1)
            gone.tail = None
            blocks += 1
        self._lose(gone)
        return blocks

    @staticmethod
    def _lose(gone: Gone) -> None:
        """Follow blocks no longer."""
        gone.body.blocks -= gone.blocks
        if gone.tail is not None:
            gone.tail.blocks -= 1
