"""What was asked for and what came of it: counts for hit rates and advice, and the recent requests by name.

Counted when a lease is asked for, delivered when it is released; probes count nowhere.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.api import MatchRequest, TierRun
from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.hitrate import LIFE_EDGES, ROOM_EDGES, HitRates, by_edge
from kvstore.core.ledger import Departed
from kvstore.core.matching import Found
from kvstore.types import HASH_BYTES, MissReason, Tier, key_at, key_count

REQUESTS_KEPT = 4096


@dataclass(slots=True)
class Asked:
    """One request: how far its match went, where the blocks lay, what stopped it, and what it used.

    `stopped_at` is the hash of the first missing block, `departed` how that one had left; `delivered` is None
    until the lease is released. Units: blocks; wall seconds.
    """

    owner: str
    space: bytes
    retention_class: str
    at: float
    asked: int
    found: int
    tiers: tuple[TierRun, ...] = ()
    reason: MissReason | None = None
    stopped_at: bytes = b""
    departed: Departed | None = None
    delivered: int | None = None


class AskedFor:
    """Counts matches as they come and remembers the latest of each owner. Guarded by the ladder's lock."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._requests: OrderedDict[str, Asked] = OrderedDict()
        self.rates = HitRates()

    def matched(
        self, state: NamespaceState, request: MatchRequest, found: Found, *, now: float, monotonic: float
    ) -> Asked:
        """Count a leased match."""
        catalog, asked = self._catalog, key_count(request.keys)
        tokens = state.namespace.block_tokens
        misses = found.reason is not None and found.blocks < asked
        departed = self._loss(state, request.keys, found, now=now, monotonic=monotonic) if misses else None
        held = found.items[-1].frame if found.items else departed
        name = request.retention_class or (held.retention_class if held is not None else "")
        name = catalog.retention.held_by(name).name
        cell = self.rates.cell(state.fingerprint, name, monotonic=monotonic)
        cell.requests += 1
        cell.asked += asked * tokens
        record = Asked(request.owner, state.fingerprint, name, now, asked, found.blocks, reason=found.reason)
        if misses:
            reason = str(found.reason)
            cell.misses[reason] += 1
            cell.missed[reason] += (asked - found.blocks) * tokens
            record.stopped_at = key_at(request.keys, found.blocks)
            record.departed = departed
        else:
            cell.full_hits += 1
        if request.owner:
            self._requests.pop(request.owner, None)
            self._requests[request.owner] = record
            if len(self._requests) > REQUESTS_KEPT:
                self._requests.popitem(last=False)
        return record

    def delivered(self, record: Asked, tier: Tier, blocks: int, *, tokens: int, monotonic: float) -> None:
        """Count what a release says was used."""
        cell = self.rates.cell(record.space, record.retention_class, monotonic=monotonic)
        cell.hits[str(tier)] += blocks * tokens

    def request(self, owner: str) -> Asked | None:
        """Return the latest match of an owner, None when it is not remembered."""
        return self._requests.get(owner)

    def _loss(
        self, state: NamespaceState, keys: bytes, found: Found, *, now: float, monotonic: float
    ) -> Departed | None:
        """Say how the first missing block left, and count those behind it that left like it: what a longer
        life or more room would have kept.
        """
        reason, space = found.reason, state.fingerprint
        hidden = self._hidden(state, keys, found.blocks) if reason is MissReason.EXPIRED else []
        if hidden:
            node_class, since, end = hidden[0][:3]
            departed: Departed | None = Departed(MissReason.EXPIRED, node_class, since, end)
        else:
            departed = self._catalog.ledger.look(key_at(keys, found.blocks), space=space)
        if departed is None or reason not in (MissReason.EXPIRED, MissReason.EVICTED):
            return departed
        needs: list[npt.NDArray[np.float64]] = [
            np.full(count, max(0.0, now - since)) for _, since, _, count in hidden
        ]
        begin = (found.blocks + sum(count for *_, count in hidden)) * HASH_BYTES
        if begin < len(keys):
            since_all, evicted = self._catalog.ledger.leading(keys[begin:], reason, space=space)
            needs.append(evicted if reason is MissReason.EVICTED else np.maximum(now - since_all, 0.0))
        is_eviction = reason is MissReason.EVICTED
        cell = self.rates.cell(space, departed.retention_class, monotonic=monotonic)
        by_edge(
            np.concatenate(needs),
            ROOM_EDGES if is_eviction else LIFE_EDGES,
            tokens=state.namespace.block_tokens,
            into=cell.lost_to_eviction if is_eviction else cell.lost_to_expiry,
        )
        return departed

    def _hidden(self, state: NamespaceState, keys: bytes, first: int) -> list[tuple[str, float, float, int]]:
        """Return class, touch, end and number of blocks of the runs from block `first` on that are still
        there.
        """
        retention = self._catalog.retention
        if state.flat:
            entry = state.loose.get(key_at(keys, first))
            steps = [(entry[0].nodes[0], 1)] if entry is not None else []
            position = first
        else:
            steps, position = state.runs.walk(keys), 0
        hidden = []
        for node, matched in steps:
            position += matched
            if position > first or state.flat:
                hidden.append((node.retention_class, node.since, retention.end(node), matched))
        return hidden
