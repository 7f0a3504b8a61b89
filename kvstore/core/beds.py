"""Where the frames of a segment sleep: a row each, and who holds which of their blocks, in two arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from kvstore.core.retention import Retention
from kvstore.core.tags import tag_of
from kvstore.core.touches import filled
from kvstore.tiers.base import FRAME_ROW, FrameHeader, FrameLocation, FrameShape, FrameTable, SliceTouch
from kvstore.types import Fingerprint, key_at, key_count

HELD = np.dtype([("row", "<u4"), ("first", "<u4"), ("count", "<u4"), ("name", "<u4"), ("since", "<f8")])
"""Blocks [first, first + count) of the frame in a row are held by a class since a wall time."""
SLICE = np.dtype([("name", "<u4"), ("shape", "<u4"), ("blocks", "<i8"), ("since", "<f8")])
"""Blocks of one frame are held by a class since a wall time; `name` and `shape` are numbers of Names."""
Rows = npt.NDArray[np.void]
Marks = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]


class Names:
    """Numbers for the things that very many frames have in common."""

    def __init__(self) -> None:
        self.shapes: list[FrameShape] = []
        self.classes: list[str] = []
        self._shapes: dict[FrameShape, int] = {}
        self._classes: dict[str, int] = {}

    def shape(self, shape: FrameShape) -> int:
        """Return the number of a shape."""
        number = self._shapes.setdefault(shape, len(self.shapes))
        if number == len(self.shapes):
            self.shapes.append(shape)
        return number

    def of_class(self, name: str) -> int:
        """Return the number of a class."""
        number = self._classes.setdefault(name, len(self.classes))
        if number == len(self.classes):
            self.classes.append(name)
        return number

    def codes(self, spaces: Collection[Fingerprint]) -> list[int]:
        """Return the numbers of the shapes of some namespaces."""
        return [code for code, shape in enumerate(self.shapes) if shape.namespace in spaces]

    def keep_seconds(self, retention: Retention, now: float) -> Floats:
        """Return by number how long after its touch stored data of a class is kept."""
        return np.array([retention.keep_seconds(name, now) for name in self.classes], np.float64)


def apart(slices: Rows, field: str) -> list[tuple[int, Rows]]:
    """Return slices apart by one of their fields."""
    numbers = slices[field]
    return [(number, slices[numbers == number]) for number in np.unique(numbers).tolist()]


def shape_of(header: FrameHeader) -> FrameShape:
    """Return what a frame has in common with others."""
    return FrameShape(header.namespace, header.kind, header.parts, header.retention_class, header.provenance)


def row_of(header: FrameHeader, place: FrameLocation, shape: int) -> tuple[object, ...]:
    """Return the row of a frame, in the order of FRAME_ROW; `shape` is the number of its shape."""
    return (
        place.offset, tag_of(header.keys), tag_of(key_at(header.keys, -1)), tag_of(header.parent),
        header.written_at, place.length_bytes, place.header_bytes, key_count(header.keys), shape,
    )  # fmt: skip


class Bed:
    """The sleeping frames of one segment. A row without blocks is one that has left.

    Shapes: rows FRAME_ROW[n], their `shape` a number of Names; held HELD[>= n] and marks u32[blocks], both in
    order of rows; starts u32[n], where the marks of each row begin.
    """

    __slots__ = ("count", "held", "marks", "rows", "starts")

    def __init__(self) -> None:
        self.rows: Rows = np.zeros(0, FRAME_ROW)
        self.held: Rows = np.zeros(0, HELD)
        self.marks: Marks = np.zeros(0, np.uint32)
        self.starts: Marks = np.zeros(0, np.uint32)
        self.count = 0

    def add(self, rows: Rows, held: Rows, marks: Marks) -> int:
        """Take frames; returns the row of the first. `held` numbers them from 0."""
        first = len(self.rows)
        starts = (np.cumsum(rows["count"]) - rows["count"] + len(self.marks)).astype(np.uint32)
        self.starts = np.concatenate((self.starts, starts))
        self.marks = np.concatenate((self.marks, marks))
        held = held.copy()
        held["row"] += first
        self.rows = np.concatenate((self.rows, rows)) if first else rows
        self.held = np.concatenate((self.held, held)) if first else held
        self.count += len(rows)
        return first

    def row_at(self, offset: int) -> int | None:
        """Return the row of a frame that slept here before and was woken."""
        rows = np.flatnonzero((self.rows["offset"] == offset) & (self.rows["count"] == 0))
        return int(rows[0]) if len(rows) else None

    def restore(self, row: int, held: Rows, blocks: int) -> None:
        """Take a frame again that slept in a row; `held` numbers it 0."""
        held = held.copy()
        held["row"] = row
        mine = self._slice(row)
        self.held = np.concatenate((self.held[: mine.start], held, self.held[mine.stop :]))
        self.rows["count"][row] = blocks
        self.count += 1

    def take(self, row: int) -> None:
        """Let a frame go."""
        if self.rows["count"][row]:
            self.rows["count"][row] = 0
            self.held["count"][self._slice(row)] = 0
            self.count -= 1

    def holding(self, marks: Marks, *, among: npt.NDArray[np.intp]) -> list[int]:
        """Return the rows of the frames that may hold a block with one of these marks; `among` are the places
        of marks that can be one of them.
        """
        hits = among[np.isin(self.marks[among], marks)]
        rows = np.unique(np.searchsorted(self.starts, hits, side="right") - 1)
        return [row for row in rows.tolist() if self.rows["count"][row]]

    def there(self) -> npt.NDArray[np.intp]:
        """Return the rows of all frames that sleep here."""
        return np.flatnonzero(self.rows["count"])

    def slices(self) -> Rows:
        """Return a copy of all slices of the frames that sleep here. Shapes: SLICE[n]."""
        held = self.held[self.held["count"] > 0]
        slices = np.empty(len(held), SLICE)
        slices["shape"] = self.rows["shape"][held["row"]]
        slices["name"], slices["blocks"], slices["since"] = held["name"], held["count"], held["since"]
        return slices

    def _slice(self, row: int) -> slice:
        rows = self.held["row"]
        return slice(int(np.searchsorted(rows, row)), int(np.searchsorted(rows, row, side="right")))

    def held_slices(self, row: int, names: Names) -> list[SliceTouch]:
        """Return who holds the blocks of a frame."""
        return [
            SliceTouch(first, count, names.classes[name], since)
            for _, first, count, name, since in self.held[self._slice(row)].tolist()
        ]

    def lives(self, names: Names, retention: Retention, now: float) -> npt.NDArray[np.bool_]:
        """Say of each slice whether it may not go for its age."""
        ends: Floats = self.held["since"] + names.keep_seconds(retention, now)[self.held["name"]]
        lives: npt.NDArray[np.bool_] = (ends > now) & (self.held["count"] > 0)
        return lives


def held_of_table(table: FrameTable, names: Names, *, now: float) -> tuple[Rows, list[int]]:
    """Return who holds the frames of a table, and the rows that were written or touched later than now: a
    clock was set back.
    """
    rows = table.rows
    whole = np.zeros(len(rows), HELD)
    whole["row"], whole["count"] = np.arange(len(rows)), rows["count"]
    classes = np.array([names.of_class(shape.retention_class) for shape in table.shapes], np.uint32)
    whole["name"] = classes[rows["shape"]] if len(rows) else 0
    whole["since"] = np.minimum(rows["written_at"], now)
    early = set(np.flatnonzero(rows["written_at"] > now).tolist())
    if not table.touches:
        return whole, sorted(early)
    touched = {
        row: filled(
            touches,
            int(rows["count"][row]),
            table.shapes[rows["shape"][row]].retention_class,
            float(rows["written_at"][row]),
        )
        for row, touches in table.touches.items()
    }
    early = {row for row in early if row not in touched}
    early |= {row for row, touches in touched.items() if any(t.touched_at > now for t in touches)}
    keep = np.ones(len(rows), np.bool_)
    keep[list(touched)] = False
    pieces = [held_array(row, touches, names, now=now) for row, touches in touched.items()]
    held = np.concatenate([whole[keep], *pieces])
    return held[np.argsort(held["row"], kind="stable")], sorted(early)


def held_array(row: int, touches: Iterable[SliceTouch], names: Names, *, now: float) -> Rows:
    """Return who holds the blocks of a frame as an array."""
    return np.array(
        [(row, t.first, t.count, names.of_class(t.retention_class), min(t.touched_at, now)) for t in touches],
        HELD,
    )
