"""Match: the longest visible prefix of a request's keys, its usable boundaries, and why it ended there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstore.api import BOUNDARIES_MAX, Extent, TierRun, U32Array
from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.frames import Frame, Node, PartSlots
from kvstore.core.index import Step
from kvstore.core.limits import Limits
from kvstore.core.sleepers import RunsAsleep
from kvstore.types import HASH_BYTES, MissReason, Tier, key_at, key_count


@dataclass(slots=True)
class Item:
    """Blocks [start, start + count) of a frame that answer blocks [first, first + count) of a request."""

    frame: Frame
    start: int
    count: int
    first: int


@dataclass(slots=True)
class Found:
    """What a match found: stretches of frames in order, side parts apart, and the nodes that were used."""

    items: list[Item] = field(default_factory=list)
    side: list[Item] = field(default_factory=list)
    blocks: int = 0
    boundaries: tuple[int, ...] = ()
    reason: MissReason | None = None
    steps: list[tuple[Node, int]] = field(default_factory=list)
    loose: dict[int, Node] = field(default_factory=dict)


class Matcher:
    """Pure look-up: touches nothing."""

    def __init__(self, catalog: Catalog, limits: Limits) -> None:
        self._catalog = catalog
        self._limits = limits

    def find(
        self, state: NamespaceState, keys: bytes, *, now: float, exact_only: bool, undeclared: bool = False
    ) -> Found:
        """Walk the request's keys to the first that is absent, expired or incomplete.

        Errors: RunsAsleep.
        """
        found = Found()
        if state.flat:
            stopped = self._find_flat(found, state, keys, now, exact_only)
        else:
            steps = state.runs.walk(keys, undeclared=undeclared)
            stopped = self._find_chain(found, steps, now, exact_only)
        total = key_count(keys)
        if found.blocks < total:
            if stopped is None and not state.flat:
                stopped = self._why_asleep(state, keys, found.blocks)
            found.reason = stopped or self._why_absent(state, key_at(keys, found.blocks))
        self._boundaries(found, state, keys, now)
        return found

    def _why_asleep(self, state: NamespaceState, keys: bytes, at: int) -> MissReason | None:
        """Have the frames woken that may go on where a match ended; what the disk did not tell of is a miss.

        Errors: RunsAsleep.
        """
        sleepers = self._catalog.sleepers
        if not sleepers.beginning_with(state.fingerprint, key_at(keys, at)):
            return None
        wanted = sleepers.wanted(sleepers.along(state.fingerprint, keys[at * HASH_BYTES :]))
        if wanted:
            raise RunsAsleep(wanted, keys)
        return MissReason.TIER_DOWN

    def _find_chain(self, found: Found, steps: list[Step], now: float, exact_only: bool) -> MissReason | None:
        for node, matched in steps:
            if not self._catalog.retention.alive(node, now):
                return MissReason.EXPIRED
            used = self._take(found, node, matched, exact_only)
            if used:
                found.steps.append((node, used))
            if used < matched:
                return MissReason.IDENTITY_MISMATCH
        return None

    def _take(self, found: Found, node: Node, matched: int, exact_only: bool) -> int:
        taken = 0
        for piece in node.slices:
            count = min(piece.count, matched - taken)
            if count <= 0 or (exact_only and piece.frame.provenance):
                break
            found.items.append(Item(piece.frame, piece.start, count, found.blocks))
            found.blocks += count
            taken += count
        return taken

    def _find_flat(
        self, found: Found, state: NamespaceState, keys: bytes, now: float, exact_only: bool
    ) -> MissReason | None:
        for index in range(key_count(keys)):
            entry = state.loose.get(key_at(keys, index))
            if entry is None:
                return None
            frame, position = entry
            node = frame.nodes[0]
            if not self._catalog.retention.alive(node, now):
                return MissReason.EXPIRED
            if exact_only and frame.provenance:
                return MissReason.IDENTITY_MISMATCH
            found.loose[id(node)] = node
            last = found.items[-1] if found.items else None
            if last is not None and last.frame is frame and last.start + last.count == position:
                last.count += 1
            else:
                found.items.append(Item(frame, position, 1, index))
            found.blocks += 1
        return None

    def presence(self, state: NamespaceState, keys: bytes, *, now: float, exact_only: bool) -> bytes:
        """Return one bit per key, least significant first; in a chain only the visible prefix counts."""
        total = key_count(keys)
        bits = np.zeros(total, np.bool_)
        if not state.flat:
            bits[: self.find(state, keys, now=now, exact_only=exact_only).blocks] = True
        else:
            for index in range(total):
                bits[index] = (
                    self.find(state, key_at(keys, index), now=now, exact_only=exact_only).blocks == 1
                )
        return np.packbits(bits, bitorder="little").tobytes()

    def _why_absent(self, state: NamespaceState, key: bytes) -> MissReason:
        put = state.pending.get(key)
        if put is not None:
            return MissReason.PART_MISSING if put.partly_committed else MissReason.IN_FLIGHT
        reason = self._catalog.ledger.reason(key, space=state.fingerprint)
        if reason is MissReason.NEVER_STORED and state.is_empty() and self._has_sibling(state):
            return MissReason.IDENTITY_MISMATCH
        return reason

    def _has_sibling(self, state: NamespaceState) -> bool:
        mine = state.namespace
        return any(
            other is not state
            and other.namespace.model == mine.model
            and other.namespace.tenant == mine.tenant
            and not other.is_empty()
            for other in self._catalog.namespaces.values()
        )

    # Usable boundaries

    def _boundaries(self, found: Found, state: NamespaceState, keys: bytes, now: float) -> None:
        if not found.blocks:
            return
        if not state.side_windows or state.flat:
            found.boundaries = (found.blocks,)
            return
        usable: list[int] = []
        for boundary in range(found.blocks, max(0, found.blocks - self._limits.boundary_scan_blocks_max), -1):
            if len(usable) == BOUNDARIES_MAX:
                break
            side = self._side_at(state, keys, boundary, now)
            if side is not None:
                usable.append(boundary)
                if len(usable) == 1:
                    found.side = side
        found.boundaries = tuple(usable)
        if found.reason is None and found.blocks and (not usable or usable[0] < found.blocks):
            found.reason = MissReason.PART_MISSING

    def _side_at(self, state: NamespaceState, keys: bytes, boundary: int, now: float) -> list[Item] | None:
        items: list[Item] = []
        for part, window in state.side_windows:
            mine: list[Item] = []
            # The last block first: most boundaries lack it.
            for block in range(boundary - 1, max(0, boundary - window) - 1, -1):
                entry = state.loose.get(key_at(keys, block), part)
                if entry is None or not self._catalog.retention.alive(entry[0].nodes[0], now):
                    return None
                mine.append(Item(entry[0], entry[1], 1, block))
            items += reversed(mine)
        return items


# From items to extents


def tier_runs(items: list[Item]) -> tuple[TierRun, ...]:
    """Return in which tier each block of the items lies now, run-length coded."""
    runs: list[TierRun] = []
    for item in items:
        mask = item.frame.resident(item.start, item.count)
        for start, count, value in _stretches(mask):
            tier = Tier.HOST if value else Tier.SSD
            if runs and runs[-1].tier is tier:
                runs[-1] = TierRun(tier, runs[-1].count + count)
            else:
                runs.append(TierRun(tier, count))
            del start
    return tuple(runs)


def _stretches(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[tuple[int, int, bool]]:
    there = np.count_nonzero(mask)
    if there in (0, len(mask)):
        return [(0, len(mask), bool(there))]
    edges = np.flatnonzero(np.diff(mask)) + 1
    starts = [0, *edges.tolist()]
    ends = [*edges.tolist(), len(mask)]
    return [(a, b - a, bool(mask[a])) for a, b in zip(starts, ends, strict=True)]


class _Stretch:
    __slots__ = ("end", "first", "pieces")

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = first
        self.pieces: list[tuple[PartSlots, int, int]] = []

    def extent(self, part: int) -> Extent:
        def joined(name: str) -> U32Array:
            arrays = [getattr(p, name)[a:b] for p, a, b in self.pieces]
            return arrays[0].copy() if len(arrays) == 1 else np.concatenate(arrays)

        digests = b"".join(p.digests[a:b].tobytes() for p, a, b in self.pieces)
        return Extent(part, self.first, joined("slots"), joined("generations"), joined("lengths"), digests)


def extents(items: list[Item], *, parts: tuple[int, ...], limit: int) -> tuple[Extent, ...]:
    """Return where the resident blocks below `limit` lie, one extent per part and contiguous stretch of
    blocks.
    """
    done: list[tuple[int, _Stretch]] = []
    current: dict[int, _Stretch] = {}
    for item in items:
        count = min(item.count, limit - item.first)
        if count <= 0 or item.frame.host is None:
            continue
        for start, length, value in _stretches(item.frame.resident(item.start, count)):
            if not value:
                continue
            for part in item.frame.host:
                if parts and part.part.index not in parts:
                    continue
                stretch = current.get(part.part.index)
                if stretch is None or stretch.end != item.first + start:
                    stretch = current[part.part.index] = _Stretch(item.first + start)
                    done.append((part.part.index, stretch))
                stretch.pieces.append((part, item.start + start, item.start + start + length))
                stretch.end = item.first + start + length
    return tuple(stretch.extent(part) for part, stretch in done)
