"""From what a frame says of itself to runs in the tree: when it wakes, and at a start for those that do not
sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.frames import Frame, Node, Slice
from kvstore.core.sleepers import Sleeper
from kvstore.tiers.base import RecoveredFrame, SliceTouch
from kvstore.types import HASH_BYTES, BlockHash, key_at


class Waker:
    """Hangs frames into the tree, whatever order they come in. Guarded by the ladder's lock."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def wake(self, found: Iterable[tuple[Sleeper, RecoveredFrame]], keys: bytes) -> None:
        """Wake frames, among them all that share blocks with any of them; `keys` are those of the request
        that asked for them, if any.
        """
        sleepers, woken = self._catalog.sleepers, list[Frame]()
        for sleeper, item in found:
            state = self._catalog.namespaces[item.header.namespace]
            held = sleepers.held(sleeper)
            frame = frame_of(item)
            frame.used_at = self._catalog.retention.now()
            above = self._above(state, frame, keys) or self._inside(state, frame, woken)
            self._hang(state, above, frame, held)
            sleepers.take(sleeper)
            woken.append(frame)

    def _above(self, state: NamespaceState, frame: Frame, keys: bytes) -> Node | None:
        """Return the node that ends with the block before a frame, cut there if need be; None too when that
        block lies inside of a run off the request's path: then the frame waits until a walk comes by.
        """
        runs = state.runs
        above = runs.ending_with(frame.parent)
        at = keys.find(frame.keys[:HASH_BYTES]) if keys and above is None else -1
        if at <= 0 or at % HASH_BYTES or keys[at - HASH_BYTES : at] != frame.parent:
            return above
        steps = runs.walk(keys[:at], undeclared=True)
        if sum(matched for _, matched in steps) * HASH_BYTES < at:
            return None
        node, matched = steps[-1]
        if matched < node.count:
            runs.split(node, matched)
        return node

    def _inside(self, state: NamespaceState, frame: Frame, woken: Iterable[Frame]) -> Node | None:
        """Return the node that ends with the block before a frame, of those woken with it."""
        for other in woken:
            at = other.keys.find(frame.parent)
            if at >= 0 and not at % HASH_BYTES and other.fingerprint == frame.fingerprint:
                return _node_ending(state, other, at // HASH_BYTES + 1)
        return None

    def _hang(
        self, state: NamespaceState, above: Node | None, frame: Frame, held: Sequence[SliceTouch]
    ) -> None:
        """Insert what of a frame is not there yet, and put it in the place of older copies: a block that was
        stored again had been lost or found bad.
        """
        stretches = state.runs.walk_from(above, frame.parent, frame.keys)
        position = 0
        for start, node, matched in (*stretches, (frame.count, None, 0)):
            if start > position:
                before = state.runs.ending_with(key_at(frame.keys, position - 1)) if position else above
                self._insert(state, before, frame, range(position, start), held)
            if node is None:
                break
            if matched < node.count:
                state.runs.split(node, matched)
            self._replace(state, node, frame, start, held)
            position = start + matched
        if not frame.nodes:
            self.bury(frame)
            return
        assert frame.location is not None
        self._catalog.segments.place(frame, frame.location)
        if self._catalog.lost_any(frame):
            self._catalog.partial[frame] = None
        for item in frame.nodes:
            state.runs.reunite(item)

    def bury(self, frame: Frame) -> None:
        """Have a frame deleted of which newer copies are there."""
        location, frame.location = frame.location, None
        assert location is not None
        self._catalog.graves.bury(location, frame.fingerprint)

    def _insert(
        self,
        state: NamespaceState,
        above: Node | None,
        frame: Frame,
        blocks: range,
        held: Sequence[SliceTouch],
    ) -> None:
        """Insert blocks of a frame, the first of them right below `above`."""
        for touch, some in _within(held, blocks):
            parent = key_at(frame.keys, some.start - 1) if some.start else frame.parent
            above = state.runs.insert_under(
                above,
                parent,
                [Slice(frame, some.start, len(some))],
                retention_class=touch.retention_class,
                since=touch.touched_at,
            )

    def _replace(
        self, state: NamespaceState, node: Node, frame: Frame, start: int, held: Sequence[SliceTouch]
    ) -> None:
        """Let a node stand for a newer frame's blocks from `start` on."""
        if any(age(piece.frame) > age(frame) or _is_in_use(piece.frame) for piece in node.slices):
            return
        for touch, some in _within(held, range(start, start + node.count)):
            rest = state.runs.split(node, len(some)) if len(some) < node.count else node
            self._take_over(node, frame, touch, some.start)
            node = rest

    def _take_over(self, node: Node, frame: Frame, held: SliceTouch, start: int) -> None:
        is_copy = all(piece.frame.written_at == frame.written_at for piece in node.slices)
        for old in {id(piece.frame): piece.frame for piece in node.slices}.values():
            old.leave(node)
            if old.nodes:
                self._catalog.partial[old] = None
            else:
                self._catalog.discard(old)
        node.slices = (Slice(frame, start, node.count),)
        end = held.touched_at + self._catalog.retention.held_by(held.retention_class).ttl_seconds
        if is_copy and self._catalog.retention.end(node) > end:
            # Word of the last touch came to the other of two copies of the same put.
            self._catalog.plan.touched[frame] = None
        else:
            node.retention_class, node.since = held.retention_class, held.touched_at
        frame.join(node)


def frame_of(item: RecoveredFrame) -> Frame:
    """Return the frame that a tier tells of."""
    header = item.header
    frame = Frame(
        fingerprint=header.namespace,
        kind=header.kind,
        parent=BlockHash(header.parent),
        keys=header.keys,
        parts=header.parts,
        retention_class=header.retention_class,
        written_at=header.written_at,
        provenance=header.provenance,
    )
    frame.location = item.location
    return frame


def age(frame: Frame) -> tuple[float, int, int]:
    """The newer of two frames is the greater."""
    place = frame.location
    return (frame.written_at, place.segment, place.offset) if place else (frame.written_at, 0, 0)


def _node_ending(state: NamespaceState, frame: Frame, at: int) -> Node | None:
    """Return the node that ends with the first `at` blocks of a frame, cut there if need be."""
    for node in frame.nodes:
        offset = 0
        for piece in node.slices:
            if piece.frame is frame and piece.start < at <= piece.start + piece.count:
                offset += at - piece.start
                if offset < node.count:
                    state.runs.split(node, offset)
                return node
            offset += piece.count
    return None


def _is_in_use(frame: Frame) -> bool:
    return frame.location is None or frame.host is not None or bool(frame.holds or frame.loads)


def _within(held: Sequence[SliceTouch], blocks: range) -> Iterator[tuple[SliceTouch, range]]:
    """Yield who holds which of the blocks, in order."""
    for touch in held:
        some = range(max(touch.first, blocks.start), min(touch.first + touch.count, blocks.stop))
        if some:
            yield touch, some
