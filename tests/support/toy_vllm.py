"""A scheduler and ranks that call the connector's two sides as vLLM does; blocks hold what their chain says.

It stands in for vLLM's call order only, as observed of the real one. The client and the daemon are real.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from engine_adapters.vllm.identity import EngineFacts, Tensor, WorkerFacts, engine_namespace
from engine_adapters.vllm.memory import HostMemory
from engine_adapters.vllm.messages import Answers, Step
from engine_adapters.vllm.names import NameBook
from engine_adapters.vllm.options import Options
from engine_adapters.vllm.scheduler import SchedulerSide
from engine_adapters.vllm.worker import WorkerSide
from kvstore.client import Client
from kvstore.clock import Clock
from kvstore.copying import Bytes

BLOCK = 16
LAYERS = 3
ROW_BYTES = 4000
PATIENT: Mapping[str, Any] = {
    "match_seconds": 10.0,
    "fetch_seconds": 20.0,
    "fetch_seconds_min": 20.0,
    "put_seconds": 20.0,
}
"""Tests judge what happens, not how fast a busy machine is."""


@dataclass(eq=False)
class ToyRequest:
    """What the connector reads of vLLM's Request; hashes are of tokens alone, as vLLM's are."""

    request_id: str
    tokens: list[int]
    kv_transfer_params: Mapping[str, Any] | None = None
    lora_request: Any = None
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        names, parent = [], b""
        for start in range(0, len(self.tokens) // BLOCK * BLOCK, BLOCK):
            parent = hashlib.sha256(parent + repr(self.tokens[start : start + BLOCK]).encode()).digest()
            names.append(parent)
        return names


def block_bytes(name: bytes, rank: int) -> Bytes:
    """Return what a rank computes for a block: [layers, row bytes]."""
    seed = int.from_bytes(hashlib.sha256(name + bytes([rank])).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, ROW_BYTES), dtype=np.uint8)


class ToyRank:
    """One worker: its tensors, and its side of the connector."""

    def __init__(
        self, address: str, options: Options, facts: WorkerFacts, num_blocks: int, clock: Clock | None
    ) -> None:
        self.rank = facts.tp_rank
        self.rows = [np.zeros((num_blocks, ROW_BYTES), np.uint8) for _ in range(LAYERS)]
        self.side = WorkerSide(
            Client(address, limits=options.limits),
            options,
            HostMemory(self.rows),
            rank=facts.rank,
            shard=facts.shard,
            writes=facts.writes,
            num_blocks=num_blocks,
            clock=clock,
        )

    def compute(self, block: int, name: bytes) -> None:
        for row, value in zip(self.rows, block_bytes(name, self.rank), strict=True):
            row[block] = value

    def holds(self, block: int, name: bytes) -> bool:
        wanted = block_bytes(name, self.rank)
        return all(np.array_equal(row[block], value) for row, value in zip(self.rows, wanted, strict=True))


def rank_facts(tp_rank: int, **changes: Any) -> WorkerFacts:
    tensors = tuple(Tensor(layer=f"layers.{i}", bytes=ROW_BYTES, shape="[4000]") for i in range(LAYERS))
    given = {"packing": "TOY/vec", "weights": "files-1", **changes}
    return WorkerFacts(pp_rank=0, tp_rank=tp_rank, tensors=tensors, **given)


def engine_facts(**changes: Any) -> EngineFacts:
    given: dict[str, Any] = {
        "model": "toy",
        "version": "0.32.0",
        "config": {"hidden_size": 8, "rope_theta": 10000.0},
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "quantisation": "",
        "block_tokens": BLOCK,
        "max_model_len": 4096,
    }
    return EngineFacts(**{**given, **changes})


@dataclass
class Outcome:
    """What a run of one request came to; `failed` are the engine's blocks that could not be loaded."""

    promised_tokens: int = 0
    failed: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)


