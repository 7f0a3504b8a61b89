"""Making room in host memory: who leaves when a slot is needed and none is free."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.api import U32Array
from kvstore.core.frames import Frame, Node
from kvstore.layout import Part
from kvstore.types import PAGE_BYTES, MissReason, Tier

if TYPE_CHECKING:
    from kvstore.core.catalog import Catalog


class Room:
    """Eviction from host memory: by the policy's order, leaves first; by slab when slot sizes differ."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def allocate(self, count: int, part: Part, *, bar: float = math.inf) -> U32Array:
        """Hand out up to `count` slots; fewer when everything left is held, or worth `bar` or more.

        Shapes: u32[<= count].
        """
        slabs, stride = self._catalog.slabs, part.stride_pages
        slots = slabs.allocate(count, stride_pages=stride)
        while len(slots) < count and slabs.fits(stride_pages=stride):
            missing = count - len(slots)
            if not self._evict(missing * stride, bar):
                break
            more = slabs.allocate(missing, stride_pages=stride)
            if not len(more) and self._vacate_slab(stride):
                more = slabs.allocate(missing, stride_pages=stride)
            slots = np.concatenate((slots, more))
        return slots

    def _evict(self, pages: int, bar: float) -> bool:
        slabs = self._catalog.slabs
        before = slabs.used_pages
        for node, most in self._catalog.policy.victims(bar):
            block_pages = node.slices[-1].frame.block_stride_bytes // PAGE_BYTES
            self.evict_from(node, min(pages - (before - slabs.used_pages), most * block_pages))
            if before - slabs.used_pages >= pages:
                return True
        return before > slabs.used_pages

    def evict_from(self, node: Node, pages: int) -> None:
        """Take up to so many pages from a node's tail. What lies in host alone must be a leaf."""
        catalog, offset = self._catalog, node.count
        for piece in reversed(list(node.slices)):
            offset -= piece.count
            free = max(0, piece.frame.held_blocks - piece.start)
            if free >= piece.count or pages <= 0:
                return
            stride = piece.frame.block_stride_bytes // PAGE_BYTES
            picked = np.flatnonzero(piece.frame.resident(piece.start, piece.count)[free:])[::-1] + free
            picked = picked[: -(-pages // stride)]
            if len(picked) and piece.frame.location is None:
                if node.children:
                    return
                lowest = int(picked.min())
                self._count(piece.frame, piece.count - lowest)
                catalog.drop(node, offset + lowest, MissReason.EVICTED)
                pages -= (piece.count - lowest) * stride
            elif len(picked):
                self._count(piece.frame, len(picked))
                catalog.free_blocks(piece.frame, piece.start + picked)
                pages -= len(picked) * stride
            if free:
                return
        self._forget_if_gone(node)

    def _forget_if_gone(self, node: Node) -> None:
        if not any(piece.frame.resident(piece.start, piece.count).any() for piece in node.slices):
            self._catalog.policy.remove(node)

    def _count(self, frame: Frame, blocks: int) -> None:
        amount = blocks * frame.block_stride_bytes
        self._catalog.events.add("kvstore_evicted_bytes_total", amount, tier=str(Tier.HOST))

    def _vacate_slab(self, stride_pages: int) -> bool:
        """Empty the least used slab of another slot size: slots given up here and there make no slab free."""
        slab = self._catalog.slabs.emptiest_slab(other_than=stride_pages)
        if slab is None:
            return False
        first_page, end_page, used = slab
        before = self._catalog.slabs.used_pages
        for node in self._tenants(first_page, end_page, used):
            if node.count:
                self._vacate(node, first_page, end_page)
        return self._catalog.slabs.used_pages < before

    def _tenants(self, first_page: int, end_page: int, used: int) -> list[Node]:
        """Return the nodes of which blocks lie between pages, where so many slots are used: all slots of a
        shelf are looked at at once.
        """
        found: dict[Node, None] = {}
        for nodes in chain.from_iterable(s.stretches() for s in self._catalog.namespaces.values()):
            frames = {p.frame: None for node in nodes for p in node.slices if p.frame.host is not None}
            parts = [(frame, part.slots) for frame in frames for part in frame.host or ()]
            if not parts:
                continue
            slots = np.concatenate([mine for _, mine in parts])
            inside = np.flatnonzero((slots >= first_page) & (slots < end_page))
            ends = np.cumsum([len(mine) for _, mine in parts])
            for index in np.unique(np.searchsorted(ends, inside, side="right")).tolist():
                found.update(dict.fromkeys(parts[index][0].nodes))
            used -= len(inside)
            if used <= 0:
                break
        return list(found)

    def _vacate(self, node: Node, first_page: int, end_page: int) -> None:
        offset = 0
        for piece in list(node.slices):
            inside = _inside(piece.frame, first_page, end_page)[piece.start : piece.start + piece.count]
            blocks = np.flatnonzero(inside)
            if len(blocks) and not piece.frame.holds:
                self._count(piece.frame, len(blocks))
                if piece.frame.location is None:
                    self._catalog.drop(node, offset + int(blocks[0]), MissReason.EVICTED, cascade=True)
                    break
                self._catalog.free_blocks(piece.frame, piece.start + blocks)
            offset += piece.count
        self._forget_if_gone(node)


def _inside(frame: Frame, first_page: int, end_page: int) -> npt.NDArray[np.bool_]:
    inside = np.zeros(frame.count, np.bool_)
    for part in frame.host or ():
        inside |= (part.slots >= first_page) & (part.slots < end_page)
    return inside
