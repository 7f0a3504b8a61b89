"""What leaves a ladder, told as it happens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvstore.core.farewells import Farewell
from kvstore.core.frames import Slice
from kvstore.core.ladder import Ladder
from kvstore.core.plan import Plan
from kvstore.core.waking import frame_of
from kvstore.tiers.base import FrameKind, RecoveredFrame
from kvstore.types import MissReason, split_keys
from tests.support.asleep import all_nodes

WAIT_SECONDS = 60.0
Departure = tuple[Slice, MissReason, bytes]
"""What left, why, and its packed keys."""


class Departures:
    """Listens to one ladder."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._heard: list[Departure] = []
        self.other_copies = set[bytes]()
        """Blocks of which a copy left: another one counts from now on."""
        self._asleep: list[tuple[Farewell, RecoveredFrame]] = []
        catalog: Any = ladder._catalog
        open_ladder: Any = ladder
        catalog._leave = partial(self._leave, catalog._leave)
        open_ladder._dismissed = partial(self._dismissed, open_ladder._dismissed)

    def _leave(self, leave: Callable[..., None], piece: Slice, reason: MissReason) -> None:
        self._heard.append((Slice(piece.frame, piece.start, piece.count), reason, piece.keys))
        leave(piece, reason)

    def _dismissed(self, dismissed: Callable[..., None], plan: Plan, headers: Future[Any]) -> None:
        self._asleep += zip(plan.farewells, headers.result(), strict=True)
        dismissed(plan, headers)

    def settle(self) -> None:
        """Wait until the tier has told of all headers that were asked for, and those that these ask for."""
        tier: Any = self._ladder._ssd
        for _ in range(3):
            tier.headers([]).result(WAIT_SECONDS)

    def heard(self) -> list[Departure]:
        """Return what left since the last `take`. What sleeps leaves at once; which blocks those were is told
        when its headers have been read.
        """
        self.settle()
        asleep, self._asleep = self._asleep, []
        told = set[bytes]()
        for farewell, item in asleep:
            state = self._ladder._catalog.namespaces[farewell.namespace]
            # Of two copies that sleep one may go alone.
            there = (piece for node in all_nodes(self._ladder, state) for piece in node.slices)
            left = {k for p in there if p.frame.kind is FrameKind.MAIN for k in split_keys(p.keys)}
            told |= left
            self.other_copies |= left.intersection(split_keys(item.header.keys))
            for touch, departed in farewell.slices:
                piece = Slice(frame_of(item), touch.first, touch.count)
                gone = [key for key in split_keys(piece.keys) if key not in told]
                told.update(gone)
                self._heard.append((piece, departed.reason, b"".join(gone)))
        return self._heard

    def take(self) -> list[Departure]:
        """Return what left, and forget it."""
        heard, self._heard = self.heard(), []
        return heard
