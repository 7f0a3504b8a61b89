"""One client that sends requests of a trace to a daemon, with synthetic payloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.client import Client, OpenNamespace
from kvstore.errors import DataCorrupt, TierUnavailable
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.trace.blocks import TraceRequest
from kvstore.types import HASH_BYTES, PAGE_BYTES, TRAILER_BYTES, BlockHash, MissReason, key_at

BLOCK_BYTES = PAGE_BYTES - TRAILER_BYTES
"""With its trailer a block fills one page, the least that it can."""
VERB_SECONDS = 30.0
"""A trace is no request of a person: it would rather wait than miss."""
LOST = frozenset({MissReason.DAEMON_GONE, MissReason.DEADLINE, MissReason.BREAKER_OPEN, MissReason.TIER_DOWN})
Bytes2D = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Reply:
    """What came of one request. Units: blocks; `reason` is why it stopped to hit."""

    delivered: int = 0
    stored: int = 0
    refused: int = 0
    reason: MissReason | None = None


def trace_namespace(name: str, *, block_tokens: int) -> Namespace:
    """Return the namespace a run uses: of its own, so that nothing is there before it."""
    layout = Layout.single(dtype="none", bytes_max=BLOCK_BYTES, layers=1)
    return Namespace(model="kvstore drive", weights=name, layout=layout, block_tokens=block_tokens)


class Driver:
    """One client. Threads: one at a time."""

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self._client = client
        self._open: OpenNamespace = client.open(namespace)
        self._into: Bytes2D = np.zeros((0, BLOCK_BYTES), np.uint8)
        self._source: Bytes2D = np.zeros((0, BLOCK_BYTES), np.uint8)

    def serve(self, request: TraceRequest) -> Reply:
        """Fetch what is there, store the rest.

        Errors: TierUnavailable when the daemon stops to answer; DataCorrupt on wrong bytes.
        """
        keys, blocks = request.keys(), request.blocks
        into = self._rows(blocks)
        fetched = self._open.get(
            keys, into, retention_class=request.retention_class, deadline_seconds=VERB_SECONDS
        )
        self._check_alive(fetched.reason)
        wanted = _payload_heads(keys)
        if not np.array_equal(into[: fetched.blocks, :HASH_BYTES], wanted[: fetched.blocks]):
            raise DataCorrupt(f"request at {request.timestamp_ms} ms: blocks were delivered with wrong bytes")
        reply = Reply(fetched.blocks, reason=fetched.reason)
        if fetched.blocks < blocks:
            self._store(keys, wanted, request.retention_class, reply)
        return reply

    def _store(self, keys: bytes, heads: Bytes2D, retention_class: str, reply: Reply) -> None:
        present = reply.delivered
        missing = len(heads) - present
        source = self._source[:missing]
        source[:, :HASH_BYTES] = heads[present:]
        parent = BlockHash(key_at(keys, present - 1)) if present else self._open.root
        put = self._open.put(
            parent,
            keys[present * HASH_BYTES :],
            source,
            retention_class=retention_class,
            deadline_seconds=VERB_SECONDS,
        )
        self._check_alive(put.reason)
        reply.stored, reply.refused = put.stored, missing - put.present

    def _check_alive(self, reason: MissReason | None) -> None:
        if reason in LOST:
            raise TierUnavailable(f"the daemon at {self._client.address} stopped to answer: {reason}")

    def _rows(self, blocks: int) -> Bytes2D:
        if len(self._into) < blocks:
            self._into = np.zeros((blocks, BLOCK_BYTES), np.uint8)
            self._source = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        return self._into[:blocks]

    def settle(self) -> None:
        """Wait until the daemon has heard all that was sent before.

        Errors: TierUnavailable, DeadlineExceeded.
        """
        self._client.ping(VERB_SECONDS)

    def clear(self) -> None:
        """Delete what was stored.

        Errors: TierUnavailable, DeadlineExceeded.
        """
        self._open.delete(None, deadline_seconds=VERB_SECONDS)


def _payload_heads(keys: bytes) -> Bytes2D:
    """Return what the first bytes of each block's payload say: whose it is. Shapes: u8[blocks, 32]."""
    return np.frombuffer(keys, np.uint8).reshape(-1, HASH_BYTES)


def distinct_blocks(requests: Sequence[TraceRequest]) -> int:
    """Return how many different blocks a trace has."""
    known: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
    fresh: list[npt.NDArray[np.uint64]] = []
    waiting = 0
    for request in requests:
        fresh.append(np.frombuffer(request.keys(), np.uint64)[:: HASH_BYTES // 8])
        waiting += len(fresh[-1])
        if waiting > 1 << 22:
            known, fresh, waiting = np.unique(np.concatenate([known, *fresh])), [], 0
    return len(np.unique(np.concatenate([known, *fresh])))
