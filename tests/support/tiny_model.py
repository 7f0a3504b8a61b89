"""A random Llama of four layers: real kernels, built from a config in milliseconds, no download."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512


def tiny_model(
    *, seed: int = 1, rope_theta: float = 10000.0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """Return a model with weights of its own per seed; the spread of its weights keeps logits well apart."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config: Any = LlamaConfig(**(sizes | changes))
    build: Any = LlamaForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(config).to(dtype).eval()


def tokens(count: int, *, seed: int = 7) -> list[int]:
    """Return random token ids, the same for the same seed; a shorter row is a prefix of a longer one."""
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(VOCABULARY, (1,), generator=generator)) for _ in range(count)]
