"""How frames leave that are asleep: at once, without being woken; the ledger hears of their blocks when their
keys have been read, before the tier deletes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.core.ledger import Departed
from kvstore.core.sleepers import Sleeper
from kvstore.tiers.base import FrameLocation, RecoveredFrame, SliceTouch
from kvstore.types import HASH_BYTES, Fingerprint, MissReason, Tier

if TYPE_CHECKING:
    from kvstore.core.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Farewell:
    """A frame that left asleep, and how its blocks did, slice by slice."""

    location: FrameLocation
    namespace: Fingerprint
    block_bytes: int
    slices: tuple[tuple[SliceTouch, Departed], ...]


def dismiss(catalog: Catalog, sleepers: Iterable[Sleeper], reason: MissReason) -> list[Farewell]:
    """Let frames go that are asleep; what is on disk of them is the caller's to bury."""
    gone = []
    for sleeper in sleepers:
        shape, location = catalog.sleepers.shape(sleeper), catalog.sleepers.location(sleeper)
        held = catalog.sleepers.held(sleeper)
        slices = tuple((touch, _departed(catalog, touch, reason)) for touch in held)
        gone.append(Farewell(location, shape.namespace, shape.block_stride_bytes, slices))
        catalog.sleepers.take(sleeper)
        if reason is MissReason.EXPIRED:
            labels = {"class": shape.retention_class}
            catalog.events.add("kvstore_expired_bytes_total", location.length_bytes, **labels)
        elif reason is MissReason.EVICTED:
            catalog.events.add("kvstore_evicted_bytes_total", location.length_bytes, tier=str(Tier.SSD))
    catalog.plan.farewells += gone
    return gone


def dismiss_and_bury(catalog: Catalog, sleepers: Iterable[Sleeper], reason: MissReason) -> list[Farewell]:
    """Let frames go that are asleep, and have what is on disk of them deleted."""
    gone = dismiss(catalog, sleepers, reason)
    catalog.graves.bury_all({farewell.location: farewell.namespace for farewell in gone})
    return gone


def _departed(catalog: Catalog, touch: SliceTouch, reason: MissReason) -> Departed:
    end = touch.touched_at + catalog.retention.held_by(touch.retention_class).ttl_seconds
    left_at = catalog.retention.left_at(end, reason)
    return Departed(reason, touch.retention_class, touch.touched_at, left_at)


def remember(catalog: Catalog, farewell: Farewell, item: RecoveredFrame | None) -> None:
    """Tell the ledger of a frame that left, now that its keys are known."""
    if item is None or item.location != farewell.location:
        return
    for touch, departed in farewell.slices:
        keys = item.header.keys[touch.first * HASH_BYTES : (touch.first + touch.count) * HASH_BYTES]
        size = touch.count * farewell.block_bytes
        if keys:
            catalog.ledger.note(keys, departed, space=farewell.namespace, size_bytes=size)
