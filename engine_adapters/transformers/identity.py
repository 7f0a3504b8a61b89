"""What names the blocks of a model: a fingerprint of its weights, its positions, its namespace."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from engine_adapters.transformers.packing import PACKING, KvShape
from kvstore.errors import InvalidArgument
from kvstore.hashing import tensors_fingerprint
from kvstore.namespace import Namespace

# Positional parameters by name; families invent new ones, so a part of the name decides.
POSITIONAL = ("rope", "rotary", "position", "alibi", "sliding_window", "attention_chunk_size", "layer_types")
# What a config says that cannot change a byte of the attention state, or what the namespace says elsewhere.
SILENT = (
    "_name_or_path", "_model_name_or_path", "name_or_path", "transformers_version", "architectures",
    "use_cache", "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id",
    "problem_type", "pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "dtype", "torch_dtype",
    "quantization_config",
)  # fmt: skip
# These rotate a key by the length of the sequence it was computed in, so a prefix has no bytes of its own.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def weights_fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a fingerprint of every byte of every tensor, and of its name, dtype and shape."""
    plain = (
        (
            name,
            str(t.dtype),
            t.shape,
            t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data,
        )
        for name, t in sorted(tensors, key=lambda item: item[0])
    )
    return tensors_fingerprint(plain, person=b"kvstore hf wts")


def canonical(value: object) -> str:
    """Return JSON that is equal for equal content, whatever the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every positional parameter of a model's config."""
    return {key: value for key, value in config.items() if any(word in key for word in POSITIONAL)}


def refuse_length_dependent(config: Mapping[str, Any]) -> None:
    """Refuse models whose keys depend on how long the whole sequence is.

    Errors: InvalidArgument naming the rope type.
    """
    for kind in _rope_kinds(config, is_positional=False):
        if kind in LENGTH_DEPENDENT_ROPE:
            raise InvalidArgument(
                f"prefix cache: rope type {kind!r} makes keys depend on the sequence length"
            )


def _rope_kinds(config: Mapping[str, Any], *, is_positional: bool) -> Iterator[str]:
    """Yield the rope types of a config and of those inside it; `type` means that only among positions."""
    if is_positional:
        yield config.get("rope_type", config.get("type", ""))
    for key, value in config.items():
        if isinstance(value, Mapping):
            inside = is_positional or any(word in key for word in POSITIONAL)
            yield from _rope_kinds(value, is_positional=inside)


def model_namespace(
    config: Mapping[str, Any],
    shape: KvShape,
    *,
    model: str,
    weights: str,
    engine: str,
    attention: str,
    tenant: str = "",
) -> Namespace:
    """Return the namespace of a model's blocks.

    The rest of the config (activation, norms, scalings) counts as weights: it changes the bytes as they do.
    Errors: InvalidArgument when the keys of a prefix depend on more than the prefix.
    """
    refuse_length_dependent(config)
    rope = positions(config)
    rest = {key: value for key, value in config.items() if key not in rope and key not in SILENT}
    digest = hashlib.blake2b(canonical(rest).encode(), digest_size=16, person=b"kvstore hf cfg").hexdigest()
    layout = shape.layout()
    return Namespace(
        model=model,
        weights=f"{weights}+config-{digest}",
        layout=layout,
        block_tokens=shape.block_tokens,
        dtype=layout.dtype,
        quantisation=canonical(config["quantization_config"]) if config.get("quantization_config") else "",
        rope=canonical(rope),
        engine=engine,
        packing=f"{PACKING} {attention}",
        tenant=tenant,
    ).checked()
