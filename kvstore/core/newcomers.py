"""Whether what is put is worth the room: where host memory is the end, blocks that would leave first are not
taken in at all, instead of what is worth more. What goes on to SSD needs a slot on its way, and gets one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.api import U32Array
from kvstore.core.catalog import Catalog
from kvstore.core.puts import PendingPut
from kvstore.core.writeback import WriteBack
from kvstore.layout import Part

JUDGED_SHARE = 0.5
"""Of host memory: a longer prompt is taken in as it comes."""


class Newcomers:
    """Slots for puts. Guarded by the ladder's lock."""

    def __init__(self, catalog: Catalog, writeback: WriteBack) -> None:
        self._catalog = catalog
        self._writeback = writeback

    def allocate(self, put: PendingPut, part: Part, places: npt.NDArray[np.intp], *, now: float) -> U32Array:
        """Hand out slots for the leading places of a put, as many as are free or worth more to it.

        Shapes: u32[<= places].
        """
        catalog, name = self._catalog, put.retention_class
        if not self._is_judged(put, part, places):
            return catalog.allocate(len(places), part, by=name)
        names = put.names[int(places[0]) :]
        worth = catalog.policy.expect(put.above, names, retention_class=name, now=now)
        slots = catalog.allocate(len(places), part, by=name, bar=worth)
        if len(slots) < len(names):
            catalog.policy.refuse(put.above, names, len(slots), retention_class=name)
        return slots

    def _is_judged(self, put: PendingPut, part: Part, places: npt.NDArray[np.intp]) -> bool:
        """Of a chain that one writer brings, up to its end. Several would have to be judged alike; and where
        one prompt is most of what there is room for, those that wait for a better one wait for too long.
        """
        return (
            not put.state.flat
            and len(put.state.required) == 1
            and len(places) > 0
            and len(places) == put.count - places[0]
            and put.count * part.stride_pages <= JUDGED_SHARE * self._catalog.memory.total_pages
            and not self._writeback.reaches(put.retention_class)
        )
