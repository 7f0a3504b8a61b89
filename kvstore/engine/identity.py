"""The name of a model's blocks."""

from __future__ import annotations

from kvstore.engine.config import ModelConfig
from kvstore.engine.pool import KvPool
from kvstore.engine.weights import Weights
from kvstore.namespace import Namespace

ENGINE = "kvstore-engine-1"
PACKING = "rows-1"
"""A row is the key and the value of one token; counts up when rows or pages are arranged in another way."""


def namespace_of(config: ModelConfig, weights: Weights, pool: KvPool, *, tenant: str = "") -> Namespace:
    """Return all that changes the bytes of a block of this model."""
    return Namespace(
        model=config.name,
        weights=weights.fingerprint,
        layout=pool.layout,
        block_tokens=pool.block_tokens,
        dtype=pool.layout.dtype,
        rope=f"theta {config.theta:g}, local {config.local_theta:g}, window {config.window}",
        engine=ENGINE,
        packing=f"{PACKING} {weights.device.type}",
        tenant=tenant,
    ).checked()
