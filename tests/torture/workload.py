"""What the clients store: prompts by number, and bytes that follow from keys: every read has its oracle."""

from __future__ import annotations

import numpy as np

from kvstore.client import OpenNamespace
from kvstore.copying import Bytes
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.types import HASH_BYTES, AckTier

BLOCK_BYTES = 3000
BLOCKS = 24
SHARED_BLOCKS = 4
FAMILIES = 16
"""Prompts of a family share their first SHARED_BLOCKS blocks, so that puts meet each other's blocks."""
WINDOW = 80
"""How many prompts are in use at a time; the window moves on, and what it leaves must stay."""
LAYOUT = Layout.single(dtype="u8", bytes_max=BLOCK_BYTES, layers=2, segments=2)
KEPT = Namespace(model="torture", weights="kept", layout=LAYOUT, block_tokens=16)
"""Nobody deletes here: what was acknowledged on SSD must be there for good."""
LOOSE = Namespace(model="torture", weights="loose", layout=LAYOUT, block_tokens=16)
"""Here blocks are deleted, forgotten and put by short-lived classes."""
PURGED = Namespace(model="torture", weights="purged", layout=LAYOUT, block_tokens=16)
"""Here prompts are put once and deleted: what was answered stays away."""
_WORDS = np.arange((BLOCK_BYTES + 7) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def prompt_keys(namespace: OpenNamespace, number: int) -> bytes:
    """Return the packed keys of a prompt."""
    shared = np.random.default_rng(number % FAMILIES).integers(0, 1 << 20, 16 * SHARED_BLOCKS)
    own = np.random.default_rng(1000 + number).integers(0, 1 << 20, 16 * (BLOCKS - SHARED_BLOCKS))
    return namespace.hashes(np.concatenate([shared, own]))


def block(key: bytes) -> Bytes:
    """Return the bytes that belong to a key; every word depends on the key and on its place."""
    word = np.uint64(int.from_bytes(key[:8], "little"))
    mixed = (_WORDS ^ word) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return mixed.view(np.uint8)[:BLOCK_BYTES]


def blocks_of(keys: bytes) -> Bytes:
    """Return the bytes that belong to packed keys, a row per block."""
    return np.stack([block(keys[i : i + HASH_BYTES]) for i in range(0, len(keys), HASH_BYTES)])


def wrong_blocks(keys: bytes, have: Bytes, blocks: int) -> int:
    """Return how many of the first `blocks` rows are not what belongs to their keys."""
    if not blocks:
        return 0
    return int((blocks_of(keys[: HASH_BYTES * blocks]) != have[:blocks]).any(axis=1).sum())


def store(namespace: OpenNamespace, keys: bytes, *, ack: AckTier = AckTier.SSD) -> int:
    """Put a prompt from its root and return how many of its blocks are there now."""
    return namespace.put(namespace.root, keys, blocks_of(keys), ack=ack, deadline_seconds=20.0).present
