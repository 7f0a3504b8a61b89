"""The oracle: dicts that say which blocks are stored, who holds them since when, and what a put may do next.

It never evicts by itself: the world tells it what left and why, and it checks that there was a reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.api import BOUNDARIES_MAX, PartBlocks
from kvstore.namespace import Namespace
from kvstore.retention import DEFAULT_CLASS, RetentionClass
from kvstore.types import (
    PART_WAIT_SECONDS,
    RESERVATION_SECONDS,
    Addressing,
    GroupKind,
    MissReason,
    TtlMode,
)


@dataclass(slots=True, eq=False)
class Cell:
    """What lives and is touched together: one block of a chain, or blocks put side by side into a loose
    frame.
    """

    retention_class: str
    since: float
    provenance: int = 0
    parent: bytes = b""
    acked: bool = False


@dataclass(slots=True, eq=False)
class ModelPart:
    """One part of a put under way: the blocks it was asked for, was granted, and has committed."""

    wanted: list[bool]
    granted: list[bool]
    committed: int | None = None


@dataclass(slots=True, eq=False)
class ModelPut:
    """All writers under one put_id."""

    put_id: bytes
    parent: bytes
    keys: list[bytes]
    retention_class: str
    provenance: int
    deadline: float
    absent: list[bool] = field(default_factory=list)
    in_flight: list[bool] = field(default_factory=list)
    parts: dict[int, ModelPart] = field(default_factory=dict)
    writers: int = 0
    published: bool = False

    @property
    def partly_committed(self) -> bool:
        return any(part.committed is not None for part in self.parts.values())


class ModelStore:
    """One namespace."""

    def __init__(self, space: Namespace, root: bytes, classes: Sequence[RetentionClass]) -> None:
        self.space, self.root, self.fingerprint = space, root, space.fingerprint
        self.flat = space.addressing is Addressing.FLAT
        self.classes = {c.name: c for c in classes}
        layout = space.layout
        self.required = layout.required_parts
        groups = [(i, layout.group_of(layout.parts[i])) for i in layout.side_parts]
        self.side_windows = [
            (i, group.window_blocks if group.kind is GroupKind.TRAILING_BLOCKS else 1) for i, group in groups
        ]
        self.blocks: dict[bytes, Cell] = {}
        self.sides: dict[tuple[int, bytes], Cell] = {}
        self.pending: dict[bytes, ModelPut] = {}
        self.puts: dict[bytes, ModelPut] = {}
        self.left: dict[bytes, MissReason] = {}
        self.may_return: set[bytes] = set()

    # Time

    def held_by(self, name: str) -> RetentionClass:
        return self.classes.get(name) or self.classes[DEFAULT_CLASS]

    def end(self, cell: Cell) -> float:
        return cell.since + self.held_by(cell.retention_class).ttl_seconds

    def alive(self, cell: Cell | None, now: float) -> bool:
        return cell is not None and now < self.end(cell)

    def touch(self, cell: Cell, by: str, now: float, *, is_write: bool, is_below: bool = False) -> None:
        """A read; a write of the cell itself; or, `is_below`, a write of what follows it."""
        toucher = self.held_by(by or cell.retention_class)
        is_same = toucher.name == cell.retention_class
        if toucher.mode is TtlMode.FIXED and not is_write and (not is_below or is_same):
            return
        if now + toucher.ttl_seconds >= self.end(cell) or (is_write and now >= self.end(cell)):
            cell.retention_class, cell.since = toucher.name, now

    def touch_path(
        self, key: bytes, by: str, now: float, *, is_write: bool, written: Collection[bytes] = ()
    ) -> None:
        """Touch a block and its ancestors; in a flat namespace, what lives together with it. A write touches
        those `written` as such, and what they follow as that.
        """
        cell = self.blocks.get(key)
        while cell is not None:
            own = is_write and (self.flat or key in written)
            self.touch(cell, by, now, is_write=own, is_below=is_write)
            key, cell = cell.parent, None if self.flat else self.blocks.get(cell.parent)

    def path(self, key: bytes) -> list[bytes]:
        """A block of a chain and its ancestors."""
        found = []
        while key in self.blocks:
            found.append(key)
            key = self.blocks[key].parent
        return found

    # Match

    def visible(self, keys: list[bytes], now: float, *, exact_only: bool = False) -> int:
        """How many leading keys are there and alive."""
        for index, key in enumerate(keys):
            cell = self.blocks.get(key)
            if not self.alive(cell, now) or (exact_only and cell is not None and cell.provenance):
                return index
        return len(keys)

    def boundaries(self, keys: list[bytes], blocks: int, now: float) -> tuple[int, ...]:
        if not blocks:
            return ()
        if not self.side_windows or self.flat:
            return (blocks,)
        usable = [h for h in range(blocks, 0, -1) if self._side_at(keys, h, now) is not None]
        return tuple(usable[:BOUNDARIES_MAX])

    def _side_at(self, keys: list[bytes], boundary: int, now: float) -> list[Cell] | None:
        cells = []
        for part, window in self.side_windows:
            for block in range(max(0, boundary - window), boundary):
                cell = self.sides.get((part, keys[block]))
                if cell is None or not self.alive(cell, now):
                    return None
                cells.append(cell)
        return cells

    def reasons(
        self, keys: list[bytes], blocks: int, now: float, *, exact_only: bool
    ) -> set[MissReason | None]:
        """Which reasons the answer may give for ending after `blocks`."""
        if blocks == len(keys):
            found = self.boundaries(keys, blocks, now)
            return {None} if found and found[0] == blocks else {MissReason.PART_MISSING}
        cell = self.blocks.get(keys[blocks])
        if cell is not None:
            return {MissReason.EXPIRED if not self.alive(cell, now) else MissReason.IDENTITY_MISMATCH}
        put = self.pending.get(keys[blocks])
        if put is not None:
            return {MissReason.PART_MISSING if put.partly_committed else MissReason.IN_FLIGHT}
        return {self.left.get(keys[blocks], MissReason.NEVER_STORED), MissReason.FORGOTTEN}

    def match(self, keys: list[bytes], blocks: int, by: str, now: float) -> None:
        """Touch what a match of this many blocks used."""
        if self.flat:
            for cell in {id(self.blocks[key]): self.blocks[key] for key in keys[:blocks]}.values():
                self.touch(cell, by, now, is_write=False)
        elif blocks:
            self.touch_path(keys[blocks - 1], by, now, is_write=False)
        best = self.boundaries(keys, blocks, now)
        if best and not self.flat:
            cells = self._side_at(keys, best[0], now) or []
            for cell in {id(c): c for c in cells}.values():
                self.touch(cell, "", now, is_write=False)

    # Put

    def start(self, put: ModelPut, now: float) -> None:
        """A first writer reserves: what is present is renewed."""
        put.absent = [key not in self.blocks for key in put.keys]
        put.in_flight = [a and key in self.pending for a, key in zip(put.absent, put.keys, strict=True)]
        for key, absent in zip(put.keys, put.absent, strict=True):
            if not absent:
                self.touch_path(key, put.retention_class, now, is_write=True, written=put.keys)
        if all(put.absent) and not self.flat:
            self.touch_path(put.parent, put.retention_class, now, is_write=True)

    def supersede(self, keys: list[bytes], monotonic: float) -> None:
        """A put of the same blocks that waits in vain for a rank makes way."""
        for put in {id(p): p for key in keys if (p := self.pending.get(key))}.values():
            if not put.writers and monotonic >= put.deadline - RESERVATION_SECONDS + PART_WAIT_SECONDS:
                self.close(put)

    def wanted(self, put: ModelPut, piece: PartBlocks, now: float) -> list[bool]:
        """The blocks that a writer has to bring of a part; side blocks that are there are renewed."""
        if piece.part in self.required:
            return [a and not f for a, f in zip(put.absent, put.in_flight, strict=True)]
        wanted = [False] * len(put.keys)
        for index in range(piece.first, piece.first + piece.count):
            cell = self.sides.get((piece.part, put.keys[index]))
            if cell is None:
                wanted[index] = True
            else:
                self.touch(cell, put.retention_class, now, is_write=True)
        return wanted

    def granted(self, put: ModelPut, parts: dict[int, ModelPart]) -> None:
        """A writer got slots."""
        put.writers += 1
        put.parts.update(parts)
        self.puts[put.put_id] = put
        for index, part in parts.items():
            if index in self.required:
                self.pending.update({k: put for k, g in zip(put.keys, part.granted, strict=True) if g})

    def is_complete(self, put: ModelPut) -> bool:
        needed = set(self.required) if put.parts.keys() & set(self.required) else set(put.parts)
        return put.published or all(i in put.parts and put.parts[i].committed is not None for i in needed)

    def commit(self, put: ModelPut, mine: Iterable[int], blocks: int, now: float) -> bool:
        """A writer commits; says whether that published something."""
        put.writers -= 1
        for index in mine:
            part = put.parts[index]
            part.committed = blocks
            part.granted[blocks:] = [False] * (len(put.keys) - blocks)
        if not self.is_complete(put):
            return False
        if not put.published and set(self.required) <= put.parts.keys():
            self._publish_required(put, now)
        for index in [i for i in put.parts if i not in self.required and put.parts[i].committed is not None]:
            part = put.parts[index]
            part.granted[:] = [
                g and (index, k) not in self.sides for k, g in zip(put.keys, part.granted, strict=True)
            ]
            for run in _runs(part.granted):
                cell = Cell(put.retention_class, now, put.provenance)
                self.sides.update({(index, put.keys[i]): cell for i in run})
        self.close(put)
        put.published = True
        return True

    def _publish_required(self, put: ModelPut, now: float) -> None:
        parts = [put.parts[index] for index in self.required]
        mask = [
            key not in self.blocks and all(part.granted[i] for part in parts)
            for i, key in enumerate(put.keys)
        ]
        for part in parts:
            part.granted[:] = mask
            part.wanted[:] = [w and k not in self.blocks for w, k in zip(part.wanted, put.keys, strict=True)]
        for run in _runs(mask):
            cell = Cell(put.retention_class, now, put.provenance)
            for i in run:
                if not self.flat:
                    parent = put.keys[i - 1] if i else put.parent
                    cell = Cell(put.retention_class, now, put.provenance, parent)
                self.blocks[put.keys[i]] = cell
        for run in _runs(mask):
            self.touch_path(put.keys[run[-1]], put.retention_class, now, is_write=True)

    def withdraw(self, put: ModelPut, mine: Iterable[int]) -> None:
        """A writer is gone."""
        put.writers -= 1
        for index in mine:
            put.parts.pop(index, None)
        if not put.published and not put.writers:
            self.close(put)

    def close(self, put: ModelPut) -> None:
        for key in put.keys:
            if self.pending.get(key) is put:
                del self.pending[key]
        if self.puts.get(put.put_id) is put:
            del self.puts[put.put_id]

    # Departure

    def leave(self, keys: list[bytes], side: int | None, reason: MissReason, now: float) -> None:
        """The store let blocks go; what is alive does not expire, and what is not there cannot leave."""
        for key in keys:
            cell = self.blocks.pop(key, None) if side is None else self.sides.pop((side, key), None)
            assert cell is not None, "a block left that was not there"
            assert reason is not MissReason.EXPIRED or not self.alive(cell, now), "a living block expired"
            if side is None:
                self.left[key] = reason
            if reason is not MissReason.DELETED:
                self.may_return.add(key)

    def delete(self, keys: list[bytes]) -> set[bytes]:
        """Return the blocks that must go when these are deleted."""
        if self.flat:
            return {key for key in keys if key in self.blocks}
        gone, grown = {keys[0]}, True
        while grown:
            more = {k for k, c in self.blocks.items() if c.parent in gone and k not in gone}
            grown, gone = bool(more), gone | more
        return gone & self.blocks.keys()


def _runs(mask: list[bool]) -> list[range]:
    runs, start = [], 0
    for index, is_set in enumerate([*mask, False]):
        if not is_set:
            if index > start:
                runs.append(range(start, index))
            start = index + 1
    return runs
