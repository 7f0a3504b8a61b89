"""Hugging Face transformers: a model saves its KV blocks, a fresh process resumes from the longest prefix.

    cache = PrefixCache(model, Client())
    answer = cache.generate(prompt_ids, max_new_tokens=64)

This file imports neither torch nor transformers until PrefixCache is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_adapters.transformers.prefix_cache import Generation, Prefill, PrefixCache, Saved

__all__ = ["PrefixCache", "Generation", "Prefill", "Saved"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from engine_adapters.transformers import prefix_cache

        return getattr(prefix_cache, name)
    raise AttributeError(name)
