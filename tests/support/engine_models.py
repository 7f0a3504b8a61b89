"""Tiny random models for the bundled engine, and the same weights as transformers has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvstore.engine.config import Family, LayerKind, ModelConfig
from kvstore.engine.model import Model
from kvstore.engine.weights import Weights
from tests.support.tiny_model import tiny_model

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LLAMA_NAMES = NAMES | {"post_attention_layernorm": "ffn_norm"}
GEMMA_NAMES = NAMES | {"post_attention_layernorm": "post_attention_norm"}
WINDOW = 8


def tiny_gemma(*, seed: int = 1) -> Any:
    """A random Gemma 3 of six layers, the last of which sees everything."""
    config: Any = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    build: Any = Gemma3ForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(config).eval()


def _tensors(theirs: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a transformers model under the names of GGUF."""
    is_gemma = "gemma3" in theirs.config.model_type
    names = GEMMA_NAMES if is_gemma else LLAMA_NAMES
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        plus_one = 1.0 if is_gemma and "norm" in name else 0.0
        if (renamed := _renamed(name, names)) is not None:
            tensors[renamed] = tensor.float() + plus_one
    if theirs.config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    return tensors


def write_gguf(theirs: Any, path: Path) -> None:
    """Write a transformers Llama as a GGUF file with a tokenizer of single bytes."""
    config = theirs.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny-llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(0x100 + index) for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges([])
    writer.add_eos_token_id(config.vocab_size - 1)
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    for name, tensor in _tensors(theirs).items():
        if (count := heads.get(name.split(".", 2)[-1])) is not None:
            halves = tensor.view(count, 2, config.head_dim // 2, -1)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def engine_model(theirs: Any, dtype: torch.dtype = torch.float32) -> Model:
    """Return the bundled engine's model with the weights of a transformers model."""
    config = theirs.config
    is_gemma = "gemma3" in config.model_type
    tensors = _tensors(theirs)
    rope = config.rope_parameters
    own = ModelConfig(
        name=f"tiny-{config.model_type}",
        family=Family.GEMMA3 if is_gemma else Family.LLAMA,
        kinds=tuple(
            LayerKind.WINDOW if is_gemma and kind == "sliding_attention" else LayerKind.FULL
            for kind in getattr(config, "layer_types", ["full_attention"] * config.num_hidden_layers)
        ),
        dim=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        theta=rope["full_attention"]["rope_theta"] if is_gemma else rope["rope_theta"],
        local_theta=rope["sliding_attention"]["rope_theta"] if is_gemma else rope["rope_theta"],
        window=config.sliding_window if is_gemma else 0,
        context_tokens=4096,
    ).checked()
    return Model(own, Weights.of(own, tensors, dtype=dtype, device=torch.device("cpu")))


def _renamed(name: str, names: dict[str, str]) -> str | None:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, place, layer, rest = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{names[rest]}.weight" if place == "layers" else None


def tiny_llama_pair(*, seed: int = 1) -> tuple[Any, Model]:
    """Return a random Llama as transformers has it, and as the engine has it."""
    theirs = tiny_model(seed=seed)
    return theirs, engine_model(theirs)
