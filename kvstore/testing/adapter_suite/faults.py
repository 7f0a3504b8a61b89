"""What can befall messages between an engine and its daemon: bytes rot, loads fail, messages are lost."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from kvstore.arena import Arena
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.testing.adapter_suite.tap import Message, Tap
from kvstore.types import DIGEST_BYTES, PAGE_BYTES

U32_BYTES = 4
News = TypeVar("News", pb.SessionReply, pb.FetchReply)


def lost(message: Message) -> None:
    """Let a message get lost."""


def rot(tap: Tap, reply: pb.SessionReply, *, block: int, part: int | None = None) -> pb.SessionReply:
    """Flip the bits of a matched block in the arena, before the engine hears where it lies."""
    assert tap.hello is not None
    arena = Arena.map(tap.hello.arena_path, expected_id=tap.hello.arena_id, writable=True)
    try:
        for extent in reply.match.extents:
            slots = np.frombuffer(extent.slots, "<u4")
            if part in (None, extent.part) and extent.first <= block < extent.first + len(slots):
                start = int(slots[block - extent.first]) * PAGE_BYTES
                arena.bytes[start : start + PAGE_BYTES] ^= 0xFF
    finally:
        arena.close()
    return reply


def failed_load(reply: News, *, blocks: int) -> News:
    """Make of news of a load that it failed behind the first `blocks` blocks, as a disk's error would."""
    event = reply.progress
    kept = [_head(extent, blocks - extent.first) for extent in event.extents if extent.first < blocks]
    del event.extents[:]
    event.extents.extend(kept)
    event.blocks, event.done, event.reason = blocks, True, pb.MISS_REASON_TIER_DOWN
    return reply


def _head(extent: pb.Extent, count: int) -> pb.Extent:
    total = len(extent.slots) // U32_BYTES
    count = min(count, total)
    digest_bytes = len(extent.digests) // total
    assert digest_bytes % DIGEST_BYTES == 0
    return pb.Extent(
        part=extent.part,
        first=extent.first,
        slots=extent.slots[: count * U32_BYTES],
        generations=extent.generations[: count * U32_BYTES],
        lengths=extent.lengths[: count * U32_BYTES],
        digests=extent.digests[: count * digest_bytes],
    )
