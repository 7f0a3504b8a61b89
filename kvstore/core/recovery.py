"""Rebuilding the catalog from the frames that a tier found at start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.frames import Frame, Node, Slice
from kvstore.core.links import Links
from kvstore.core.loose import WHOLE
from kvstore.core.touches import recovered_slices
from kvstore.tiers.base import FrameKind, RecoveredFrame, SliceTouch
from kvstore.types import BlockHash, key_at, split_keys


class Rebuild:
    """Turns recovered frames into nodes, parents before children, whatever order they come in."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._now = catalog.retention.now()
        self.frames_skipped = 0

    def run(self, recovered: Iterable[RecoveredFrame]) -> None:
        """Insert all frames; those of unknown namespaces are left alone on disk."""
        by_namespace: dict[bytes, list[RecoveredFrame]] = defaultdict(list)
        for item in recovered:
            self._catalog.written_until = max(self._catalog.written_until, item.header.written_at)
            by_namespace[item.header.namespace].append(item)
        for fingerprint, items in by_namespace.items():
            state = self._catalog.namespaces.get(items[0].header.namespace)
            if state is None:
                self.frames_skipped += len(items)
                continue
            assert fingerprint == state.fingerprint
            self._namespace(state, items)

    def _namespace(self, state: NamespaceState, items: list[RecoveredFrame]) -> None:
        chained: list[RecoveredFrame] = []
        loose: list[RecoveredFrame] = []
        for item in items:
            (loose if item.header.kind is FrameKind.SIDE or state.flat else chained).append(item)
        for item in sorted(loose, key=_age, reverse=True):
            self._loose(state, item)
        links = Links(chained)
        ready = [parent for parent in links.followers if parent not in links.inside]
        while ready:
            parent = ready.pop()
            above = state.runs.ending_with(parent)
            if above is None and parent in links.inside:
                above = state.runs.find(parent)  # what it was in has gone for a newer copy
            numbers = links.followers.pop(parent, [])
            for number in numbers:
                branches = links.branches.get(number, ())
                if number in links.overlapping:
                    self._chain(state, above, chained[number], branches)
                else:
                    self._whole(state, above, chained[number], branches, is_alone=len(numbers) == 1)
                keys = chained[number].header.keys
                ready.extend(key_at(keys, index) for index in branches)

    def _loose(self, state: NamespaceState, item: RecoveredFrame) -> None:
        """Insert the blocks of a frame up to the first that a newer frame brought."""
        frame = self._frame(item)
        held = recovered_slices(item.header, item.touches, now=self._now)[0]
        part = frame.parts[0].index if frame.kind is FrameKind.SIDE else WHOLE
        there = [state.loose.get(key, part) is not None for key in split_keys(frame.keys)]
        if there[0]:
            self._catalog.graves.bury(item.location, state.fingerprint)
            return
        node = state.loose.insert(
            frame, part=part, retention_class=held.retention_class, since=held.touched_at
        )
        if True in there:
            state.loose.truncate(node, there.index(True))
        self._place(frame, item)

    def _whole(
        self,
        state: NamespaceState,
        above: Node | None,
        item: RecoveredFrame,
        branches: Sequence[int],
        *,
        is_alone: bool,
    ) -> None:
        """Insert a frame that shares no block with another; `is_alone`: nothing else follows its parent."""
        frame = self._frame(item)
        node = self._insert(state, above, frame, item, range(frame.count), branches)
        parent = node.parent
        if is_alone and parent is not None and parent is not state.runs.root:
            state.runs.join(parent)
        self._place(frame, item)

    def _chain(
        self, state: NamespaceState, above: Node | None, item: RecoveredFrame, branches: Sequence[int]
    ) -> None:
        """Insert what of a frame is not there yet, and put it in the place of older copies: a block that was
        stored again had been lost or found bad.
        """
        frame = self._frame(item)
        stretches = state.runs.walk_from(above, frame.parent, frame.keys)
        position = 0
        for start, node, matched in (*stretches, (frame.count, None, 0)):
            if start > position:
                before = state.runs.ending_with(key_at(frame.keys, position - 1)) if position else above
                self._insert(state, before, frame, item, range(position, start), branches)
            if node is None:
                break
            if matched < node.count:
                state.runs.split(node, matched)
            self._replace(state, node, frame, item, start)
            position = start + matched
        if frame.nodes:
            self._place(frame, item)
        else:
            self._catalog.graves.bury(item.location, state.fingerprint)

    def _insert(
        self,
        state: NamespaceState,
        above: Node | None,
        frame: Frame,
        item: RecoveredFrame,
        blocks: range,
        branches: Sequence[int],
    ) -> Node:
        """Insert blocks of a frame, the first of them right below `above`; returns the first node.

        `branches` are the blocks that other frames follow: nodes are cut there at once, which spares a
        search for them later.
        """
        first: Node | None = None
        for held, some in self._held(item, blocks):
            parent = key_at(frame.keys, some.start - 1) if some.start else frame.parent
            node = state.runs.insert_under(
                above,
                parent,
                [Slice(frame, some.start, len(some))],
                retention_class=held.retention_class,
                since=held.touched_at,
            )
            first = first or node
            offset = some.start
            for index in branches:
                if offset < index + 1 < some.stop:
                    node, offset = state.runs.split(node, index + 1 - offset), index + 1
            above = node
        assert first is not None
        return first

    def _held(self, item: RecoveredFrame, blocks: range) -> Iterator[tuple[SliceTouch, range]]:
        """Yield who holds which of the blocks, in order."""
        for held in recovered_slices(item.header, item.touches, now=self._now):
            some = range(max(held.first, blocks.start), min(held.first + held.count, blocks.stop))
            if some:
                yield held, some

    def _replace(
        self, state: NamespaceState, node: Node, frame: Frame, item: RecoveredFrame, start: int
    ) -> None:
        """Let a node stand for a newer frame's blocks from `start` on."""
        if any(_age_of(piece.frame) > _age(item) for piece in node.slices):
            return
        for held, some in self._held(item, range(start, start + node.count)):
            rest = state.runs.split(node, len(some)) if len(some) < node.count else node
            self._take_over(node, frame, held, some.start)
            node = rest

    def _take_over(self, node: Node, frame: Frame, held: SliceTouch, start: int) -> None:
        is_copy = all(piece.frame.written_at == frame.written_at for piece in node.slices)
        for old in {id(piece.frame): piece.frame for piece in node.slices}.values():
            old.nodes.remove(node)
            if old.nodes:
                self._catalog.partial[old] = None
            else:
                self._catalog.discard(old)
        node.slices = [Slice(frame, start, node.count)]
        end = held.touched_at + self._catalog.retention.held_by(held.retention_class).ttl_seconds
        if is_copy and self._catalog.retention.end(node) > end:
            # Word of the last touch came to the other of two copies of the same put.
            self._catalog.plan.touched[frame] = None
        else:
            node.retention_class, node.since = held.retention_class, held.touched_at
        if node not in frame.nodes:
            frame.nodes.append(node)

    @staticmethod
    def _frame(item: RecoveredFrame) -> Frame:
        header = item.header
        return Frame(
            fingerprint=header.namespace,
            kind=header.kind,
            parent=BlockHash(header.parent),
            keys=header.keys,
            parts=header.parts,
            retention_class=header.retention_class,
            written_at=header.written_at,
            provenance=header.provenance,
        )

    def _place(self, frame: Frame, item: RecoveredFrame) -> None:
        self._catalog.segments.place(frame, item.location)
        if max((touch.touched_at for touch in item.touches), default=item.header.written_at) > self._now:
            self._catalog.plan.touched[frame] = None
        if self._catalog.lost_any(frame):
            self._catalog.partial[frame] = None


def _age(item: RecoveredFrame) -> tuple[float, int, int]:
    """The newer of two frames is the greater."""
    return item.header.written_at, item.location.segment, item.location.offset


def _age_of(frame: Frame) -> tuple[float, int, int]:
    place = frame.location
    return (frame.written_at, place.segment, place.offset) if place else (frame.written_at, 0, 0)