class ToyEngine:
    """An engine with `ranks` workers. A context manager that ends it in the orderly way.

    `clocks` are the ranks' and, last, the scheduler's.
    """

    def __init__(
        self,
        address: str,
        *,
        ranks: int = 1,
        num_blocks: int = 64,
        facts: Mapping[str, Any] | None = None,
        clocks: Sequence[Clock | None] | None = None,
        **options: Any,
    ) -> None:
        self.options = Options.parse({**PATIENT, **options})
        *rank_clocks, clock = clocks or [None] * (ranks + 1)
        workers = [rank_facts(rank, **(facts or {})) for rank in range(ranks)]
        self.ranks = [
            ToyRank(address, self.options, worker, num_blocks, rank_clock)
            for worker, rank_clock in zip(workers, rank_clocks, strict=True)
        ]
        self.names = NameBook(
            Client(address, limits=self.options.limits),
            lambda adapter, generation: engine_namespace(
                engine_facts(model=f"toy{generation}"), workers, adapter=adapter
            ),
            retention_class=self.options.retention_class,
        )
        self.side = SchedulerSide(self.names, self.options, ranks=ranks, save_blocks=4, clock=clock)
        self.free = list(range(1, num_blocks))
        self.tables: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.read: set[str] = set()
        self.invalid: set[int] = set()
        self.loaded: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.side.close()
        self.side.close()

    def admit(self, request: ToyRequest, *, local: Sequence[int] = ()) -> int:
        """Ask, allocate and lease; `local` blocks are the engine's own hits. Return the tokens promised."""
        computed = len(local) * BLOCK
        promised = self.side.probe(request, computed)
        table = [*local]
        while len(table) * BLOCK < request.num_tokens:
            table.append(self.free.pop(0))
        self.tables[request.request_id] = table
        self.loaded.pop(request.request_id, None)
        self.side.allocated(request, table, promised)
        request.num_computed_tokens = computed + promised
        return promised

    def step(
        self, scheduled: Mapping[str, int] | None = None, requests: Mapping[str, ToyRequest] | None = None
    ) -> Step:
        """Run a step: `scheduled` tokens of each request are computed, in all ranks."""
        scheduled, requests = dict(scheduled or {}), dict(requests or {})
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name,
                    block_ids=(self.tables[name],),
                    num_computed_tokens=requests[name].num_computed_tokens,
                )
                for name in scheduled
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=self.finished,
            preempted_req_ids=self.preempted,
        )
        waits = not self.options.load_async
        step = self.side.plan(output, waits=waits)
        self.finished, self.preempted = set(), set()
        for rank in self.ranks:
            rank.side.begin(step)
            if step.waits:
                rank.side.start_loads()
            for name, tokens in scheduled.items():
                self._compute(rank, requests[name], tokens)
            if not step.waits:
                rank.side.start_loads()
            rank.side.end()
        for name, tokens in scheduled.items():
            requests[name].num_computed_tokens += tokens
        self._hear()
        return step

    def _compute(self, rank: ToyRank, request: ToyRequest, tokens: int) -> None:
        names, table = request.block_hashes, self.tables[request.request_id]
        begin = request.num_computed_tokens
        for block in range(begin // BLOCK, min((begin + tokens) // BLOCK, len(names))):
            # As attention would: what stands on a wrong block is wrong too.
            before = all(rank.holds(table[i], names[i]) for i in range(block))
            rank.compute(table[block], names[block] if before else b"garbage")

    def _hear(self) -> None:
        """Join the ranks' answers as vLLM's aggregator does."""
        answers = Answers()
        invalid: set[int] = set()
        for rank in self.ranks:
            read, loaded = rank.side.finished()
            self.read |= read
            self.loaded.update(loaded)
            invalid |= rank.side.errors()
            if (mine := rank.side.answers()) is not None:
                answers = answers.joined(mine)
        self.invalid |= invalid
        self.side.heard(answers, failed_blocks=bool(invalid))

    def run(self, request: ToyRequest, *, local: Sequence[int] = ()) -> Outcome:
        """Run a request from its admission to its end, in one chunk."""
        outcome = Outcome(promised_tokens=self.admit(request, local=local))
        self.invalid.clear()
        if outcome.promised_tokens and self.options.load_async:
            outcome.steps.append(self.step())
            while self.loaded[request.request_id] < len(self.ranks):
                outcome.steps.append(self.step())
            self._fall_back(request)
        left = request.num_tokens - request.num_computed_tokens
        outcome.steps.append(self.step({request.request_id: left}, {request.request_id: request}))
        if self.invalid and not self.options.load_async:
            self._fall_back(request)
            left = request.num_tokens - request.num_computed_tokens
            outcome.steps.append(self.step({request.request_id: left}, {request.request_id: request}))
        outcome.failed = set(self.invalid)
        self.finish(request)
        return outcome

    def _fall_back(self, request: ToyRequest) -> None:
        """Compute from the first failed block on, as vLLM does."""
        table = self.tables[request.request_id]
        failed = [index for index, block in enumerate(table) if block in self.invalid]
        if failed:
            request.num_computed_tokens = min(request.num_computed_tokens, failed[0] * BLOCK)

    def finish(self, request: ToyRequest) -> bool:
        """End a request; run idle steps until its blocks may go."""
        held = self.side.finished(request, request.num_computed_tokens)
        self.finished.add(request.request_id)
        self.step()
        while held and request.request_id not in self.read:
            self.step()
        for rank in self.ranks:
            assert rank.side.flush(20.0)
        return held

    def is_right(self, request: ToyRequest) -> bool:
        """Say whether every full block of every rank holds what its chain says."""
        table = self.tables[request.request_id]
        return all(
            rank.holds(block, name)
            for rank in self.ranks
            for block, name in zip(table, request.block_hashes, strict=False)
        )
