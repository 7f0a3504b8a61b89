"""Rebuilding the catalog from the frames that a tier found at start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.frames import Frame, Slice
from kvstore.core.loose import WHOLE
from kvstore.tiers.base import FrameKind, RecoveredFrame
from kvstore.types import HASH_BYTES, BlockHash, key_at


class Rebuild:
    """Turns recovered frames into nodes, parents before children, whatever order they come in."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.frames_skipped = 0

    def run(self, recovered: Iterable[RecoveredFrame]) -> None:
        """Insert all frames; those of unknown namespaces are left alone on disk."""
        by_namespace: dict[bytes, list[RecoveredFrame]] = defaultdict(list)
        for item in recovered:
            by_namespace[item.header.namespace].append(item)
        for fingerprint, items in by_namespace.items():
            state = self._catalog.namespaces.get(items[0].header.namespace)
            if state is None:
                self.frames_skipped += len(items)
                continue
            assert fingerprint == state.fingerprint
            self._namespace(state, items)

    def _namespace(self, state: NamespaceState, items: list[RecoveredFrame]) -> None:
        chained: dict[bytes, list[RecoveredFrame]] = defaultdict(list)
        for item in items:
            if item.header.kind is FrameKind.SIDE or state.flat:
                self._loose(state, item)
            else:
                chained[item.header.parent].append(item)
        here = {
            key
            for siblings in chained.values()
            for item in siblings
            for key in _keys(item.header.keys)
            if key in chained
        }
        ready = [parent for parent in chained if parent not in here]
        while ready:
            parent = ready.pop()
            for item in chained.pop(parent, ()):
                waited_for = [index for index, key in enumerate(_keys(item.header.keys)) if key in chained]
                self._chain(state, item, waited_for)
                ready.extend(key_at(item.header.keys, index) for index in waited_for)

    def _loose(self, state: NamespaceState, item: RecoveredFrame) -> None:
        frame = self._frame(item)
        part = frame.parts[0].index if frame.kind is FrameKind.SIDE else WHOLE
        if all(state.loose.get(key, part) is not None for key in _keys(frame.keys)):
            self._catalog.plan.delete.append(item.location)
            return
        state.loose.insert(frame, part=part, retention_class=item.retention_class, since=self._since(item))
        self._place(frame, item)

    def _chain(self, state: NamespaceState, item: RecoveredFrame, branches: list[int]) -> None:
        """Insert what of a frame is not there yet: the first copy of a block wins.

        `branches` are the blocks that other frames follow: nodes are cut there at once, which spares a
        search for them later.
        """
        frame = self._frame(item)
        above, stretches = state.runs.walk_behind(frame.parent, frame.keys)
        present = 0
        for position, node, matched in stretches:
            if position != present:
                break
            present = position + matched
            if matched < node.count:
                state.runs.split(node, matched)
        if present >= frame.count:
            self._catalog.plan.delete.append(item.location)
            return
        parent = key_at(frame.keys, present - 1) if present else frame.parent
        piece = Slice(frame, present, frame.count - present)
        node = state.runs.insert(
            parent, [piece], retention_class=item.retention_class, since=self._since(item)
        )
        self._place(frame, item)
        offset = present
        for index in branches:
            if offset < index + 1 < frame.count:
                node, offset = state.runs.split(node, index + 1 - offset), index + 1
        if not branches and above is not None and node.parent is not None:
            state.runs.join(node.parent)

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

    def _since(self, item: RecoveredFrame) -> float:
        """A touch from the future (a clock that was set back) counts as one of now."""
        return min(item.touched_at, self._catalog.retention.now())

    def _place(self, frame: Frame, item: RecoveredFrame) -> None:
        self._catalog.segments.place(
            frame, item.location, retention_class=item.retention_class, since=self._since(item)
        )


def _keys(packed: bytes) -> list[bytes]:
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
