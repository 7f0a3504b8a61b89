"""Frames, slices and nodes: the shapes that the index is made of.

A *frame* is a run as written together; it is immutable, and says where its blocks lie. A *node* is a
maximal chain with one state (the class that holds it, and since when) over slices of frames. Leases and I/O
hold frames, never nodes, so nodes may split and merge at any time without moving data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.api import U32Array
from kvstore.layout import Part
from kvstore.tiers.base import FrameKind, FrameLocation
from kvstore.types import DIGEST_BYTES, HASH_BYTES, BlockHash, Fingerprint, key_at

if TYPE_CHECKING:
    from kvstore.core.loads import Load
    from kvstore.core.roll import Shelf

NOTHING: MutableMapping[Any, Any] = MappingProxyType({})  # type: ignore[assignment]
"""What most frames have of holds and loads: one empty mapping for all; who adds to it makes one."""


class PartSlots:
    """Where the blocks of one part lie in host memory, and what their bytes must be.

    Shapes: slots, generations, lengths u32[n] (slot 0: not resident); digests u8[n, 16 x segments].
    """

    __slots__ = ("digests", "generations", "lengths", "part", "slots")

    def __init__(self, part: Part, count: int) -> None:
        self.part = part
        self.slots: U32Array = np.zeros(count, np.uint32)
        self.generations: U32Array = np.zeros(count, np.uint32)
        self.lengths: U32Array = np.zeros(count, np.uint32)
        self.digests: npt.NDArray[np.uint8] = np.zeros((count, DIGEST_BYTES * len(part.segments)), np.uint8)

    def cut(self, start: int, end: int) -> PartSlots:
        """Return a copy of blocks [start, end)."""
        piece = PartSlots(self.part, 0)
        piece.slots, piece.generations = self.slots[start:end].copy(), self.generations[start:end].copy()
        piece.lengths, piece.digests = self.lengths[start:end].copy(), self.digests[start:end].copy()
        return piece


class Frame:
    """A run of blocks as written together: keys, parts, and their place in host memory and on SSD."""

    __slots__ = (
        "copies",
        "count",
        "dead",
        "fingerprint",
        "holds",
        "host",
        "keys",
        "kind",
        "loads",
        "location",
        "nodes",
        "parent",
        "parts",
        "provenance",
        "queued",
        "retention_class",
        "used_at",
        "uses",
        "waiters",
        "written_at",
    )

    def __init__(
        self,
        *,
        fingerprint: Fingerprint,
        kind: FrameKind,
        parent: BlockHash,
        keys: bytes,
        parts: tuple[Part, ...],
        retention_class: str,
        written_at: float,
        provenance: int = 0,
    ) -> None:
        self.fingerprint = fingerprint
        self.kind = kind
        self.parent = parent
        self.keys = keys
        self.count = len(keys) // HASH_BYTES
        self.parts = parts
        self.retention_class = retention_class
        self.written_at = written_at
        self.provenance = provenance
        self.host: tuple[PartSlots, ...] | None = None
        self.location: FrameLocation | None = None
        self.holds: MutableMapping[int, int] = NOTHING
        self.queued = False
        self.uses = 0
        """How often it was touched in this process, its put included."""
        self.dead = False
        self.used_at = 0.0
        """When it was last touched or woken: until a while after that it does not fall asleep, whoever holds
        its runs, and since when. Units: wall seconds.
        """
        self.nodes: tuple[Node, ...] = ()
        self.copies: tuple[tuple[int, Frame], ...] = ()
        """Frames that blocks of this one moved to, each with the first of those blocks."""
        self.loads: MutableMapping[int, Load] = NOTHING
        self.waiters: tuple[Callable[[bool], None], ...] = ()

    def tell_waiters(self, *, durable: bool) -> None:
        """Tell those who wait for the frame to be durable how that ended."""
        waiters, self.waiters = self.waiters, ()
        for waiter in waiters:
            waiter(durable)

    def hold(self, end: int) -> None:
        """Somebody needs the blocks before `end` where they are."""
        if not self.holds:
            self.holds = {}
        self.holds[end] = self.holds.get(end, 0) + 1

    def unhold(self, end: int) -> None:
        """The opposite."""
        self.holds[end] -= 1
        if not self.holds[end]:
            del self.holds[end]
        if not self.holds:
            self.holds = NOTHING

    def join(self, node: Node) -> None:
        """A node stands on this frame."""
        if node not in self.nodes:
            self.nodes += (node,)

    def leave(self, node: Node) -> None:
        """A node no longer does; no effect when it did not."""
        if node in self.nodes:
            self.nodes = tuple(other for other in self.nodes if other is not node)

    @property
    def block_stride_bytes(self) -> int:
        """Arena and disk bytes of one block of this frame, all its parts."""
        return sum(part.stride_bytes for part in self.parts)

    @property
    def held_blocks(self) -> int:
        """How many leading blocks somebody holds: a hold of a block covers those before it."""
        return max(self.holds, default=0)

    def resident(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """Return which of the blocks [start, start + count) are in host memory."""
        if self.host is None:
            return np.zeros(count, np.bool_)
        mask: npt.NDArray[np.bool_] = self.host[0].slots[start : start + count] != 0
        return mask

    def fully_resident(self) -> bool:
        """Say whether every block is in host memory."""
        return self.host is not None and bool(self.host[0].slots.all())

    def there(self, start: int, count: int) -> int:
        """Return how many of the blocks [start, start + count) are in the index, here or where they moved."""
        found = sum(
            _overlap(start, count, piece.start, piece.count)
            for node in self.nodes
            for piece in node.slices
            if piece.frame is self
        )
        for first, copy in self.copies:
            if moved := _overlap(start, count, first, copy.count):
                found += copy.there(max(start - first, 0), moved)
        return found

    def slots_for_writing(self) -> tuple[PartSlots, ...]:
        """Return the host arrays, made on first use."""
        if self.host is None:
            self.host = tuple(PartSlots(part, self.count) for part in self.parts)
        return self.host


def _overlap(start: int, count: int, other_start: int, other_count: int) -> int:
    return max(0, min(start + count, other_start + other_count) - max(start, other_start))


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Blocks [start, start + count) of a frame."""

    frame: Frame
    start: int
    count: int

    @property
    def keys(self) -> bytes:
        """Packed hashes of the slice."""
        return self.frame.keys[self.start * HASH_BYTES : (self.start + self.count) * HASH_BYTES]


