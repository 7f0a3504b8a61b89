"""Engines with the transformers adapter, forked from a process that has imported what is slow."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch

from engine_adapters.transformers import PrefixCache
from engine_adapters.transformers.engine import generate_without_store
from engine_adapters.transformers.prefix_cache import hit_blocks
from kvstore.client import Client
from kvstore.testing.adapter_suite.harness import Answer, Engine
from kvstore.testing.adapter_suite.process import Job, nurse
from tests.support.tiny_model import tiny_model


class WithoutStore:
    """The library's own `generate`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        ids = generate_without_store(self._model, prompt, max_new_tokens=new_tokens, on_token=lambda: None)
        return Answer(ids=tuple(ids))

    def forget(self) -> None:
        pass

    def close(self) -> None:
        pass


class WithStore(WithoutStore):
    """The adapter's `generate`."""

    def __init__(self, model: Any, job: Job) -> None:
        super().__init__(model)
        self._client = Client(job["address"])
        wait = job["patience_seconds"]
        self._cache = PrefixCache(
            model,
            self._client,
            block_tokens=job["block_tokens"],
            match_seconds_max=wait,
            fetch_seconds_min=wait,
            fetch_seconds_max=wait,
            save_seconds_max=wait,
        )

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        result = self._cache.generate(prompt, max_new_tokens=new_tokens)
        reason, size = result.prefill.reason, self._cache.namespace.block_tokens
        return Answer(
            ids=result.ids,
            hit_tokens={tier: size * blocks for tier, blocks in hit_blocks(result.tiers).items()},
            reasons=(str(reason),) if reason else (),
        )

    def close(self) -> None:
        self._client.close()


def smollm2() -> Any:
    """Return SmolLM2, loaded before the forks: they share its memory."""
    from engine_adapters.transformers.smollm2 import load

    model, _ = load(lambda _: None)
    for config in (model.generation_config, model.config):
        config.eos_token_id = None  # an answer has as many tokens as were asked for
    return model


def other(model: Any) -> Any:
    """Return the model with weights a little different."""
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.25)
    return model


def main(kind: str, descriptor: int) -> None:
    """Fork engines of one kind of model."""
    shared = smollm2() if kind == "smollm2" else None

    def open_engine(job: Job) -> Engine:
        model = shared or tiny_model()
        if job["other_model"]:
            model = other(model)
        return WithStore(model, job) if job["address"] else WithoutStore(model)

    nurse(socket.socket(fileno=descriptor), open_engine)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
