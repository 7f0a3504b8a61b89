"""What a ladder's index holds, asleep or not, told without waking anything."""

from __future__ import annotations

from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.eviction import ExactLru
from kvstore.core.frames import Node
from kvstore.core.ladder import Ladder
from kvstore.core.ledger import DepartedLedger
from kvstore.core.plan import Plan
from kvstore.core.waking import Waker
from kvstore.events import Events
from kvstore.tiers.base import RecoveredFrame
from kvstore.types import Fingerprint, split_keys


def all_nodes(ladder: Ladder, state: NamespaceState) -> list[Node]:
    """Return the nodes of a namespace as they would be if all of it were awake."""
    return [*state.nodes(), *_dreams(ladder, state).nodes()]


def _dreams(ladder: Ladder, state: NamespaceState) -> NamespaceState:
    """Return what sleeps of a namespace as a tree of its own."""
    awake = ladder._catalog.sleepers
    catalog = Catalog(
        memory=ladder._host,
        policy=ExactLru(),
        retention=ladder._retention,
        ledger=DepartedLedger(16),
        events=Events(),
        plan=Plan(),
    )
    dream = catalog.namespaces[state.fingerprint] = NamespaceState(state.namespace, catalog)
    asleep = list(awake.of_spaces([state.fingerprint]))
    if not asleep or ladder._ssd is None:
        return dream
    items: list[RecoveredFrame | None] = ladder._ssd.headers([awake.location(s) for s in asleep]).result()
    woken = []
    for sleeper, item in zip(asleep, items, strict=True):
        assert item is not None, "a frame asleep is not there"
        place = catalog.sleepers.add(item.header, item.location, awake.held(sleeper))
        woken.append((place, item))
    Waker(catalog).wake(woken, b"")
    return dream


def wake(ladder: Ladder, space: Fingerprint, keys: list[bytes]) -> None:
    """Wake the frames that hold any of these blocks."""
    held = ladder._search.by_keys(
        [space], lambda packed: not set(keys).isdisjoint(split_keys(packed)), limit=9999
    )
    ladder._wake([sleeper for sleeper, _ in held])


def asleep_twice(ladder: Ladder, state: NamespaceState) -> int:
    """Return how many blocks asleep are copies of others: what is counted row by row counts them too."""
    sleepers = ladder._catalog.sleepers
    rows = sum(sleepers.blocks(sleeper) for sleeper in sleepers.of_spaces([state.fingerprint]))
    awake = {key for node in state.runs.nodes() for key in split_keys(node.keys)}
    dreams = {key for node in _dreams(ladder, state).nodes() for key in split_keys(node.keys)}
    return rows - len(dreams - awake)
