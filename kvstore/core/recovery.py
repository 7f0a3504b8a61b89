"""Taking over what a tier found at start: runs go to sleep, side parts and flat blocks into their dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.beds import row_of, shape_of
from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.loose import WHOLE
from kvstore.core.sleepers import Sleeper
from kvstore.core.touches import few, recovered_slices
from kvstore.core.waking import Waker, age, frame_of
from kvstore.tiers.base import (
    FRAME_ROW,
    FrameKind,
    FrameLocation,
    FrameShape,
    FrameTable,
    RecoveredFrame,
    SliceTouch,
    TouchNote,
    marks_of,
)
from kvstore.types import split_keys

HEADERS_AT_ONCE = 1024
MAP_SPARE = 1.6
Headers = Callable[[Sequence[FrameLocation]], Sequence[RecoveredFrame | None]]


class Rebuild:
    """Takes a store's frames over, whatever order they come in; `headers` reads those of single frames."""

    def __init__(self, catalog: Catalog, headers: Headers) -> None:
        self._catalog = catalog
        self._headers = headers
        self._waker = Waker(catalog)
        self._now = catalog.retention.now()
        self._early: list[Sleeper] = []
        self.frames_skipped = 0

    def collect(self, recovered: Iterable[RecoveredFrame | FrameTable]) -> None:
        """Take what was found, one by one: no key is kept."""
        gathered = _Gathered()
        for item in recovered:
            if isinstance(item, FrameTable):
                self._take(item)
                continue
            if gathered.rows and gathered.segment != item.location.segment:
                self._take(gathered.table())
            gathered.add(item)
        if gathered.rows:
            self._take(gathered.table())

    def _take(self, table: FrameTable) -> None:
        if len(table.rows):
            latest = float(table.rows["written_at"].max())
            self._catalog.written_until = max(self._catalog.written_until, latest)
            self._early += self._catalog.sleepers.add_table(table, now=self._now)

    def run(self) -> None:
        """Let what was found be looked up; frames of unknown namespaces are left alone on disk."""
        catalog, sleepers = self._catalog, self._catalog.sleepers
        sleepers.rebuild(spare=MAP_SPARE)
        known = {shape.namespace for shape in sleepers.names.shapes}
        for sleeper in list(sleepers.of_spaces(known - catalog.namespaces.keys())):
            sleepers.take(sleeper)
            self.frames_skipped += 1
        self._wake_loose()

    def corrections(self) -> list[TouchNote]:
        """Return what the disk has to hear of frames touched in the future: a touch now."""
        sleepers, retention = self._catalog.sleepers, self._catalog.retention
        early = filter(sleepers.is_here, self._early)
        return [TouchNote(sleepers.location(s), few(retention, sleepers.held(s))) for s in early]

    def _is_loose(self, sleeper: Sleeper) -> bool:
        shape = self._catalog.sleepers.shape(sleeper)
        return shape.kind is FrameKind.SIDE or self._catalog.namespaces[shape.namespace].flat

    def _wake_loose(self) -> None:
        """Blocks that hang in no chain are looked up one by one: all of them stay awake."""
        catalog, sleepers = self._catalog, self._catalog.sleepers
        loose = [s for s in sleepers.of_spaces(catalog.namespaces.keys()) if self._is_loose(s)]
        early = set(self._early)
        items = self._read(loose)
        for sleeper, item in sorted(items, key=lambda pair: age(frame_of(pair[1])), reverse=True):
            self._loose(sleeper, item, is_early=sleeper in early)

    def _read(self, sleepers: Sequence[Sleeper]) -> list[tuple[Sleeper, RecoveredFrame]]:
        found: list[tuple[Sleeper, RecoveredFrame]] = []
        for start in range(0, len(sleepers), HEADERS_AT_ONCE):
            some = sleepers[start : start + HEADERS_AT_ONCE]
            items = self._headers([self._catalog.sleepers.location(sleeper) for sleeper in some])
            found += [(s, item) for s, item in zip(some, items, strict=True) if item is not None]
        return found

    def _loose(self, sleeper: Sleeper, item: RecoveredFrame, *, is_early: bool) -> None:
        """Insert the blocks of a frame up to the first that a newer frame brought."""
        catalog, frame = self._catalog, frame_of(item)
        state: NamespaceState = catalog.namespaces[frame.fingerprint]
        held = catalog.sleepers.held(sleeper)[0]
        part = frame.parts[0].index if frame.kind is FrameKind.SIDE else WHOLE
        there = [state.loose.get(key, part) is not None for key in split_keys(frame.keys)]
        if there[0]:
            catalog.sleepers.take(sleeper)
            self._waker.bury(frame)
            return
        node = state.loose.insert(
            frame, part=part, retention_class=held.retention_class, since=held.touched_at
        )
        if True in there:
            state.loose.truncate(node, there.index(True))
        catalog.segments.place(frame, item.location)
        catalog.sleepers.take(sleeper)
        if catalog.lost_any(frame):
            catalog.partial[frame] = None
        if is_early:
            catalog.plan.touched[frame] = None


class _Gathered:
    """Frames of one segment that come one by one, on their way into a table."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.segment = -1
        self.rows: list[tuple[object, ...]] = []
        self._shapes: dict[FrameShape, int] = {}
        self._touches: dict[int, tuple[SliceTouch, ...]] = {}
        self._marks: list[npt.NDArray[np.uint32]] = []

    def add(self, item: RecoveredFrame) -> None:
        """Take a frame."""
        header, place = item.header, item.location
        self.segment = place.segment
        code = self._shapes.setdefault(shape_of(header), len(self._shapes))
        if item.touches or header.touched_at:
            touches = recovered_slices(header, item.touches)
            self._touches[len(self.rows)] = tuple(touches)
        self._marks.append(marks_of(header.keys).copy())
        self.rows.append(row_of(header, place, code))

    def table(self) -> FrameTable:
        """Return what came so far, and start afresh."""
        rows, marks = np.array(self.rows, FRAME_ROW), np.concatenate(self._marks)
        table = FrameTable(self.segment, tuple(self._shapes), rows, marks, self._touches)
        self._start()
        return table
