"""Transformers, as `kvstore doctor --engine transformers` examines it."""

from __future__ import annotations

from engine_adapters.entry import Entry
from kvstore.namespace import Namespace


def sample() -> Namespace:
    """Return a namespace of blocks as those of SmolLM2 in float32: 30 layers of 3 heads of 64."""
    import torch

    from engine_adapters.transformers.identity import model_namespace
    from engine_adapters.transformers.packing import KvShape

    shape = KvShape(layers=30, kv_heads=3, head_dim=64, dtype=torch.float32, block_tokens=64)
    return model_namespace(
        {}, shape, model="kvstore-doctor", weights="none", engine="transformers", attention="none"
    )


ENTRY = Entry(
    name="transformers",
    distributions=("transformers",),
    tested=("5.19",),
    adapter="engine_adapters.transformers.prefix_cache",
    sample=sample,
)
