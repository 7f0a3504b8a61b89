"""Sending a trace to a daemon: synthetic payloads through the client, request after request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvstore.client import Client, OpenNamespace
from kvstore.errors import DataCorrupt, TierUnavailable
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.told_clock import ToldClock
from kvstore.trace.blocks import TraceRequest
from kvstore.trace.simulator import seconds_of
from kvstore.types import HASH_BYTES, PAGE_BYTES, TRAILER_BYTES, BlockHash, MissReason, key_at

BLOCK_BYTES = PAGE_BYTES - TRAILER_BYTES
"""With its trailer a block fills one page, the least that it can."""
VERB_SECONDS = 30.0
"""A trace is no request of a person: it would rather wait than miss."""
LOST = frozenset({MissReason.DAEMON_GONE, MissReason.DEADLINE, MissReason.BREAKER_OPEN, MissReason.TIER_DOWN})
Bytes2D = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Driven:
    """What was sent and what came back. `sent` are the requests at the times at which they were sent.

    Units: wall seconds; blocks as named. `lag_seconds` is how late a request was sent at worst.
    """

    sent: list[TraceRequest] = field(default_factory=list)
    delivered_blocks: list[int] = field(default_factory=list)
    stored_blocks: int = 0
    refused_blocks: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    lag_seconds: float = 0.0
    seconds: float = 0.0


def trace_namespace(name: str, *, block_tokens: int) -> Namespace:
    """Return the namespace a run uses: of its own, so that nothing is there before it."""
    layout = Layout.single(dtype="none", bytes_max=BLOCK_BYTES, layers=1)
    return Namespace(model="kvstore drive", weights=name, layout=layout, block_tokens=block_tokens)


class Driver:
    """One client that replays requests in order. Threads: one."""

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self._client = client
        self._open: OpenNamespace = client.open(namespace)
        self._into: Bytes2D = np.zeros((0, BLOCK_BYTES), np.uint8)
        self._source: Bytes2D = np.zeros((0, BLOCK_BYTES), np.uint8)

    def run(
        self,
        requests: Sequence[TraceRequest],
        *,
        speed: float,
        clock: ToldClock | None,
        on_progress: Callable[[int], None],
    ) -> Driven:
        """Send every request at its time, divided by `speed` (inf: as fast as they are answered). With a
        clock, time is told rather than waited for, and nothing is under way while it moves.

        Errors: TierUnavailable when the daemon stops to answer; DataCorrupt on wrong bytes.
        """
        driven = Driven()
        began = time.monotonic()
        for index, (request, elapsed_ms) in enumerate(self._timed(requests, speed, clock, driven)):
            driven.sent.append(replace(request, timestamp_ms=elapsed_ms))
            driven.delivered_blocks.append(self._serve(request, driven) if request.runs else 0)
            on_progress(index + 1)
        driven.seconds = time.monotonic() - began
        return driven

    def _timed(
        self, requests: Sequence[TraceRequest], speed: float, clock: ToldClock | None, driven: Driven
    ) -> Iterator[tuple[TraceRequest, int]]:
        """Yield each request when its time has come, with the milliseconds since the first."""
        first, began = requests[0].timestamp_ms, time.monotonic()
        told = 0
        for request in requests:
            due_ms = request.timestamp_ms - first
            if clock is not None:
                if due_ms > told:
                    self._client.ping(VERB_SECONDS)  # behind it nothing is under way
                    clock.tell(seconds_of(due_ms))
                    told = due_ms
                yield request, due_ms
                continue
            ahead = due_ms / 1000 / speed - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(ahead)
            elif speed != float("inf"):
                driven.lag_seconds = max(driven.lag_seconds, -ahead)
            yield request, round(1000 * (time.monotonic() - began))

    def _serve(self, request: TraceRequest, driven: Driven) -> int:
        """Fetch what is there, store the rest; returns the blocks delivered."""
        keys, blocks = request.keys(), request.blocks
        into = self._rows(blocks)
        fetched = self._open.get(
            keys, into, retention_class=request.retention_class, deadline_seconds=VERB_SECONDS
        )
        if fetched.reason is not None:
            driven.misses[str(fetched.reason)] += 1
            self._check_alive(fetched.reason)
        wanted = _payload_heads(keys)
        if not np.array_equal(into[: fetched.blocks, :HASH_BYTES], wanted[: fetched.blocks]):
            raise DataCorrupt(f"request at {request.timestamp_ms} ms: blocks were delivered with wrong bytes")
        if fetched.blocks < blocks:
            self._store(keys, wanted, fetched.blocks, request.retention_class, driven)
        return fetched.blocks

    def _store(self, keys: bytes, heads: Bytes2D, present: int, retention_class: str, driven: Driven) -> None:
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
        driven.stored_blocks += put.stored
        driven.refused_blocks += missing - put.present

    def _check_alive(self, reason: MissReason | None) -> None:
        if reason in LOST:
            raise TierUnavailable(f"the daemon at {self._client.address} stopped to answer: {reason}")

    def _rows(self, blocks: int) -> Bytes2D:
        if len(self._into) < blocks:
            self._into = np.zeros((blocks, BLOCK_BYTES), np.uint8)
            self._source = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        return self._into[:blocks]

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
