"""The tensors of a model, named as GGUF names them, and a fingerprint of every byte of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from kvstore.engine.config import Family, ModelConfig
from kvstore.errors import InvalidArgument
from kvstore.hashing import tensors_fingerprint

Tensors = Mapping[str, torch.Tensor]
"""Keys and queries in the half-rotated order; Gemma's norms with the 1 already added."""
TOKEN_LISTS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One layer. Projections of one input are one matrix: a wide product is faster than three narrow ones.

    Shapes: qkv [(heads + 2 kv_heads) head_dim, dim]; gate_up [2 hidden, dim].
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    post_attention_norm: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    post_ffn_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """A whole model on one device. Shapes: embedding and head [vocabulary, dim]."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in; norms are kept in float32."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.embedding.device

    @staticmethod
    def of(config: ModelConfig, tensors: Tensors, *, dtype: torch.dtype, device: torch.device) -> Weights:
        """Arrange tensors for the forward pass.

        Errors: InvalidArgument naming a tensor that is missing.
        """

        def matrix(*names: str) -> torch.Tensor:
            return torch.cat([_named(tensors, name) for name in names]).to(device, dtype)

        def norm(name: str) -> torch.Tensor:
            return _named(tensors, name).to(device, torch.float32)

        def optional(name: str) -> torch.Tensor | None:
            return norm(name) if name in tensors else None

        def layer(at: str) -> LayerWeights:
            return LayerWeights(
                attention_norm=norm(f"{at}.attn_norm.weight"),
                qkv=matrix(*(f"{at}.attn_{one}.weight" for one in "qkv")),
                query_norm=optional(f"{at}.attn_q_norm.weight"),
                key_norm=optional(f"{at}.attn_k_norm.weight"),
                output=matrix(f"{at}.attn_output.weight"),
                post_attention_norm=optional(f"{at}.post_attention_norm.weight"),
                ffn_norm=norm(f"{at}.ffn_norm.weight"),
                gate_up=matrix(f"{at}.ffn_gate.weight", f"{at}.ffn_up.weight"),
                down=matrix(f"{at}.ffn_down.weight"),
                post_ffn_norm=optional(f"{at}.post_ffw_norm.weight"),
            )

        embedding = matrix("token_embd.weight")
        return Weights(
            embedding=embedding,
            layers=tuple(layer(f"blk.{index}") for index in range(config.layers)),
            norm=norm("output_norm.weight"),
            head=matrix("output.weight") if "output.weight" in tensors else embedding,
            fingerprint=fingerprint(tensors),
        )


def _named(tensors: Tensors, name: str) -> torch.Tensor:
    try:
        return tensors[name]
    except KeyError:
        raise InvalidArgument(f"model: tensor {name} is missing, {len(tensors)} others are there") from None


def fingerprint(tensors: Tensors) -> str:
    """Return a fingerprint of every byte, dtype and shape of all tensors; for accidents, not for forgers."""
    plain = (
        (
            name,
            str(t.dtype),
            t.shape,
            t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data,
        )
        for name, t in sorted(tensors.items())
    )
    return tensors_fingerprint(plain, person=b"kvstore eng wts")


def read_gguf(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Return a file's config and its tensors in float32.

    Errors: InvalidArgument when it is no GGUF file, or of a family that is not known.
    """
    reader = open_gguf(path)
    config = ModelConfig.from_gguf(metadata(reader))
    tensors = {}
    for tensor in reader.tensors:
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = torch.from_numpy(np.array(plain, np.float32))
        tensors[tensor.name] = _half_rotated(config, tensor.name, values)
    return config, tensors


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Open a GGUF file.

    Errors: InvalidArgument when it is none.
    """
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"model: {path} cannot be read as GGUF: {error}") from error


def metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Return a file's fields but the lists of its tokenizer, which take seconds to unpack."""
    return {name: field.contents() for name, field in reader.fields.items() if name not in TOKEN_LISTS}


def _half_rotated(config: ModelConfig, name: str, values: torch.Tensor) -> torch.Tensor:
    """Llama files keep query and key rows interleaved; the rotation here wants halves."""
    heads = {"attn_q.weight": config.heads, "attn_k.weight": config.kv_heads}.get(name.split(".", 2)[-1])
    if config.family is not Family.LLAMA or heads is None:
        return values
    pairs = values.view(heads, config.head_dim // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(values.shape).contiguous()
