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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvstore.core.frames import Node
from kvstore.core.reuse import Birth, Kind, ReuseTable, Signature, signature_of
from kvstore.types import key_at

SHARED_CHILDREN = 4
"""What so many continue belongs to none of them."""
LEARN_EVERY_PATHS = 64
LONG_PAUSE_SECONDS = 60.0
"""After such a pause a session begins a new spell: until then a program went on, now somebody thought."""
USUAL_SHARE = 0.3
"""Of the usual pause, what the latest makes up."""
CHILDREN_ASKED = 64
STALE_MAX = 1024
"""Entries of the order that are no longer valid, beyond a few a node."""


class _Stand(Birth):
    """A birth with its place in the order: its nodes, those to leave first in front, and its valid entry."""

    __slots__ = ("entry", "places")

    def __init__(self, table: ReuseTable[_Stand], at: float, kind: Kind) -> None:
        super().__init__(table, at, kind)
        self.entry = 0
        self.places: OrderedDict[_Place, None] = OrderedDict()


@dataclass(slots=True, eq=False)
class _Place:
    """What is known of a node: its births (of the body, and of the last block when a request ended there),
    the path that used it last, and the key of what left behind it.
    """

    node: Node
    body: _Stand
    tail: _Stand | None
    blocks: int
    path: _Path
    gone: bytes = b""

    @property
    def body_blocks(self) -> int:
        """The blocks that the body's birth counts."""
        return self.blocks - (self.tail is not None)


@dataclass(slots=True)
class _Gone:
    """Blocks that left, to be known again by the key of the first: a body and the last block of a request."""

    body: _Stand
    blocks: int
    path: _Path
    tail: _Stand | None
    tail_key: bytes


class _Path:
    """One request as the order sees it: reads from the deepest node up, then writes below."""

    __slots__ = (
        "blocks",
        "is_shared",
        "last",
        "new_blocks",
        "pause_seconds",
        "spell",
        "stands",
        "usual_pause",
    )

    def __init__(
        self, *, blocks: int = 0, pause_seconds: float = -1.0, usual_pause: float = -1.0, spell: int = 0
    ) -> None:
        self.blocks = blocks
        self.pause_seconds = pause_seconds
        self.usual_pause = usual_pause
        """The mean logarithm of the session's pauses, the latest counting most; negative without any."""
        self.spell = spell
        """How many requests came since the session last paused for long."""
        self.new_blocks = 0
        self.last: Node | None = None
        self.is_shared = False
        """Has reached what many continue: all above it is shared as well."""
        self.stands: dict[tuple[str, Kind], _Stand] = {}

    def next(self, pause_seconds: float, *, blocks: int = 0) -> _Path:
        """Return the path of the session's next request, after a pause."""
        octaves = math.log2(1.0 + max(0.0, pause_seconds))
        usual = self.usual_pause
        return _Path(
            blocks=blocks,
            pause_seconds=pause_seconds,
            usual_pause=octaves if usual < 0 else usual + USUAL_SHARE * (octaves - usual),
            spell=0 if pause_seconds > LONG_PAUSE_SECONDS else self.spell + 1,
        )

    def more(self) -> _Path:
        """Return the path of what is written later, of the same session and as part of no new request."""
        return _Path(
            blocks=self.blocks,
            pause_seconds=self.pause_seconds,
            usual_pause=self.usual_pause,
            spell=self.spell,
        )

    @property
    def signature(self) -> Signature:
        """What is known of the session."""
        return signature_of(
            pause_seconds=self.pause_seconds,
            usual_pause=self.usual_pause,
            spell=self.spell,
            blocks=self.blocks,
            new_blocks=self.new_blocks,
        )


