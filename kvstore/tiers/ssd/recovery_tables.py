"""Segments that a start takes as a whole: their table in the place of a row a frame, and no keys."""

from __future__ import annotations

from kvstore.namespace import Namespace
from kvstore.tiers.base import FrameShape, FrameTable, SliceTouch
from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyState, find_key
from kvstore.tiers.ssd.index_rows import Touches
from kvstore.tiers.ssd.index_tables import StoredTable, TableShape
from kvstore.tiers.ssd.recovery_rows import cut_touches, resolve_parts
from kvstore.types import Fingerprint


class TableResolver:
    """Turns stored tables into what the core takes, as far as all is known that their frames name."""

    def __init__(self, namespaces: dict[Fingerprint, Namespace], keys: KeyRing | None) -> None:
        self._namespaces, self._keys = namespaces, keys
        self._known: dict[TableShape, FrameShape | None] = {}

    def resolve(self, number: int, stored: StoredTable, touches: dict[int, Touches]) -> FrameTable | None:
        """Return the table of a segment; None when some of its frames have to be left alone or deleted."""
        shapes = []
        for stored_shape in stored.shapes:
            if stored_shape not in self._known:
                self._known[stored_shape] = self._shape(stored_shape)
            shape = self._known[stored_shape]
            if shape is None:
                return None
            shapes.append(shape)
        return FrameTable(number, tuple(shapes), stored.rows, stored.marks, _by_row(stored, touches))

    def _shape(self, stored: TableShape) -> FrameShape | None:
        if stored.key_id and isinstance(find_key(self._keys, stored.key_id, stored.key_check), KeyState):
            return None
        parts = resolve_parts(self._namespaces.get(stored.namespace), stored.parts, ())
        if parts is None:
            return None
        return FrameShape(stored.namespace, stored.kind, parts, stored.retention_class, stored.provenance)


def _by_row(stored: StoredTable, touches: dict[int, Touches]) -> dict[int, tuple[SliceTouch, ...]]:
    if not touches:
        return {}
    found = {}
    places = zip(stored.rows["offset"].tolist(), stored.rows["count"].tolist(), strict=True)
    for row, (offset, count) in enumerate(places):
        some = touches.get(offset)
        if some and (cut := cut_touches(some, blocks=count)):
            found[row] = cut
    return found
