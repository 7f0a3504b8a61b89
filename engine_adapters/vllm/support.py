"""Reads vLLM's configuration objects: what is supported, and what names the bytes. Imports no vLLM."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine_adapters.transformers.identity import canonical
from engine_adapters.vllm.identity import EngineFacts
from engine_adapters.vllm.options import Options
from engine_adapters.vllm.weights import weights_fingerprint

TESTED_VERSIONS = ("0.32",)
"""Minor versions that the end-to-end tests run with."""
SAFE_HASHES = ("sha256", "sha256_cbor")
"""The block hashes of vLLM that are collision safe and equal in every process."""
FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")
RANDOM_WEIGHTS = "dummy"


def why_not(config: Any, kv_cache_config: Any) -> str:
    """Return why an engine of this configuration cannot share its blocks, "" when it can."""
    cache, parallel = config.cache_config, config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if not cache.enable_prefix_caching:
        return "prefix caching is off, so blocks have no hashes (remove --no-enable-prefix-caching)"
    if cache.prefix_caching_hash_algo not in SAFE_HASHES:
        return (
            f"--prefix-caching-hash-algo is {cache.prefix_caching_hash_algo!r}; only {SAFE_HASHES} are "
            "collision safe and equal in every process"
        )
    if len(groups) != 1 or kinds[0] not in FULL_ATTENTION:
        return f"the KV cache consists of {kinds}; only one group of full attention is stored"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1 or (
        getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "context parallelism splits blocks by token, which is not stored"
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None and getattr(speculative, "method", "") != "ngram":
        return "a draft model's KV depends on tokens behind the block"
    if getattr(cache, "calculate_kv_scales", False):
        return "KV scales are measured at run time (calculate_kv_scales), so bytes differ between processes"
    return ""


def engine_facts(config: Any, options: Options, *, version: str) -> EngineFacts:
    """Return what the configuration says about the bytes."""
    model, cache = config.model_config, config.cache_config
    plain = model.hf_config.to_dict()
    quantisation = {"method": model.quantization, "config": plain.get("quantization_config")}
    cache_dtype = str(cache.cache_dtype)
    return EngineFacts(
        model=options.model or (plain.get("architectures") or [type(model.hf_config).__name__])[0],
        version=version,
        config=plain,
        dtype=_plain_dtype(model.dtype),
        cache_dtype=_plain_dtype(model.dtype) if cache_dtype == "auto" else cache_dtype,
        quantisation=canonical(quantisation) if any(quantisation.values()) else "",
        block_tokens=cache.block_size,
        max_model_len=model.max_model_len,
        tenant=options.tenant,
    )


def weights_of(config: Any, options: Options) -> str:
    """Return what names the weights: the user's version, else a digest of the files.

    Errors: InvalidArgument when there is neither.
    """
    if config.load_config.load_format == RANDOM_WEIGHTS:
        return f"random-{uuid.uuid4()}"  # of this process alone
    if options.weights:
        return f"version-{options.weights}"
    model = config.model_config
    folder = Path(model.model_weights or model.model)
    return weights_fingerprint(folder if folder.exists() else _in_hub_cache(str(folder), model.revision))


def _in_hub_cache(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def packing_of(layers: Mapping[str, Any], names: Iterable[str], *, layout: str | None) -> str:
    """Return how blocks are packed: attention backend, instruction set and layout of every kind of layer."""
    kinds = set()
    for name in names:
        layer = layers.get(name)
        get_backend = getattr(layer, "get_attn_backend", None)
        backend = get_backend().get_name() if get_backend is not None else type(layer).__name__
        kinds.add(f"{backend}/{getattr(layer, 'isa', '') or 'default'}")
    return f"{'+'.join(sorted(kinds))} {layout or 'engine-layout'}"


def _plain_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
