"""The catalog: every namespace's runs, where their blocks lie, and the one way in which blocks leave.

Owns the structures; knows no requests, leases or futures. The ladder's lock guards all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvstore.api import U32Array
from kvstore.core.eviction import EvictionPolicy
from kvstore.core.farewells import dismiss
from kvstore.core.frames import Frame, Node, Slice
from kvstore.core.graves import Graves
from kvstore.core.index import RunIndex
from kvstore.core.ledger import Departed, DepartedLedger
from kvstore.core.loose import LooseIndex
from kvstore.core.plan import Plan
from kvstore.core.quotas import NOBODY, Quotas
from kvstore.core.retention import Retention, Touch
from kvstore.core.room import Room
from kvstore.core.segments import Segment, SegmentTable
from kvstore.core.slabs import SlabAllocator
from kvstore.core.sleepers import Sleepers
from kvstore.core.unread import UnreadFrames
from kvstore.errors import UnknownNamespace
from kvstore.events import Events
from kvstore.layout import Part
from kvstore.namespace import Namespace
from kvstore.tiers.base import FrameKind, FrameLocation, HostMemory
from kvstore.types import HASH_BYTES, Addressing, Fingerprint, MissReason, Tier, key_at

if TYPE_CHECKING:
    from kvstore.core.puts import PendingPut


class NamespaceState:
    """One open namespace: its tree of runs, and its loose blocks (side parts, or everything when flat)."""

    def __init__(self, namespace: Namespace, catalog: Catalog) -> None:
        self.namespace = namespace
        self.fingerprint = namespace.fingerprint
        self.flat = namespace.addressing is Addressing.FLAT
        self.required: tuple[Part, ...] = tuple(
            namespace.layout.parts[i] for i in namespace.layout.required_parts
        )
        layout = namespace.layout
        groups = ((index, layout.group_of(layout.parts[index])) for index in layout.side_parts)
        self.side_windows = tuple((index, group.window_blocks or 1) for index, group in groups)
        """Side parts, each with how many blocks before a boundary it takes to use that boundary."""
        self.runs = RunIndex(on_split=catalog.on_split, on_join=catalog.on_join)
        self.loose = LooseIndex()
        self._sleepers = catalog.sleepers
        self.pending: dict[bytes, PendingPut] = {}

    def is_empty(self) -> bool:
        """Say whether nothing is stored, visible or not."""
        return not len(self.runs) and not len(self.loose) and self._sleepers.is_empty(self.fingerprint)

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes that are awake, loose ones last."""
        yield from self.runs.nodes()
        yield from self.loose.nodes()

    def stretches(self) -> Iterator[list[Node]]:
        """Yield all nodes that are awake, some at a time, loose ones last; they may come and go meanwhile."""
        yield from self.runs.roll.stretches()
        yield from self.loose.roll.stretches()


