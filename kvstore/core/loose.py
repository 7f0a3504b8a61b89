"""Blocks that hang in no chain: side parts (windows, checkpoints), and everything in a flat namespace."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.core.frames import Frame, Node, Slice, cut_slices
from kvstore.core.roll import Roll
from kvstore.tiers.base import FrameKind
from kvstore.types import HASH_BYTES, BlockHash, key_at

WHOLE = -1
"""Stands for "all required parts" in the key of a flat block."""


class LooseIndex:
    """A dict from (hash, part) to the frame that holds it; state and order live on the frame's node.

    Blocks that were put next to one another live together: a touch of one renews them all.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[bytes, int], tuple[Frame, int]] = {}
        self.roll = Roll()

    def get(self, key: bytes, part: int = WHOLE) -> tuple[Frame, int] | None:
        """Return the frame and position of a block's part."""
        return self._entries.get((key, part))

    def insert(self, frame: Frame, *, part: int, retention_class: str, since: float) -> Node:
        """Add all blocks of a frame under one part; blocks that are there already keep their first bytes."""
        node = Node(
            [Slice(frame, 0, frame.count)],
            parent_hash=BlockHash(b""),
            retention_class=retention_class,
            since=since,
            loose=True,
        )
        frame.join(node)
        self.roll.add(node)
        for index in range(frame.count):
            self._entries.setdefault((key_at(frame.keys, index), part), (frame, index))
        return node

    def moved(self, frame: Frame, copy: Frame) -> None:
        """Let the blocks of a copy be found there instead of in the frame it was made of."""
        part = self.part_of(copy)
        for index in range(copy.count):
            entry = (key_at(copy.keys, index), part)
            if self._entries.get(entry, (None, 0))[0] is frame:
                self._entries[entry] = (copy, index)

    def truncate(self, node: Node, at: int) -> list[Slice]:
        """Drop a node's blocks from `at` on and return them."""
        left, right = cut_slices(node.slices, at)
        for piece in right:
            self._forget(piece)
        node.count = at
        if left:
            node.slices = tuple(left)
        else:
            for piece in node.slices:
                piece.frame.leave(node)
            self.roll.remove(node)
        return right

    def _forget(self, piece: Slice) -> None:
        part = self.part_of(piece.frame)
        keys = piece.keys
        for index in range(len(keys) // HASH_BYTES):
            entry = (key_at(keys, index), part)
            if self._entries.get(entry, (None, 0))[0] is piece.frame:
                del self._entries[entry]

    @staticmethod
    def part_of(frame: Frame) -> int:
        """Return under which part a frame's blocks are filed."""
        return frame.parts[0].index if frame.kind is FrameKind.SIDE else WHOLE

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes."""
        return iter(self.roll)

    def __len__(self) -> int:
        return len(self._entries)