class Node:
    """A maximal chain with one state over slices of frames.

    The class `retention_class` holds it `since` a wall time: the last touch of a sliding class, the write
    of a fixed one. `loose` nodes hang in no chain: side frames, and frames of flat namespaces.
    """

    __slots__ = (
        "_below",
        "count",
        "loose",
        "parent",
        "parent_hash",
        "retention_class",
        "shelf",
        "since",
        "slices",
    )

    def __init__(
        self,
        slices: Iterable[Slice],
        *,
        parent_hash: BlockHash,
        retention_class: str,
        since: float,
        loose: bool = False,
    ) -> None:
        self.slices = tuple(slices)
        self.count = sum(s.count for s in self.slices)
        self.parent: Node | None = None
        self.parent_hash = parent_hash
        self._below: Node | dict[bytes, Node] | None = None  # most nodes have one child or none
        self.retention_class = retention_class
        self.since = since
        self.loose = loose
        self.shelf: Shelf | None = None
        """Where the roll of its index has it."""

    @property
    def children(self) -> Mapping[bytes, Node]:
        """The nodes that follow the last block, by their first block."""
        below = self._below
        if below is None:
            return NOTHING
        return below if isinstance(below, dict) else {below.head: below}

    def child(self, head: bytes) -> Node | None:
        """Return the child that begins with a block."""
        below = self._below
        if isinstance(below, dict):
            return below.get(head)
        return below if below is not None and below.head == head else None

    def adopt(self, child: Node) -> None:
        """Take a child; one that begins with the same block makes way."""
        below = self._below
        if below is None:
            self._below = child
        elif isinstance(below, dict):
            below[child.head] = child
        else:
            self._below = {below.head: below, child.head: child}
        child.parent = self

    def disown(self, child: Node) -> None:
        """Let a child go."""
        if isinstance(self._below, dict):
            self._below.pop(child.head, None)
        elif self._below is child:
            self._below = None

    def inherit(self, other: Node) -> None:
        """Take over the children of another node; those that were here are let go."""
        self._below, other._below = other._below, None
        for child in self.children.values():
            child.parent = self

    @property
    def head(self) -> bytes:
        """Hash of the first block."""
        return self.slices[0].keys[:HASH_BYTES]

    @property
    def tail(self) -> bytes:
        """Hash of the last block."""
        last = self.slices[-1]
        end = (last.start + last.count) * HASH_BYTES
        return last.frame.keys[end - HASH_BYTES : end]

    def key(self, index: int) -> bytes:
        """Return the hash of a block."""
        for piece in self.slices:
            if index < piece.count:
                return key_at(piece.frame.keys, piece.start + index)
            index -= piece.count
        raise IndexError(index)

    @property
    def keys(self) -> bytes:
        """Packed hashes of all blocks."""
        return b"".join(s.keys for s in self.slices)


def common_blocks(node: Node, keys: bytes, position: int) -> int:
    """Return how many leading blocks of `node` equal `keys` from block `position` on; costs a comparison
    per slice.
    """
    matched, limit = 0, len(keys) // HASH_BYTES - position
    for piece in node.slices:
        count = min(piece.count, limit - matched)
        begin = (position + matched) * HASH_BYTES
        mine = keys[begin : begin + count * HASH_BYTES]
        theirs = piece.frame.keys[piece.start * HASH_BYTES : (piece.start + count) * HASH_BYTES]
        if mine != theirs:
            return matched + _first_difference(mine, theirs)
        matched += count
        if count < piece.count:
            break
    return matched


def _first_difference(mine: bytes, theirs: bytes) -> int:
    left = np.frombuffer(mine, np.uint64).reshape(-1, HASH_BYTES // 8)
    right = np.frombuffer(theirs, np.uint64).reshape(-1, HASH_BYTES // 8)
    return int(np.argmax((left != right).any(axis=1)))


def cut_slices(slices: Iterable[Slice], at: int) -> tuple[list[Slice], list[Slice]]:
    """Cut a list of slices behind its first `at` blocks."""
    left: list[Slice] = []
    right: list[Slice] = []
    for piece in slices:
        take = max(0, min(piece.count, at))
        if take:
            left.append(Slice(piece.frame, piece.start, take))
        if take < piece.count:
            right.append(Slice(piece.frame, piece.start + take, piece.count - take))
        at -= take
    return left, right