class Catalog:
    """Namespaces, frames, host slots and segments, kept consistent with one another."""

    def __init__(
        self,
        *,
        memory: HostMemory,
        policy: EvictionPolicy,
        retention: Retention,
        ledger: DepartedLedger,
        events: Events,
        plan: Plan,
    ) -> None:
        self.memory = memory
        self.slabs = SlabAllocator(first_page=memory.first_page, total_pages=memory.total_pages)
        self.policy = policy
        self.retention = retention
        self.ledger = ledger
        self.events = events
        self.plan = plan
        self.segments = SegmentTable()
        self.sleepers = Sleepers(self.segments)
        self.graves = Graves(plan)
        self.unread = UnreadFrames()
        self.namespaces: dict[Fingerprint, NamespaceState] = {}
        self.room = Room(self)
        self.quotas = Quotas(self, total_pages=memory.total_pages)
        self.partial: dict[Frame, None] = {}
        """Frames on SSD of which some blocks have left the index: a restart would bring those back."""
        self.written_until = 0.0
        """The latest time of writing that a frame found at start tells."""
        self.zombies: dict[Frame, list[tuple[int, int]]] = {}
        self._condemned: dict[Frame, list[U32Array]] = {}

    def state(self, fingerprint: Fingerprint) -> NamespaceState:
        """Return an open namespace.

        Errors: UnknownNamespace.
        """
        found = self.namespaces.get(fingerprint)
        if found is None:
            raise UnknownNamespace(
                f"namespace {fingerprint.hex() or '(empty)'} is not open on this store: open it first"
            )
        return found

    def on_split(self, head: Node, tail: Node) -> None:
        """The index cut a node."""
        self.policy.split(head, tail)

    def on_join(self, kept: Node, gone: Node) -> None:
        """The index merged a node into its parent."""
        self.policy.join(kept, gone)

    # Touch

    def touch_path(self, node: Node, *, by: str, now: float, how: Touch, above: Node | None = None) -> None:
        """Let a class touch a node and its ancestors; leaf first, so that the order keeps ancestors behind
        descendants. A write ends below the node `above`: from there on it touches what it follows.
        """
        for item in RunIndex.path(node):
            if item is above:
                how = Touch.BELOW
            self.retention.touch(item, by=by, now=now, how=how)
            self.policy.touch(item, is_read=how is Touch.READ)
            for piece in item.slices:
                piece.frame.uses += 1
                piece.frame.used_at = now
                if piece.frame.location is not None:
                    self.segments.touch(piece.frame, item.retention_class, item.since)
                    self.plan.touched[piece.frame] = None

    def came_back(self, node: Node) -> None:
        """A node has blocks in host memory again: it joins the order, and its ancestors stay behind it."""
        if node not in self.policy:
            self.policy.add(node)
            for ancestor in RunIndex.path(node.parent):
                self.policy.touch(ancestor, is_read=False)

    def join_path(self, state: NamespaceState, node: Node) -> None:
        """Merge neighbours of equal state along a path, from the leaf up."""
        for item in RunIndex.path(node):
            parent = item.parent
            if parent is not None and parent.count and not item.loose:
                state.runs.join(parent)

    # Host slots

    def allocate(self, count: int, part: Part, *, by: str = NOBODY, bar: float = math.inf) -> U32Array:
        """Hand out up to `count` slots for a part to a class, evicting what has to go; fewer when the rest is
        held or worth `bar`, or the class is full.

        Shapes: u32[<= count].
        """
        stride = part.stride_pages
        slots = self.room.allocate(self.quotas.admit(count, stride_pages=stride, name=by), part, bar=bar)
        self.quotas.charge(slots, stride_pages=stride, name=by)
        return slots

    def free_slots(self, slots: U32Array) -> None:
        """Give slots of one size back; their generations move on, so that a late reader notices."""
        if len(slots):
            self.memory.generations[slots] += 1
            before = self.slabs.used_pages
            self.slabs.free(slots)
            self.quotas.give_back(slots, stride_pages=(before - self.slabs.used_pages) // len(slots))

    def free_blocks(self, frame: Frame, blocks: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        if frame.host is None:
            return
        for part in frame.host:
            taken = part.slots[blocks]
            self.free_slots(taken[taken != 0])
            part.slots[blocks] = 0
        if not frame.host[0].slots.any():
            frame.host = None

    # Holds

    def hold(self, frame: Frame, end: int) -> None:
        """A lease or I/O needs the blocks of a frame before `end` to stay where they are."""
        frame.hold(end)

    def unhold(self, frame: Frame, end: int) -> None:
        """The opposite; blocks that were dropped meanwhile give up their slots now."""
        frame.unhold(end)
        if not frame.holds:
            self._free_condemned(frame)
            for start, count in self.zombies.pop(frame, ()):
                self.free_blocks(frame, np.arange(start, start + count))
            if frame.nodes:
                self.shrink(frame)

    # Departure: the one way out

    def drop(self, node: Node, at: int, reason: MissReason, *, cascade: bool = False) -> int:
        """Remove a node's blocks from `at` on; descendants become orphans, or leave too with `cascade`.

        Returns how many blocks left.
        """
        dropped = 0
        if cascade:
            for child in list(node.children.values()):
                for item in reversed(RunIndex.below(child)):
                    dropped += self._drop_node(item, 0, reason)
        return dropped + self._drop_node(node, at, reason)

    def _drop_node(self, node: Node, at: int, reason: MissReason) -> int:
        state = self.namespaces[node.slices[0].frame.fingerprint]
        self.policy.leaving(node, at)
        gone = state.loose.truncate(node, at) if node.loose else state.runs.truncate(node, at)
        if not node.count:
            self.policy.remove(node)
        left_at = self.retention.left_at(self.retention.end(node), reason)
        departed = Departed(reason, node.retention_class, node.since, left_at)
        for piece in gone:
            if piece.frame.kind is FrameKind.MAIN:
                size = piece.count * piece.frame.block_stride_bytes
                self.ledger.note(piece.keys, departed, space=state.fingerprint, size_bytes=size)
            self._leave(piece, reason)
        return sum(piece.count for piece in gone)

    def _leave(self, piece: Slice, reason: MissReason) -> None:
        frame = piece.frame
        end = piece.start + piece.count
        held_end = min(max(piece.start, frame.held_blocks), end)
        if held_end > piece.start:
            self.zombies.setdefault(frame, []).append((piece.start, held_end - piece.start))
        self.free_blocks(frame, np.arange(held_end, end))
        if frame.location is None:
            # An acknowledgement promises all blocks of the frame; not all of them will be written now.
            frame.tell_waiters(durable=False)
        if frame.nodes:
            if frame.location is not None:
                self.partial[frame] = None
            self.shrink(frame)
            return
        frame.tell_waiters(durable=False)
        self._count_gone(frame, self.discard(frame), reason)

    def discard(self, frame: Frame) -> FrameLocation | None:
        """Nothing refers to a frame any more: its copy on SSD goes; returns where that was."""
        frame.dead = True
        self.partial.pop(frame, None)
        location = self.segments.forget(frame)
        if location is not None:
            self.graves.bury(location, frame.fingerprint)
        return location

    def _count_gone(self, frame: Frame, location: FrameLocation | None, reason: MissReason) -> None:
        if location is not None and reason is MissReason.EXPIRED:
            amount = location.length_bytes
            self.events.add("kvstore_expired_bytes_total", amount, **{"class": frame.retention_class})
        elif location is not None and reason is MissReason.EVICTED:
            self.events.add("kvstore_evicted_bytes_total", location.length_bytes, tier=str(Tier.SSD))

    def shrink(self, frame: Frame) -> None:
        """Cut the unreferenced tail off a frame that is in host memory only, so that it can still be
        written behind.
        """
        if frame.location is not None or frame.holds or frame.host is None:
            return
        end = max(p.start + p.count for node in frame.nodes for p in node.slices if p.frame is frame)
        if end < frame.count:
            frame.keys = frame.keys[: end * HASH_BYTES]
            frame.count = end
            for part in frame.host:
                part.slots, part.generations = part.slots[:end].copy(), part.generations[:end].copy()
                part.lengths, part.digests = part.lengths[:end].copy(), part.digests[:end].copy()

    def distrust(self, frame: Frame, block: int) -> None:
        """A reader found a block's host copy bad: the next one reads it again from SSD, or it is gone when
        there is no other copy. Its slots stay taken while somebody may still look at them.
        """
        if frame.location is None:
            self.drop_block(frame, block, MissReason.CORRUPT)
            return
        for part in frame.host or ():
            if part.slots[block]:
                self.condemn(frame, part.slots[block : block + 1].copy())
                part.slots[block] = 0

    def condemn(self, frame: Frame, slots: U32Array) -> None:
        """Give up slots of a frame that a reader may have been told of: they go with the last hold."""
        if frame.holds:
            self._condemned.setdefault(frame, []).append(slots)
        else:
            self.free_slots(slots)

    def _free_condemned(self, frame: Frame) -> None:
        for slots in self._condemned.pop(frame, ()):
            self.free_slots(slots)

    def drop_block(self, frame: Frame, block: int, reason: MissReason) -> None:
        """Remove one block of a frame from the index, and with it the rest of its node."""
        for node in frame.nodes:
            offset = 0
            for piece in node.slices:
                if piece.frame is frame and piece.start <= block < piece.start + piece.count:
                    self.drop(node, offset + block - piece.start, reason)
                    return
                offset += piece.count

    @staticmethod
    def lost_any(frame: Frame) -> bool:
        """Say whether some of a frame's blocks are no longer in the index."""
        return sum(p.count for node in frame.nodes for p in node.slices if p.frame is frame) < frame.count

    def carve(self, node: Node, index: int) -> Frame:
        """Give slice `index` of a node a frame of its own, so that it can be written without its former
        neighbours.

        Only for frames in host memory alone that nothing holds.
        """
        piece = node.slices[index]
        old = piece.frame
        assert old.location is None and not old.holds
        assert old.host is not None
        start, end = piece.start, piece.start + piece.count
        frame = Frame(
            fingerprint=old.fingerprint,
            kind=old.kind,
            parent=old.parent if start == 0 else key_at(old.keys, start - 1),
            keys=piece.keys,
            parts=old.parts,
            retention_class=old.retention_class,
            written_at=old.written_at,
            provenance=old.provenance,
        )
        frame.uses = old.uses
        frame.host = tuple(part.cut(start, end) for part in old.host)
        for part in old.host:
            part.slots[start:end] = 0
        node.slices = (*node.slices[:index], Slice(frame, 0, piece.count), *node.slices[index + 1 :])
        frame.join(node)
        if not any(other.frame is old for other in node.slices):
            old.leave(node)
        if old.nodes:
            self.shrink(old)
        return frame

    def lost_on_ssd(self, frame: Frame, block: int) -> None:
        """A frame's copy on SSD is bad from `block` on: what is in host memory too stays there alone."""
        location = frame.location
        if location is not None and frame.nodes and frame.fully_resident():
            self.forget_on_ssd(frame, MissReason.CORRUPT)
            self.graves.bury(location, frame.fingerprint)
        else:
            self.drop_block(frame, block, MissReason.CORRUPT)

    def release_segment(self, segment: Segment, reason: MissReason) -> int:
        """Let a whole segment go: expired ones leave children as orphans, evicted ones take them along."""
        frames, asleep = list(segment.frames), self.sleepers.of_segment(segment.number)
        spaces = {frame.fingerprint for frame in frames}
        spaces.update(self.sleepers.shape(sleeper).namespace for sleeper in asleep)
        self.graves.bury_segment(segment.number, spaces)
        self.segments.release(segment.number)
        freed = segment.bytes
        for frame in frames:
            self.forget_on_ssd(frame, reason)
        dismiss(self, asleep, reason)
        return freed

    def forget_on_ssd(self, frame: Frame, reason: MissReason) -> int:
        """A frame's copy on SSD is gone: blocks that are not in host memory leave; returns how many."""
        location, left = self.segments.forget(frame), 0
        self.partial.pop(frame, None)
        if frame.nodes:
            self._count_gone(frame, location, reason)
        for node in frame.nodes:
            at = self._first_lost(node, frame, everything=reason is MissReason.EXPIRED)
            if at is not None and node.count:
                left += self.drop(node, at, reason, cascade=reason is MissReason.EVICTED)
        if frame.nodes:
            self.shrink(frame)
        return left

    def moved(self, frame: Frame, copy: Frame, start: int) -> None:
        """Blocks of a frame lie on SSD once more, in a frame of their own, which takes over slots that nobody
        holds; the old one keeps its place until its segment goes."""
        self.partial[frame], end = None, start + copy.count
        frame.copies += ((start, copy),)
        if copy.nodes[0].loose:
            self.namespaces[frame.fingerprint].loose.moved(frame, copy)
        held_end = min(max(start, frame.held_blocks), end)
        if held_end > start:
            self.zombies.setdefault(frame, []).append((start, held_end - start))
        if frame.host is None:
            return
        if frame.resident(held_end, end - held_end).any():
            copy.host = tuple(part.cut(start, end) for part in frame.host)
            for mine, theirs in zip(frame.host, copy.host, strict=True):
                mine.slots[held_end:end] = 0
                theirs.slots[: held_end - start] = 0
        if not frame.host[0].slots.any():
            frame.host = None

    def is_gone(self, frame: Frame, start: int, count: int) -> bool:
        """Say whether some of the blocks have left the index while somebody held them: not if they moved."""
        held = self.zombies.get(frame, ())
        is_hit = any(first < start + count and start < first + n for first, n in held)
        return is_hit and frame.there(start, count) < count

    def _first_lost(self, node: Node, frame: Frame, *, everything: bool) -> int | None:
        offset = 0
        for piece in node.slices:
            if piece.frame is frame:
                mask = frame.resident(piece.start, piece.count)
                if everything or not mask.all():
                    return offset + (0 if everything else int(np.argmin(mask)))
            offset += piece.count
        return None

    def expire_host(self, nodes: Iterable[Node], now: float) -> None:
        """Give up the host slots of expired nodes; what lies on SSD as well stays until its segment dies."""
        for node in nodes:
            if node not in self.policy or not self.retention.may_go(node, now):
                continue
            if any(piece.frame.holds for piece in node.slices):
                continue
            for piece in node.slices:
                blocks = np.flatnonzero(piece.frame.resident(piece.start, piece.count)) + piece.start
                freed = len(blocks) * piece.frame.block_stride_bytes
                self.events.add("kvstore_expired_bytes_total", freed, **{"class": node.retention_class})
            if all(piece.frame.location is not None for piece in node.slices):
                self._release_host(node)
            else:
                self.drop(node, 0, MissReason.EXPIRED)

    def _release_host(self, node: Node) -> None:
        for piece in node.slices:
            self.free_blocks(piece.frame, np.arange(piece.start, piece.start + piece.count))
        self.policy.remove(node)
