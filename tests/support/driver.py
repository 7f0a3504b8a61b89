"""Drives a ladder the way a client does: fills reserved slots, digests its source, reads back under a
lease.
"""

from __future__ import annotations

import hashlib

import numpy as np
import xxhash

from kvstore.api import (
    CommitAnswer,
    CommitRequest,
    Extent,
    MatchAnswer,
    PartBlocks,
    PartDigests,
    ReserveRequest,
)
from kvstore.core.ladder import Ladder
from kvstore.layout import CacheGroup, Layout, Part, Segment
from kvstore.namespace import Namespace
from kvstore.types import HASH_BYTES, AckTier, Addressing, BlockHash, GroupKind, key_at


def namespace(
    *,
    addressing: Addressing = Addressing.CHAIN,
    model: str = "m",
    bytes_max: int = 600,
    parts: int = 1,
    side: str = "",
) -> Namespace:
    """Build a small namespace; `side` adds a trailing group (2 blocks) or a checkpoint group."""
    groups = [CacheGroup("kv")]
    if side:
        kind = GroupKind(side)
        groups.append(CacheGroup("side", kind, 2 if kind is GroupKind.TRAILING_BLOCKS else 0))
    half = bytes_max // 2
    table = (Segment(0, 1, 0, half), Segment(1, 1, half, bytes_max - half))
    made = [Part(i, "kv", f"tp{i}", bytes_max, table) for i in range(parts)]
    if side:
        made.append(Part(parts, "side", "all", 300, (Segment(0, 1, 0, 300),)))
    layout = Layout("u8", tuple(groups), tuple(made))
    return Namespace(model=model, weights="w", layout=layout, block_tokens=4, addressing=addressing).checked()


def payload(key: bytes, part: Part, *, salt: bytes = b"") -> bytes:
    """The bytes that belong to a key: a function of the key and part, shorter than bytes_max now and then."""
    seed = hashlib.blake2b(key + bytes([part.index]) + salt, digest_size=8).digest()
    length = part.bytes_max - seed[0] % 7
    return (hashlib.shake_128(seed).digest(min(length, 64)) * (length // 64 + 1))[:length]


def digests(data: bytes, part: Part) -> bytes:
    """Digest a payload segment by segment."""
    return b"".join(xxhash.xxh3_128_digest(data[s.offset : s.offset + s.length]) for s in part.segments)


def fill(ladder: Ladder, space: Namespace, keys: bytes, extent: Extent) -> PartDigests:
    """Write an extent's payloads into its slots; returns what to commit."""
    part = space.layout.parts[extent.part]
    datas = [payload(key_at(keys, extent.first + i), part) for i in range(extent.count)]
    images = ladder.images(extent, part)
    for index, data in enumerate(datas):
        position, where = index * part.stride_bytes, 0
        for image in images:
            if where <= position < where + len(image):
                image[position - where : position - where + len(data)] = data
            where += len(image)
    lengths = np.array([len(data) for data in datas], np.uint32).tobytes()
    return PartDigests(extent.part, extent.first, lengths, b"".join(digests(data, part) for data in datas))


def put(
    ladder: Ladder,
    space: Namespace,
    parent: bytes,
    keys: bytes,
    *,
    retention_class: str = "",
    parts: tuple[PartBlocks, ...] = (),
    put_id: bytes = b"",
    ack: AckTier = AckTier.HOST,
    blocks: int | None = None,
    acks: list[CommitAnswer] | None = None,
    session: int = 0,
    provenance: int = 0,
    with_side: bool = False,
) -> CommitAnswer | None:
    """Reserve, fill and commit; returns the commit's answer, or one made of the reserve's outcomes."""
    if with_side:
        parts = tuple(PartBlocks(part.index, 0, len(keys) // HASH_BYTES) for part in space.layout.parts)
    answer = ladder.reserve(
        ReserveRequest(
            namespace=space.fingerprint,
            parent=BlockHash(parent),
            keys=keys,
            retention_class=retention_class,
            parts=parts,
            put_id=put_id,
            session=session,
            provenance=provenance,
        )
    )
    if not answer.reservation:
        return CommitAnswer(outcomes=answer.outcomes)
    filled = tuple(fill(ladder, space, keys, extent) for extent in answer.extents)
    count = len(keys) // HASH_BYTES if blocks is None else blocks
    request = CommitRequest(reservation=answer.reservation, blocks=count, parts=filled, ack=ack)
    return ladder.commit(request, acks.append if acks is not None else None)


def check_extents(ladder: Ladder, space: Namespace, keys: bytes, extents: tuple[Extent, ...]) -> int:
    """Compare every leased block with what belongs to its key; returns how many (block, part) pairs were
    compared.
    """
    compared = 0
    for extent in extents:
        part = space.layout.parts[extent.part]
        images = b"".join(bytes(image) for image in ladder.images(extent, part))
        for index in range(extent.count):
            expected = payload(key_at(keys, extent.first + index), part)
            start = index * part.stride_bytes
            assert int(extent.lengths[index]) == len(expected)
            assert images[start : start + len(expected)] == expected, "wrong bytes"
            width = 16 * len(part.segments)
            assert extent.digests[index * width : (index + 1) * width] == digests(expected, part)
            compared += 1
    return compared


def residents(answer: MatchAnswer) -> int:
    """Return how many blocks of part 0 an answer lists."""
    return sum(extent.count for extent in answer.extents if extent.part == 0)