class HitDensity:
    """Least worth first. Amortised constant work per node read or written, and a logarithm per birth and age
    that it reaches.
    """

    def __init__(self, *, gone_max: int = 65536) -> None:
        self._places: dict[Node, _Place] = {}
        self._order: list[tuple[float, int, _Stand]] = []
        self._entries = itertools.count(1).__next__
        self._tables: dict[str, ReuseTable[_Stand]] = {}
        self._gone: OrderedDict[bytes, _Gone] = OrderedDict()
        self._gone_max = gone_max
        self._now = 0.0
        self._paths = 0
        self._path = _Path()

    # What the core tells

    def add(self, node: Node) -> None:
        """Learn of a node; no effect when it is known. It is of the session that its parent is of."""
        if node in self._places:
            return
        self._now = max(self._now, node.since)
        above = node.parent
        parent = self._places.get(above) if above is not None else None
        gone = self._gone.pop(node.head, None)
        if parent is None or parent.path is not self._path:
            self._follow(parent, gone)
        new_blocks = node.count
        if gone is not None:
            new_blocks -= self._came_back(gone, node)
        self._path.blocks += node.count
        self._path.new_blocks += new_blocks
        body, tail = self._stand(node, Kind.SESSION), self._stand(node, Kind.TAIL)
        place = _Place(node, body, tail, node.count, self._path)
        body.grow(node.count - 1)
        tail.grow(1)
        self._places[node] = place
        self._enter(place)
        if parent is not None and above is not None and len(above.children) <= SHARED_CHILDREN:
            self._leave_behind(above, node)

    def _follow(self, parent: _Place | None, gone: _Gone | None) -> None:
        """Begin the path of what is written: a session that had left, or more of one that is there."""
        if gone is not None:
            above = parent.path.blocks if parent is not None else 0
            self._begin_path(gone.path.next(self._now - gone.body.at, blocks=above))
        elif parent is not None and parent.body.kind is Kind.SESSION:
            self._begin_path(parent.path.more())
        else:
            self._begin_path(_Path())

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
            self._begin_path(_Path() if many else place.path.next(self._now - place.body.at))
        path = self._path
        path.last = node
        path.is_shared = path.is_shared or many
        path.blocks += node.count
        place.body.read(self._now, place.body_blocks)
        if place.tail is not None:
            place.tail.read(self._now, 1)
        self._leave(place)
        place.tail, place.path = None, path
        place.body = self._stand(node, Kind.SHARED if path.is_shared else Kind.SESSION)
        place.body.grow(place.blocks)
        self._enter(place)

    def split(self, head: Node, tail: Node) -> None:
        """A node was cut: the tail keeps the place, the head hides behind it."""
        place = self._places.pop(head, None)
        if place is not None:
            place.node, place.blocks = tail, tail.count
            self._places[tail] = place
            self._places[head] = _Place(head, place.body, None, head.count, place.path)

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

    def victims(self) -> Iterator[tuple[Node, int]]:
        """Yield nodes in the order in which they should leave, each with how many blocks may leave now;
        callers may remove the one they were given.
        """
        self._settle(self._path)
        self._grow_older()
        tried: set[_Place] = set()
        waiting: list[tuple[float, int, _Stand]] = []
        try:
            while self._order:
                worth, entry, stand = self._order[0]
                place = next(iter(stand.places), None)
                if entry != stand.entry or place is None:
                    heapq.heappop(self._order)
                elif stand.worth > worth:
                    heapq.heapreplace(self._order, self._entry(stand))
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

    def _offer(self, place: _Place, stand: _Stand, tried: set[_Place]) -> Iterator[tuple[Node, int]]:
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

    def _enter(self, place: _Place, *, first: bool = False) -> None:
        """Stand with the births of a place, behind what is there or, with `first`, before it."""
        for stand in (place.body, place.tail):
            if stand is not None:
                if not stand.places:
                    heapq.heappush(self._order, self._entry(stand))
                stand.places[place] = None
                stand.places.move_to_end(place, last=not first)

    def _leave(self, place: _Place) -> None:
        place.body.places.pop(place, None)
        if place.tail is not None:
            place.tail.places.pop(place, None)

    def _entry(self, stand: _Stand) -> tuple[float, int, _Stand]:
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

    def _rank(self, stand: _Stand) -> None:
        if stand.places:
            heapq.heappush(self._order, self._entry(stand))

    def _is_covered(self, node: Node) -> bool:
        """Say whether something stands behind a node. Of many children a few are asked: a node that is on SSD
        may go before them, one that is not is refused by who asked.
        """
        return any(child in self._places for child in islice(node.children.values(), CHILDREN_ASKED))

    # Sessions

    def _begin_path(self, path: _Path) -> None:
        self._settle(self._path)
        self._path = path
        self._paths += 1
        self._grow_older()
        if not self._paths % LEARN_EVERY_PATHS:
            for table in self._tables.values():
                table.learn()

    def _settle(self, path: _Path) -> None:
        """A path is known as a whole: so is what it says of its session."""
        signature = path.signature
        for stand in path.stands.values():
            if stand.kind is Kind.SESSION and stand.signature != signature:
                stand.signature = signature
                self._rank(stand)

    def _stand(self, node: Node, kind: Kind) -> _Stand:
        """Return the birth of the present path that a node is of."""
        name = node.retention_class
        stand = self._path.stands.get((name, kind))
        if stand is None:
            table = self._tables.get(name)
            if table is None:
                table = self._tables[name] = ReuseTable()
            stand = self._path.stands[name, kind] = _Stand(table, self._now, kind)
            table.follow(stand)
        return stand

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

    def _remember(self, place: _Place, at: int) -> None:
        """Blocks leave from the tail on: they are followed together with those that left behind them."""
        node = place.node
        key, end = _key_of(node, at), place.blocks
        gone = _Gone(place.body, 0, place.path, None, b"")
        earlier = self._gone.get(place.gone)
        if earlier is not None and earlier.body is place.body:
            gone = self._gone.pop(place.gone)
        if place.tail is not None:
            gone.tail, gone.tail_key, end = place.tail, node.tail, end - 1
            place.tail.places.pop(place, None)
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
            if place not in place.body.places:
                self._enter(place, first=True)

    def _came_back(self, gone: _Gone, node: Node) -> int:
        """What left was written again, a read that could have been a hit; returns how many blocks it was."""
        blocks = min(gone.blocks, node.count)
        gone.body.read(self._now, blocks)
        gone.blocks -= blocks
        if gone.tail is not None and gone.tail_key in node.keys:
            gone.tail.read(self._now, 1)
            gone.tail = None
            blocks += 1
        self._lose(gone)
        return blocks

    @staticmethod
    def _lose(gone: _Gone) -> None:
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
