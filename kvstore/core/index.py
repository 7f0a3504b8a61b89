"""The index of runs of one chain namespace: a radix tree whose edges are packed hashes.

Match costs a comparison per run, not per block. A run whose parent is absent waits as an orphan under its
parent's hash until the parent returns. Nothing here knows of time, memory or disks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from kvstore.core.frames import Frame, Node, Slice, common_blocks, cut_slices
from kvstore.core.roll import Roll
from kvstore.types import HASH_BYTES, BlockHash, key_at

NO_HASH = BlockHash(bytes(HASH_BYTES))
Step = tuple[Node, int]
SEAMS_MAX = 1024
"""Of a namespace, the latest: more than requests are under way."""


class RunIndex:
    """Runs of one namespace by content; `on_join(kept, gone)` and `on_split(head, tail)` tell a policy
    about nodes.
    """

    def __init__(
        self, *, on_split: Callable[[Node, Node], None], on_join: Callable[[Node, Node], None]
    ) -> None:
        self.root = Node([], parent_hash=NO_HASH, retention_class="", since=0.0)
        self.declared: set[bytes] = set()
        self.orphans: dict[bytes, dict[bytes, Node]] = {}
        self.tails: dict[bytes, Node] = {}
        self._seams: dict[bytes, Frame] = {}
        """Blocks that were the last of a run until it was joined, with their frames: where others branch
        off.
        """
        self.roll = Roll()
        self._on_split = on_split
        self._on_join = on_join

    def declare(self, root_hash: bytes) -> None:
        """Learn a chain root: runs that wait under it start prompts from now on."""
        if root_hash in self.declared:
            return
        self.declared.add(root_hash)
        for node in self.orphans.pop(root_hash, {}).values():
            self.root.adopt(node)

    def walk(self, keys: bytes, *, undeclared: bool = False) -> list[Step]:
        """Follow `keys` from the root: the nodes met, each with how many of its blocks matched.

        `undeclared` also starts at a run that waits for its root: after a restart no client has named it yet.
        Runs met that wait for a block inside of another come back to it.
        """
        node: Node | None = self.root
        position, total = 0, len(keys) // HASH_BYTES
        steps: list[Step] = []
        while position < total:
            child = node.child(key_at(keys, position)) if node is not None else None
            if child is None and undeclared and not position:
                child = self._waiting_head(key_at(keys, 0))
            if child is None and self.orphans and position:
                child = self._rejoin(*steps[-1], keys, position)
            if child is None:
                break
            matched = common_blocks(child, keys, position)
            steps.append((child, matched))
            position += matched
            node = child if matched == child.count else None
        return steps

    def _rejoin(self, above: Node, matched: int, keys: bytes, position: int) -> Node | None:
        """Hang a run that waits for the block before `position` below it, where a walk along `above` has come
        to an end.
        """
        before = above.key(matched - 1)
        waiting = self.orphans.get(before)
        orphan = waiting.get(key_at(keys, position)) if waiting else None
        if waiting is None or orphan is None or orphan is self.path(above)[-1]:
            return None
        if matched < above.count:
            self.split(above, matched)
        del waiting[orphan.head]
        if not waiting:
            del self.orphans[before]
        above.adopt(orphan)
        return orphan

    def _waiting_head(self, key: bytes) -> Node | None:
        return next((nodes[key] for nodes in self.orphans.values() if key in nodes), None)

    def walk_behind(self, parent: bytes, keys: bytes) -> tuple[Node | None, list[tuple[int, Node, int]]]:
        """Find which of `keys` behind `parent` are present, visible or not.

        Returns the node whose last block is `parent` (None: absent; it may be the root) and present
        stretches as (position in keys, node, matched), holes between them allowed: orphans count as
        present.
        """
        above = self.find(parent)
        return above, self.walk_from(above, parent, keys)

    def walk_from(self, above: Node | None, parent: bytes, keys: bytes) -> list[tuple[int, Node, int]]:
        """Find which of `keys` behind `parent` are present; `above` is the node that ends with `parent`."""
        found: list[tuple[int, Node, int]] = []
        node, position, before, total = above, 0, parent, len(keys) // HASH_BYTES
        last = (above, above.count) if above is not None else None
        while position < total:
            key = key_at(keys, position)
            child = node.child(key) if node else None
            if child is None and self.orphans and last is not None and last[1]:
                child = self._rejoin(*last, keys, position)
            if child is None and self.orphans:
                child = self.orphans.get(before, {}).get(key)
            if child is None:
                if not self.orphans:
                    break
                node, last, before, position = None, None, key, position + 1
                continue
            matched = common_blocks(child, keys, position)
            found.append((position, child, matched))
            last, position = (child, matched), position + matched
            node = child if matched == child.count else None
            before = key_at(keys, position - 1)
        return found

    def find(self, block: bytes) -> Node | None:
        """Return the node that ends with `block`, splitting one where the block lies inside it; the root
        for a declared root. A block inside of a run is looked for on all shelves.
        """
        node = self.ending_with(block)
        if node is not None:
            return node
        seam = self._seams.get(block)
        for candidate in chain(seam.nodes if seam is not None else (), self.roll.holding(block)):
            at = _position_of(candidate, block)
            if at is not None:
                if at + 1 < candidate.count:
                    self.split(candidate, at + 1)
                return candidate
        return None

    def ending_with(self, block: bytes) -> Node | None:
        """Return the node whose last block this is; the root for a declared root."""
        return self.root if block in self.declared else self.tails.get(block)

    def insert(self, parent: bytes, slices: list[Slice], *, retention_class: str, since: float) -> Node:
        """Hang a new run under the block `parent`, or let it wait as an orphan; orphans waiting for its
        blocks return, and cut it: the node returned has its head.
        """
        above = self.find(parent)
        node = self.insert_under(above, parent, slices, retention_class=retention_class, since=since)
        self.reunite(node)
        return node

    def insert_under(
        self, above: Node | None, parent: bytes, slices: list[Slice], *, retention_class: str, since: float
    ) -> Node:
        """Hang a new run under a node that ends with `parent`, or let it wait as an orphan without one. No
        run may wait for its blocks.
        """
        node = Node(slices, parent_hash=BlockHash(parent), retention_class=retention_class, since=since)
        self._register(node)
        if above is None:
            self.orphans.setdefault(parent, {})[node.head] = node
        else:
            above.adopt(node)
            if self.tails.get(parent) is above:
                # One object for what a node ends with and what the next one follows: a lot of memory in all.
                del self.tails[parent]
                self.tails[parent] = above
        return node

    def _register(self, node: Node) -> None:
        self.tails[node.tail] = node
        self.roll.add(node)
        for piece in node.slices:
            piece.frame.join(node)

    def reunite(self, node: Node) -> None:
        """Hang the runs that wait for a node's blocks below them, which cuts it: it keeps its head."""
        if not self.orphans:
            return
        keys, offset = node.keys, 0
        for index in range(len(keys) // HASH_BYTES):
            waiting = self.orphans.get(key_at(keys, index))
            if waiting is None:
                continue
            del self.orphans[key_at(keys, index)]
            at = index + 1 - offset
            above = node
            if at < node.count:
                node, offset = self.split(node, at), index + 1
            top = self.path(above)[-1]
            for orphan in waiting.values():
                if orphan is top or above.child(orphan.head) is not None:
                    # A writer lied about what follows what: runs must not make a ring, nor hide one another.
                    self.orphans.setdefault(orphan.parent_hash, {})[orphan.head] = orphan
                else:
                    above.adopt(orphan)

    def split(self, node: Node, at: int) -> Node:
        """Cut a node behind its first `at` blocks; the node keeps the head, the new tail is returned."""
        assert 0 < at < node.count
        left, right = cut_slices(node.slices, at)
        tail = Node(right, parent_hash=BlockHash(b""), retention_class=node.retention_class, since=node.since)
        tail.inherit(node)
        self._reseat(node, left)
        tail.parent_hash = BlockHash(node.tail)
        self._register(tail)
        self.tails[node.tail] = node
        node.adopt(tail)
        self._on_split(node, tail)
        return tail

    def _reseat(self, node: Node, slices: list[Slice]) -> None:
        kept = {id(piece.frame) for piece in slices}
        for piece in node.slices:
            if id(piece.frame) not in kept:
                piece.frame.leave(node)
        node.slices = tuple(slices)
        node.count = sum(piece.count for piece in slices)

    def join(self, node: Node) -> bool:
        """Merge a node's only child into it when both have the same state; says whether it did."""
        if node is self.root or len(node.children) != 1:
            return False
        (child,) = node.children.values()
        if child.retention_class != node.retention_class or child.since != node.since:
            return False
        self._seams[node.tail] = node.slices[-1].frame
        if len(self._seams) > SEAMS_MAX:
            del self._seams[next(iter(self._seams))]
        self._forget_tail(node)
        self.roll.remove(child)
        for piece in child.slices:
            piece.frame.leave(child)
            self._append(node, piece)
        node.inherit(child)
        self.tails[node.tail] = node
        self._on_join(node, child)
        return True

    def _append(self, node: Node, piece: Slice) -> None:
        last = node.slices[-1]
        if last.frame is piece.frame and last.start + last.count == piece.start:
            longer = Slice(last.frame, last.start, last.count + piece.count)
            node.slices = (*node.slices[:-1], longer)
        else:
            node.slices += (piece,)
        piece.frame.join(node)
        node.count += piece.count
        if node.shelf is not None:
            node.shelf.note(piece.keys)

    def truncate(self, node: Node, at: int) -> list[Slice]:
        """Drop a node's blocks from `at` on and return them; its children become orphans under the hash
        they follow.
        """
        left, right = cut_slices(node.slices, at)
        self._orphan_children(node)
        self._forget_tail(node)
        if left:
            self._reseat(node, left)
            self.tails[node.tail] = node
        else:
            self._detach(node)
            self._reseat_all(node)
        return right

    def _reseat_all(self, node: Node) -> None:
        for piece in node.slices:
            piece.frame.leave(node)
        node.count = 0
        self.roll.remove(node)

    def _forget_tail(self, node: Node) -> None:
        if self.tails.get(node.tail) is node:
            del self.tails[node.tail]

    def _orphan_children(self, node: Node) -> None:
        if node.children:
            waiting = self.orphans.setdefault(node.tail, {})
            for head, child in list(node.children.items()):
                node.disown(child)
                child.parent = None
                waiting[head] = child

    def _detach(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.disown(node)
            node.parent = None
            return
        waiting = self.orphans.get(node.parent_hash)
        if waiting is not None and waiting.get(node.head) is node:
            del waiting[node.head]
            if not waiting:
                del self.orphans[node.parent_hash]

    def waiting_under(self, keys: bytes) -> list[Node]:
        """Return the orphans that wait for any of these blocks."""
        blocks = (key_at(keys, index) for index in range(len(keys) // HASH_BYTES))
        return [node for block in blocks for node in self.orphans.get(block, {}).values()]

    def __len__(self) -> int:
        return len(self.roll)

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes, orphans included, in no promised order."""
        return iter(self.roll)

    @staticmethod
    def below(node: Node) -> list[Node]:
        """Return a node and all its descendants, parents first."""
        found = [node]
        for item in found:
            found.extend(item.children.values())
        return found

    @staticmethod
    def path(node: Node | None) -> list[Node]:
        """Return a node and its ancestors, leaf first, the root left out."""
        found: list[Node] = []
        while node is not None and node.count:
            found.append(node)
            node = node.parent
        return found


def _position_of(node: Node, block: bytes) -> int | None:
    offset = 0
    for piece in node.slices:
        keys = piece.keys
        place = keys.find(block)
        while place >= 0 and place % HASH_BYTES:
            place = keys.find(block, place + 1)
        if place >= 0:
            return offset + place // HASH_BYTES
        offset += piece.count
    return None
