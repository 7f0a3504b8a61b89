"""What names an engine's blocks: its workers' facts and its configuration, joined to a namespace.

A vLLM block is opaque: what its bytes mean depends on the attention backend, the instruction set it packs
for, dtype, block size and parallel layout. All of them are in the namespace, so that a block of another
engine is absent instead of wrong.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_adapters.transformers.identity import SILENT, canonical, positions
from kvstore.errors import InvalidArgument
from kvstore.layout import CacheGroup, Layout, Part, Segment
from kvstore.namespace import Namespace
from kvstore.types import SEGMENTS_MAX

PACKING = "vllm-blocks-v1"
LENGTH_RULED_ROPE = ("dynamic", "longrope")
"""Rope types whose tables depend on the longest sequence that the engine was started for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One of a worker's KV tensors; `bytes` of a block."""

    layer: str
    bytes: int
    shape: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What one rank knows of its memory. `replicas` consecutive tensor-parallel ranks hold equal bytes."""

    pp_rank: int
    tp_rank: int
    tensors: tuple[Tensor, ...]
    packing: str
    weights: str
    replicas: int = 1

    @property
    def rank(self) -> str:
        """The name of this rank alone."""
        return f"pp{self.pp_rank}tp{self.tp_rank}"

    @property
    def shard(self) -> str:
        """The name of the part that this rank reads, and writes if it is the first of its replicas."""
        return f"pp{self.pp_rank}tp{self.tp_rank // self.replicas}"

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that stores its shard."""
        return self.tp_rank % self.replicas == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the configuration says. `config` is the model's own, as plain values."""

    model: str
    version: str
    config: Mapping[str, Any]
    dtype: str
    cache_dtype: str
    quantisation: str
    block_tokens: int
    max_model_len: int
    tenant: str = ""


def engine_namespace(engine: EngineFacts, workers: Sequence[WorkerFacts], *, adapter: str = "") -> Namespace:
    """Return the namespace of an engine's blocks, given the facts of all its ranks.

    Errors: InvalidArgument when the ranks contradict each other.
    """
    shards = _shards(workers)
    packings = {worker.packing for worker in workers}
    weights = {worker.weights for worker in workers}
    if len(packings) != 1 or len(weights) != 1:
        raise InvalidArgument(
            f"vllm adapter: ranks differ in packing {sorted(packings)} or weights {sorted(weights)}"
        )
    rope = positions(engine.config)
    rest = {key: value for key, value in engine.config.items() if key not in rope and key not in SILENT}
    layout = Layout(
        engine.cache_dtype, (CacheGroup("kv"),), tuple(_part(i, w) for i, w in enumerate(shards))
    ).checked()
    return Namespace(
        model=engine.model,
        weights=f"{weights.pop()}+config-{_digest(rest)}",
        layout=layout,
        block_tokens=engine.block_tokens,
        dtype=engine.dtype,
        quantisation=engine.quantisation,
        rope=canonical(_rope(rope, engine.max_model_len)),
        engine=f"vllm-{engine.version}",
        packing=f"{PACKING} {packings.pop()} tensors-{_digest([_plain(worker) for worker in shards])}",
        adapter=adapter,
        tenant=engine.tenant,
    ).checked()


def _rope(rope: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """Return the positional parameters, with the engine's limit where it changes the rotation."""
    is_ruled = any(kind in canonical(rope) for kind in LENGTH_RULED_ROPE)
    return {**rope, "max_model_len": max_model_len} if is_ruled else rope


def _shards(workers: Sequence[WorkerFacts]) -> list[WorkerFacts]:
    """Return one worker per part, in the order of the parts."""
    ranks = sorted(workers, key=lambda worker: (worker.pp_rank, worker.tp_rank))
    if not ranks:
        raise InvalidArgument("vllm adapter: no worker told what its memory looks like")
    found: dict[str, WorkerFacts] = {}
    for rank in ranks:
        first = found.setdefault(rank.shard, rank)
        if _plain(first) != _plain(rank):
            raise InvalidArgument(f"vllm adapter: ranks of shard {rank.shard} differ in their KV tensors")
    return list(found.values())


def _part(index: int, worker: WorkerFacts) -> Part:
    sizes = [tensor.bytes for tensor in worker.tensors]
    cuts = min(SEGMENTS_MAX, len(sizes))
    edges = [len(sizes) * cut // cuts for cut in range(cuts + 1)]
    segments = []
    offset = 0
    for start, end in itertools.pairwise(edges):
        length = sum(sizes[start:end])
        segments.append(Segment(start, end - start, offset, length))
        offset += length
    return Part(index, "kv", worker.shard, offset, tuple(segments))


def _plain(worker: WorkerFacts) -> list[list[object]]:
    return [[tensor.layer, tensor.bytes, tensor.shape] for tensor in worker.tensors]


def _digest(value: object) -> str:
    return hashlib.blake2b(canonical(value).encode(), digest_size=16, person=b"kvstore vl cfg").hexdigest()
