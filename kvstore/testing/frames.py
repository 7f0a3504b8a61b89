"""Builds frames in page-aligned memory from a seed, and remembers what was in them."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvstore.layout import CacheGroup, Layout, Part, Segment
from kvstore.namespace import Namespace
from kvstore.tiers.base import (
    FrameHeader,
    FrameKind,
    FrameLocation,
    FrameRead,
    FrameWrite,
    PartImage,
)
from kvstore.types import HASH_BYTES, BlockHash

WRITTEN_AT = 1_700_000_000.0


def two_part_namespace(model: str = "tiny") -> Namespace:
    """Return a namespace of two required parts of different size, one of them in three segments."""
    cut = (Segment(0, 1, 0, 5000), Segment(1, 1, 5000, 1), Segment(2, 2, 5001, 999))
    parts = (Part(0, "kv", "0", 6000, cut), Part(1, "kv", "1", 300, (Segment(0, 4, 0, 300),)))
    layout = Layout("int8", (CacheGroup("kv"),), parts).checked()
    return Namespace(model=model, weights="v1", layout=layout, block_tokens=16).checked()


@dataclass(frozen=True, slots=True)
class Block:
    """The payload of one block in one part, and its digests as packed bytes."""

    payload: bytes
    digests: bytes


@dataclass(frozen=True, slots=True)
class BuiltFrame:
    """A frame to write and what it holds: blocks[part position][block]."""

    write: FrameWrite
    blocks: tuple[tuple[Block, ...], ...]

    @property
    def keys(self) -> bytes:
        """The packed keys of the frame."""
        return self.write.header.keys

    @property
    def count(self) -> int:
        """How many blocks the frame holds."""
        return len(self.keys) // HASH_BYTES


@dataclass(slots=True)
class FrameBuilder:
    """Makes frames of random bytes; every frame of one builder continues the chain of the one before."""

    namespace: Namespace = field(default_factory=two_part_namespace)
    seed: int = 0
    _random: random.Random = field(init=False)
    _parent: BlockHash = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._parent = BlockHash(self._random.randbytes(HASH_BYTES))

    def frame(
        self, blocks: int, *, bucket: str = "agent-0", retention_class: str = "agent", full: bool = False
    ) -> BuiltFrame:
        """Return a frame; records are shorter than the part allows now and then unless `full`."""
        keys = self._random.randbytes(blocks * HASH_BYTES)
        parts = self.namespace.layout.parts
        made = tuple(tuple(self._block(part, full) for _ in range(blocks)) for part in parts)
        header = FrameHeader(
            self.namespace.fingerprint, FrameKind.MAIN, self._parent, keys, parts, retention_class, WRITTEN_AT
        )
        self._parent = BlockHash(keys[-HASH_BYTES:])
        images = tuple(part_image(part, some) for part, some in zip(parts, made, strict=True))
        return BuiltFrame(FrameWrite(header, images, bucket), made)

    def _block(self, part: Part, full: bool) -> Block:
        length = (
            part.bytes_max if full or self._random.random() < 0.8 else self._random.randint(0, part.bytes_max)
        )
        payload = self._random.randbytes(length)
        return Block(payload, digests_of(payload, part))


def digests_of(payload: bytes, part: Part) -> bytes:
    """Return the packed digests of a payload, one per segment; a segment behind its end has no bytes."""
    cuts = (payload[s.offset : s.offset + s.length] for s in part.segments)
    return b"".join(xxhash.xxh3_128_digest(cut) for cut in cuts)


def part_image(part: Part, blocks: Sequence[Block]) -> PartImage:
    """Return the slot images of blocks: aligned memory, in two stretches when there are several blocks."""
    cut = len(blocks) // 2
    images = [slots(part, len(some)) for some in (blocks[:cut], blocks[cut:]) if some]
    views = [
        image[i : i + part.stride_bytes]
        for image in images
        for i in range(0, image.nbytes, part.stride_bytes)
    ]
    for view, block in zip(views, blocks, strict=True):
        view[: len(block.payload)] = block.payload
    lengths = np.array([len(block.payload) for block in blocks], "<u4").tobytes()
    return PartImage(part, tuple(images), lengths, b"".join(block.digests for block in blocks))


def slots(part: Part, count: int) -> memoryview:
    """Return aligned memory for `count` slots of a part, filled with 0xAA so that nothing passes for read."""
    memory = memoryview(mmap.mmap(-1, part.stride_bytes * count))
    np.frombuffer(memory, np.uint8)[:] = 0xAA
    return memory


def read_of(
    built: BuiltFrame, location: FrameLocation, *, part: int = 0, first: int = 0, count: int | None = None
) -> FrameRead:
    """Return a read of records of one part into fresh memory, one view a slot."""
    parts = built.write.header.parts
    count = built.count - first if count is None else count
    into = tuple(slots(parts[part], 1) for _ in range(count))
    keys = built.keys[first * HASH_BYTES : (first + count) * HASH_BYTES]
    return FrameRead(location, built.count, parts, part, first, keys, into)


def payloads_of(read: FrameRead, lengths: bytes) -> list[bytes]:
    """Return the payloads that a read brought, by the lengths that its result told."""
    stride = read.parts[read.part_position].stride_bytes
    views = [view[i : i + stride] for view in read.into for i in range(0, view.nbytes, stride)]
    sizes = np.frombuffer(lengths, "<u4").tolist()
    return [bytes(view[:size]) for view, size in zip(views, sizes, strict=False)]
