"""A worker process of the adapter tests: a tiny model, one request, the result as JSON on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from engine_adapters.transformers import PrefixCache
from engine_adapters.transformers.prefix_cache import hit_blocks
from kvstore.client import Client
from tests.support.tiny_model import tiny_model

BLOCK_TOKENS = 16
DEADLINE_SECONDS = 10.0
"""Tests judge what happens, not how fast a busy machine is."""


def answer(
    model: Any, client: Client, prompt: list[int], *, max_new_tokens: int, **options: Any
) -> dict[str, Any]:
    """Ask through the store and say everything that a test may want to know."""
    cache = PrefixCache(
        model, client, block_tokens=BLOCK_TOKENS, match_seconds_max=DEADLINE_SECONDS, **options
    )
    result = cache.generate(prompt, max_new_tokens=max_new_tokens)
    return {
        "ids": list(result.ids),
        "hit_tokens": result.hit_tokens,
        "tiers": hit_blocks(result.tiers),
        "reason": result.prefill.reason and str(result.prefill.reason),
        "stored": result.prompt_saved.stored + result.answer_saved.stored,
        "present": result.prompt_saved.present + result.answer_saved.present,
    }


def main() -> None:
    """Read {address, prompt, max_new_tokens, model} from stdin."""
    job = json.load(sys.stdin)
    with Client(job["address"]) as client:
        result = answer(
            tiny_model(**job["model"]), client, job["prompt"], max_new_tokens=job["max_new_tokens"]
        )
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
