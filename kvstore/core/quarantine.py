"""Slots of ended reservations: they wait until their writer certainly writes no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.api import NO_SESSION, U32Array
from kvstore.core.catalog import Catalog
from kvstore.core.shares import Share


@dataclass(frozen=True, slots=True)
class _Held:
    session: int
    slots: list[U32Array]
    pages: int


class Quarantine:
    """What a late writer may still write to. It counts against the writer's share until it is free again."""

    def __init__(self, catalog: Catalog, share: Share, *, client_alive: Callable[[int], bool]) -> None:
        self._catalog = catalog
        self._share = share
        self._client_alive = client_alive
        self._held: dict[int, _Held] = {}

    def put(self, number: int, *, session: int, slots: list[U32Array], pages: int) -> None:
        """Keep the slots of reservation `number`; `pages` of the session's share stay taken."""
        self._held[number] = _Held(session, slots, pages)

    def free(self, number: int) -> bool:
        """The writer of a reservation is done: free its slots. Says whether there were any."""
        held = self._held.pop(number, None)
        if held is None:
            return False
        for piece in held.slots:
            self._catalog.free_slots(piece)
        self._share.give(held.session, held.pages)
        return True

    def sweep(self) -> None:
        """Free the slots of clients that are dead for certain; each is asked after once."""
        sessions = {held.session for held in self._held.values()} - {NO_SESSION}
        dead = {session for session in sessions if not self._client_alive(session)}
        for number in [number for number, held in self._held.items() if held.session in dead]:
            self.free(number)

    @property
    def slots(self) -> int:
        """How many slots wait."""
        return sum(len(piece) for held in self._held.values() for piece in held.slots)

    def __len__(self) -> int:
        return len(self._held)
