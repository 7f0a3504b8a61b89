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
from kvstore.types import BlockHash, Fingerprint, key_at, split_keys


class Rebuild:
    """Turns recovered frames into nodes, parents before children, whatever order they come in."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._now = catalog.retention.now()
        self._frames: defaultdict[Fingerprint, list[Frame]] = defaultdict(list)
        self._touched: dict[Frame, list[SliceTouch]] = {}
        self._early: set[Frame] = set()
        self.frames_skipped = 0

    def collect(self, recovered: Iterable[RecoveredFrame]) -> None:
        """Take what was found, one by one: of millions of frames no more is kept than the index needs."""
        for item in recovered:
            frame = _frame(item)
            self._frames[frame.fingerprint].append(frame)
            self._catalog.written_until = max(self._catalog.written_until, frame.written_at)
            is_early = max((touch.touched_at for touch in item.touches), default=frame.written_at) > self._now
            if is_early:
                self._early.add(frame)
            if is_early or item.touches or item.header.touched_at:
                self._touched[frame] = recovered_slices(item.header, item.touches, now=self._now)

    def run(self) -> None:
        """Insert all frames; those of unknown namespaces are left alone on disk."""
        while self._frames:
            fingerprint, frames = self._frames.popitem()
            state = self._catalog.namespaces.get(fingerprint)
            if state is None:
                self.frames_skipped += len(frames)
                continue
            self._namespace(state, frames)

    def _namespace(self, state: NamespaceState, frames: list[Frame]) -> None:
        chained: list[Frame] = []
        loose: list[Frame] = []
        for frame in frames:
            (loose if frame.kind is FrameKind.SIDE or state.flat else chained).append(frame)
        for frame in sorted(loose, key=_age, reverse=True):
            self._loose(state, frame)
        links = Links(chained)
        ready = [parent for parent in links.followers if parent not in links.inside]
        while ready:
            parent = ready.pop()
            above = state.runs.ending_with(parent)
            if above is None and parent in links.inside:
                above = state.runs.find(parent)  # what it was in has gone for a newer copy
            numbers = links.followers.pop(parent, [])
            for number in numbers:
                frame, branches = chained[number], links.branches.get(number, ())
                ready.extend(key_at(frame.keys, index) for index in branches)
                if number in links.overlapping:
                    self._chain(state, above, frame, branches)
                else:
                    self._whole(state, above, frame, branches, is_alone=len(numbers) == 1)

    def _loose(self, state: NamespaceState, frame: Frame) -> None:
        """Insert the blocks of a frame up to the first that a newer frame brought."""
        held = self._held_slices(frame)[0]
        part = frame.parts[0].index if frame.kind is FrameKind.SIDE else WHOLE
        there = [state.loose.get(key, part) is not None for key in split_keys(frame.keys)]
        if there[0]:
            self._bury(frame)
            return
        node = state.loose.insert(
            frame, part=part, retention_class=held.retention_class, since=held.touched_at
        )
        if True in there:
            state.loose.truncate(node, there.index(True))
        self._place(frame)
        self._note_loss(frame)

    def _bury(self, frame: Frame) -> None:
        location, frame.location = frame.location, None
        assert location is not None
        self._catalog.graves.bury(location, frame.fingerprint)

    def _whole(
        self,
        state: NamespaceState,
        above: Node | None,
        frame: Frame,
        branches: Sequence[int],
        *,
        is_alone: bool,
    ) -> None:
        """Insert a frame that shares no block with another; `is_alone`: nothing else follows its parent."""
        node = self._insert(state, above, frame, range(frame.count), branches)
        if is_alone and above is not None and above.since == node.since:
            state.runs.join(above)
        self._place(frame)

    def _chain(
        self, state: NamespaceState, above: Node | None, frame: Frame, branches: Sequence[int]
    ) -> None:
        """Insert what of a frame is not there yet, and put it in the place of older copies: a block that was
        stored again had been lost or found bad.
        """
        stretches = state.runs.walk_from(above, frame.parent, frame.keys)
        position = 0
        for start, node, matched in (*stretches, (frame.count, None, 0)):
            if start > position:
                before = state.runs.ending_with(key_at(frame.keys, position - 1)) if position else above
                self._insert(state, before, frame, range(position, start), branches)
            if node is None:
                break
            if matched < node.count:
                state.runs.split(node, matched)
            self._replace(state, node, frame, start)
            position = start + matched
        if frame.nodes:
            self._place(frame)
            self._note_loss(frame)
        else:
            self._bury(frame)

    def _insert(
        self,
        state: NamespaceState,
        above: Node | None,
        frame: Frame,
        blocks: range,
        branches: Sequence[int],
    ) -> Node:
        """Insert blocks of a frame, the first of them right below `above`; returns the first node.

        `branches` are the blocks that other frames follow: nodes are cut there at once, which spares a
        search for them later.
        """
        if not branches and frame not in self._touched:
            parent = key_at(frame.keys, blocks.start - 1) if blocks.start else frame.parent
            piece = Slice(frame, blocks.start, len(blocks))
            held_by, since = frame.retention_class, frame.written_at
            return state.runs.insert_under(above, parent, [piece], retention_class=held_by, since=since)
        first: Node | None = None
        for held, some in self._held(frame, blocks):
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

    def _held_slices(self, frame: Frame) -> list[SliceTouch]:
        whole = SliceTouch(0, frame.count, frame.retention_class, frame.written_at)
        return self._touched.get(frame) or [whole]

    def _held(self, frame: Frame, blocks: range) -> Iterator[tuple[SliceTouch, range]]:
        """Yield who holds which of the blocks, in order."""
        for held in self._held_slices(frame):
            some = range(max(held.first, blocks.start), min(held.first + held.count, blocks.stop))
            if some:
                yield held, some

    def _replace(self, state: NamespaceState, node: Node, frame: Frame, start: int) -> None:
        """Let a node stand for a newer frame's blocks from `start` on."""
        if any(_age(piece.frame) > _age(frame) for piece in node.slices):
            return
        for held, some in self._held(frame, range(start, start + node.count)):
            rest = state.runs.split(node, len(some)) if len(some) < node.count else node
            self._take_over(node, frame, held, some.start)
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

    def _note_loss(self, frame: Frame) -> None:
        if self._catalog.lost_any(frame):
            self._catalog.partial[frame] = None

    def _place(self, frame: Frame) -> None:
        assert frame.location is not None
        self._catalog.segments.place(frame, frame.location)
        if frame in self._early:
            self._catalog.plan.touched[frame] = None


def _frame(item: RecoveredFrame) -> Frame:
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


def _age(frame: Frame) -> tuple[float, int, int]:
    """The newer of two frames is the greater."""
    place = frame.location
    return (frame.written_at, place.segment, place.offset) if place else (frame.written_at, 0, 0)
