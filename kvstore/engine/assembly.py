"""An engine from its pieces: model file, pool, hbm tier, the daemon if there is one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvstore.client import Client
from kvstore.clock import Clock, SystemClock
from kvstore.engine.admission import MATCH_SECONDS, SUFFIX_TOKENS_MIN
from kvstore.engine.config import LayerKind, ModelConfig
from kvstore.engine.costs import StepCosts, calibrate
from kvstore.engine.engine import Engine
from kvstore.engine.hbm import Hbm
from kvstore.engine.identity import namespace_of
from kvstore.engine.model import Model
from kvstore.engine.pool import KvPool, pages_within
from kvstore.engine.scheduler import Budget
from kvstore.engine.weights import Weights, read_gguf
from kvstore.engine.windows import Checkpoints
from kvstore.errors import InvalidArgument
from kvstore.events import Events
from kvstore.hashing import chain_root

WINDOW_SHARE = 0.25
INVARIANT_ROWS = SUFFIX_TOKENS_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Sizes and places. Units: bytes; tokens; sequences at a time; compute threads, 0: torch's own choice.

    Answers of the classes in `unsaved_answers` are not put to the daemon: their history will not be resent as
    it was generated. A step has at least `rows_min` rows: with INVARIANT_ROWS a sequence computes the same
    bits whoever else computes, and decoding alone is slower.
    """

    pool_bytes: int = 1 << 30
    block_tokens: int = 64
    sequences_max: int = 8
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    tenant: str = ""
    tenant_secret: bytes = b""
    budget: Budget = field(default_factory=Budget)
    match_seconds: float = MATCH_SECONDS
    threads: int = 0
    rows_min: int = 1
    unsaved_answers: frozenset[str] = frozenset()


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype that the engine computes in.

    Errors: InvalidArgument.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise InvalidArgument(f"engine: dtype {name!r} is not one of {', '.join(known)}")
    return known[name]


def load_model(path: Path, options: EngineOptions) -> Model:
    """Read a GGUF file.

    Errors: InvalidArgument.
    """
    config, tensors = read_gguf(path)
    device = torch.device(options.device)
    return Model(config, Weights.of(config, tensors, dtype=options.dtype, device=device))


def build_engine(
    model: Model,
    client: Client | None,
    options: EngineOptions,
    *,
    costs: StepCosts | None = None,
    clock: Clock | None = None,
    events: Events | None = None,
) -> Engine:
    """Put an engine together and start it. Without `costs` the machine is measured first.

    Errors: InvalidArgument when the pool holds no block; LayoutMismatch when the store knows the model with
    other bytes.
    """
    clock = clock or SystemClock()
    pool, checkpoints = _pool(model.config, options)
    namespace = namespace_of(model.config, model.weights, pool, tenant=options.tenant)
    root = chain_root(namespace.fingerprint, tenant_secret=options.tenant_secret)
    store = client.open(namespace, tenant_secret=options.tenant_secret) if client is not None else None
    hbm = Hbm(namespace, root=root, page_count=pool.page_count, clock=clock, events=events or Events())
    costs = costs or calibrate(model, pool, clock)
    return Engine(
        model,
        pool,
        hbm,
        store,
        costs,
        root=root,
        checkpoints=checkpoints,
        budget=options.budget,
        match_seconds=options.match_seconds,
        threads=options.threads,
        rows_min=options.rows_min,
        unsaved_answers=options.unsaved_answers,
        clock=clock,
    )


def _pool(config: ModelConfig, options: EngineOptions) -> tuple[KvPool, Checkpoints | None]:
    """Cut the budget: of a model with window layers a part goes to the rows of block boundaries."""
    block_bytes = (
        options.block_tokens * config.row_width * options.dtype.itemsize * len(config.of_kind(LayerKind.FULL))
    )
    window_bytes = int(options.pool_bytes * WINDOW_SHARE) if config.window else 0
    pool = KvPool(
        config,
        block_tokens=options.block_tokens,
        page_count=pages_within(options.pool_bytes - window_bytes, block_bytes=block_bytes),
        scratch_count=options.sequences_max,
        dtype=options.dtype,
        device=torch.device(options.device),
    )
    if pool.windows is None:
        return pool, None
    return pool, Checkpoints(max(1, window_bytes // pool.windows.part.bytes_max))
