"""The bytes that every group measures with: the blocks of a long prompt, and buffers that are warm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.client import OpenNamespace
from kvstore.client.buffers import Buffers
from kvstore.client.results import Fetched
from kvstore.errors import TierUnavailable
from kvstore.layout import CacheGroup, Layout, Part, Segment
from kvstore.namespace import Namespace
from kvstore.types import AckTier, key_count

BLOCKS = 600
BLOCK_TOKENS = 128
BLOCK_BYTES = 114_048
LAYERS = 44
"""DeepSeek-V4.1: 600 blocks of 128 tokens are a prompt of 77K."""
LAYER_RANGES = 11
HOST_ONLY = "swa"
"""A class that never leaves host memory: no write-behind runs beside what is measured."""
DEADLINE_SECONDS = 20.0
PROMPTS_IN_TURN = 3
TURN_ARENA_BYTES = 96 << 20
"""Room for one prompt and a third of another."""
Array = npt.NDArray[np.uint8]


def block_major(name: str) -> Namespace:
    """Return a namespace of one part, cut into four segments."""
    layout = Layout.single(dtype="bench", bytes_max=BLOCK_BYTES, layers=LAYERS, segments=4)
    return Namespace(model=f"bench-{name}", weights="none", layout=layout, block_tokens=BLOCK_TOKENS)


def layer_major(name: str) -> Namespace:
    """Return a namespace whose blocks come in three segments, which layer ranges cut finer."""
    length, layers = BLOCK_BYTES // LAYER_RANGES, LAYERS // LAYER_RANGES
    edges = (0, 4, 8, LAYER_RANGES)
    table = tuple(
        Segment(first * layers, (end - first) * layers, first * length, (end - first) * length)
        for first, end in itertools.pairwise(edges)
    )
    layout = Layout("bench", (CacheGroup("kv"),), (Part(0, "kv", "all", BLOCK_BYTES, table),)).checked()
    return Namespace(model=f"bench-{name}", weights="none", layout=layout, block_tokens=BLOCK_TOKENS)


def random_bytes(blocks: int, block_bytes: int, *, seed: int) -> Array:
    """Return distinct, incompressible blocks. Shapes: [blocks, block_bytes]."""
    return np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


def warm_buffer(blocks: int, block_bytes: int) -> Array:
    """Return a private buffer whose pages are all there. Shapes: [blocks, block_bytes]."""
    buffer = np.empty((blocks, block_bytes), np.uint8)
    buffer.fill(1)
    return buffer


def copy_blocks(source: Array, into: Array) -> None:
    """Copy block by block: the plain code that a hit is measured against."""
    for index in range(len(source)):
        np.copyto(into[index], source[index])


@dataclass(frozen=True, slots=True)
class Prompt:
    """Keys of a prompt in an open namespace."""

    namespace: OpenNamespace
    keys: bytes

    @staticmethod
    def draw(namespace: OpenNamespace, blocks: int, *, seed: int) -> Prompt:
        """Return a prompt of random tokens, the same for the same seed."""
        tokens = np.random.default_rng(seed).integers(0, 1 << 17, blocks * namespace.namespace.block_tokens)
        return Prompt(namespace, namespace.hashes(tokens))

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return key_count(self.keys)

    def store(self, source: Buffers, *, ack: AckTier = AckTier.HOST, retention_class: str = "") -> None:
        """Put it whole.

        Errors: TierUnavailable saying what became of the blocks.
        """
        put = self.namespace.put(
            self.namespace.root,
            self.keys,
            source,
            ack=ack,
            retention_class=retention_class,
            deadline_seconds=DEADLINE_SECONDS,
        )
        if put.present < self.blocks:
            outcomes = ", ".join(f"{run.count} {run.outcome}" for run in put.outcomes) or str(put.reason)
            raise TierUnavailable(f"put of {self.blocks} blocks: {outcomes}")

    @staticmethod
    def in_turn(
        namespace: OpenNamespace, source: Buffers, *, tell: Callable[[str], None]
    ) -> Iterator[Prompt]:
        """Store three prompts on SSD and return them in turn, for ever. Of a daemon with an arena of
        `TURN_ARENA_BYTES` each has left host memory when it is due.
        """
        prompts = [Prompt.draw(namespace, BLOCKS, seed=seed) for seed in range(PROMPTS_IN_TURN)]
        for prompt in prompts:
            tell("storing prompts on SSD")
            prompt.store(source, ack=AckTier.SSD)
        return itertools.cycle(prompts)

    def match_once(self) -> None:
        """Match and release.

        Errors: TierUnavailable when not all is resident.
        """
        match = self.namespace.match(self.keys, deadline_seconds=DEADLINE_SECONDS)
        if match.blocks < self.blocks or not match.ready:
            raise TierUnavailable(f"match found {match.blocks} of {self.blocks} blocks: {match.reason}")
        self.namespace.release(match, used=match.blocks)

    def fetch(self, into: Buffers, *, verify: bool) -> Fetched:
        """Match, copy out and release; returns what came, and from where.

        Errors: TierUnavailable when not all of it came.
        """
        fetched = self.namespace.get(self.keys, into, verify=verify, deadline_seconds=DEADLINE_SECONDS)
        if fetched.blocks < self.blocks:
            raise TierUnavailable(f"{fetched.blocks} of {self.blocks} blocks came back: {fetched.reason}")
        return fetched


def layer_buffers(blocks: int) -> list[Array]:
    """Return one warm array per layer range. Shapes: [blocks, BLOCK_BYTES / LAYER_RANGES] each."""
    return [warm_buffer(blocks, BLOCK_BYTES // LAYER_RANGES) for _ in range(LAYER_RANGES)]
