"""Removal: what is deleted leaves the index, the side parts, and every copy on SSD."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.farewells import dismiss_and_bury
from kvstore.core.frames import Frame, Node
from kvstore.core.index import RunIndex
from kvstore.types import HASH_BYTES, MissReason, key_at, key_count


class Removal:
    """One purge of one namespace.

    A frame on SSD goes as a whole: blocks that share it with deleted ones stay if they are in host memory,
    and must be written again.
    """

    def __init__(self, catalog: Catalog, state: NamespaceState) -> None:
        self._catalog = catalog
        self._state = state
        self._count = 0
        self._frames: dict[Frame, None] = {}
        self._keys: set[bytes] = set()

    def run(self, keys: bytes | None) -> tuple[int, list[Node]]:
        """Remove blocks, or with None all; returns how many left, and the nodes to be written again."""
        state = self._state
        if keys is None:
            for node in list(state.nodes()):
                self._tree(node, 0)
            self._asleep()
        elif state.flat:
            self._loose(_split(keys), parts=None)
        else:
            self._keys.update(_split(keys))
            last = state.runs.find(key_at(keys, 0))
            if last is not None and last.count:
                self._tree(last, last.count - 1)
            for orphan in state.runs.waiting_under(key_at(keys, 0)) if last is None else ():
                self._tree(orphan, 0)
            self._loose(sorted(self._keys), parts=[part for part, _ in state.side_windows])
        self._forget_unread(everything=keys is None)
        kept = self._forget_copies(everything=keys is None)  # which counts too
        return self._count, kept

    def run_nodes(self, nodes: Iterable[Node]) -> tuple[int, list[Node]]:
        """Remove whole runs and not what follows them; returns as `run` does."""
        for node in nodes:
            if node.count:
                self._frames.update({piece.frame: None for piece in node.slices})
                if not node.loose:
                    self._keys.update(_split(node.keys))
                self._count += self._catalog.drop(node, 0, MissReason.DELETED)
        kept = self._forget_copies(everything=False)
        return self._count, kept

    def _tree(self, node: Node, at: int) -> None:
        """Drop a node from `at` on, all below it, and the orphans that wait for any of that."""
        waiting = [(node, at)] if node.count else []
        while waiting:
            node, at = waiting.pop()
            below = RunIndex.below(node)
            packed = node.keys[at * HASH_BYTES :] + b"".join(item.keys for item in below[1:])
            self._frames.update({piece.frame: None for item in below for piece in item.slices})
            if not node.loose:
                self._keys.update(_split(packed))
            self._count += self._catalog.drop(node, at, MissReason.DELETED, cascade=True)
            if self._state.runs.orphans:
                waiting += [(orphan, 0) for orphan in self._state.runs.waiting_under(packed)]

    def _asleep(self) -> None:
        """Drop all that sleeps."""
        catalog = self._catalog
        asleep = list(catalog.sleepers.of_spaces([self._state.fingerprint]))
        for gone in dismiss_and_bury(catalog, asleep, MissReason.DELETED):
            self._count += sum(touch.count for touch, _ in gone.slices)

    def _loose(self, keys: Iterable[bytes], *, parts: list[int] | None) -> None:
        """Drop loose blocks, each with those that were put behind it in the same frame."""
        for key in keys:
            for part in parts if parts is not None else [None]:
                loose = self._state.loose
                entry = loose.get(key) if part is None else loose.get(key, part)
                if entry is not None:
                    self._tree(entry[0].nodes[0], entry[1])
                if part is None:
                    self._keys.add(key)

    def _forget_unread(self, *, everything: bool) -> None:
        """Delete frames that this start could not read: a later one would return them."""
        unread, space = self._catalog.unread, self._state.fingerprint
        places = unread.take_all(space) if everything else unread.take_blocks(space, self._keys)
        self._catalog.graves.bury_all(dict.fromkeys(places, space))

    def _forget_copies(self, *, everything: bool) -> list[Node]:
        """Delete frames on SSD that hold a deleted block, also those whose blocks left the index before."""
        catalog, kept = self._catalog, dict[Node, None]()
        catalog.graves.bury_all(catalog.segments.going)
        for frame in list(catalog.partial):
            if frame.fingerprint == self._state.fingerprint and (
                everything or not self._keys.isdisjoint(_split(frame.keys))
            ):
                self._frames[frame] = None
        for frame in self._frames:
            location = frame.location
            if location is not None and catalog.lost_any(frame):
                self._count += catalog.forget_on_ssd(frame, MissReason.DELETED)
                catalog.graves.bury(location, frame.fingerprint)
                kept.update(dict.fromkeys(frame.nodes))
        return [node for node in kept if node.count]


def _split(keys: bytes) -> list[bytes]:
    return [key_at(keys, index) for index in range(key_count(keys))]
