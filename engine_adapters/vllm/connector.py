"""The only file that knows vLLM: its connector interface, its configuration and its statistics.

vLLM builds the class twice, once beside the scheduler and once in every worker. Each side hands its calls to
a class that knows no vLLM; both sit idle, with a warning, where a block's bytes could not be told for sure.
"""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_adapters.vllm.identity import Tensor, WorkerFacts, engine_namespace
from engine_adapters.vllm.memory import kv_memory
from engine_adapters.vllm.messages import Answers, Step
from engine_adapters.vllm.names import NameBook
from engine_adapters.vllm.options import Options
from engine_adapters.vllm.scheduler import SchedulerSide
from engine_adapters.vllm.support import TESTED_VERSIONS, engine_facts, packing_of, weights_of, why_not
from engine_adapters.vllm.tally import METRICS, added, readable, split
from engine_adapters.vllm.worker import WorkerSide
from kvstore.client import Client
from kvstore.namespace import Namespace
from kvstore.types import Tier

if TYPE_CHECKING:
    import torch

_log = init_logger(__name__)
_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.SSD: CacheHitSource.DISK}


@dataclass
class Orders(KVConnectorMetadata):
    """A step's orders on their way to the workers."""

    step: Step


@dataclass
class Facts(KVConnectorHandshakeMetadata):
    """A worker's facts on their way to the scheduler."""

    worker: WorkerFacts


@dataclass
class Report(KVConnectorWorkerMetadata):
    """What became of loads and how fast they came, on its way to the scheduler."""

    answers: Answers

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """Join the reports of two ranks."""
        return Report(self.answers.joined(other.answers))


@dataclass
class Stats(KVConnectorStats):
    """Counts since the last step."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """Return the sum."""
        return Stats(added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return what a log line shows."""
        return readable(self.data)

    def is_empty(self) -> bool:
        """Say whether nothing was counted."""
        return not self.data


class Metrics(KVConnectorPromMetrics):
    """The counts in vLLM's own Prometheus metrics: vllm:kvstore_<name>_total."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kvstore_{name}", documentation=help, labelnames=[*labelnames, label or "part"]
            )
            for name, (label, help) in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a step's counts."""
        for key, amount in transfer_stats_data.items():
            name, label = split(key)
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx], label or "all").inc(amount)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector to kvstore.

    Errors: InvalidArgument at the start on a wrong setting; afterwards the store failing is a miss.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._reason = why_not(vllm_config, kv_cache_config)
        self._facts: WorkerFacts | None = None
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._names: NameBook | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._greet()

    def _greet(self) -> None:
        if self._reason:
            _log.warning("kvstore: this engine neither loads nor saves: %s", self._reason)
        if not vllm.__version__.startswith(TESTED_VERSIONS):
            _log.warning(
                "kvstore: vLLM %s is untested, tested are %s", vllm.__version__, ", ".join(TESTED_VERSIONS)
            )
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            # vLLM reads it after building this object, so a lost block need not cost a request.
            _log.warning(
                'kvstore: kv_load_failure_policy is %r, "recompute" is used: a block that the store lost '
                "must cost a recompute, not a request. Set it so in --kv-transfer-config.",
                self._kv_transfer_config.kv_load_failure_policy,
            )
            self._kv_transfer_config.kv_load_failure_policy = "recompute"

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a dropped save is a later miss."""
        return False

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See what the engine's blocks are made of."""
        if self._reason:
            return
        config, memory = self._vllm_config, self._kv_cache_config
        rows = kv_memory(list(kv_caches.values()), num_blocks=memory.num_blocks)
        layers = config.compilation_config.static_forward_context
        per_layer = len(rows.row_bytes) // len(kv_caches)
        facts = WorkerFacts(
            pp_rank=get_pp_group().rank_in_group,
            tp_rank=get_tp_group().rank_in_group,
            tensors=tuple(
                Tensor(layer=name, bytes=size, shape=str(list(kv_caches[name].shape[1:])))
                for name, size in zip(
                    [name for name in kv_caches for _ in range(per_layer)], rows.row_bytes, strict=True
                )
            ),
            packing=packing_of(layers, kv_caches, layout=getattr(memory, "kv_cache_layout", None)),
            weights=weights_of(config, self._options),
            replicas=getattr(memory, "kv_tp_replicas", 1),
        )
        self._facts = facts
        self._worker = WorkerSide(
            Client(self._options.address or None, limits=self._options.limits),
            self._options,
            rows,
            rank=facts.rank,
            shard=facts.shard,
            writes=facts.writes,
            num_blocks=memory.num_blocks,
        )

    def get_handshake_metadata(self) -> Facts | None:
        """Tell the scheduler this rank's facts."""
        return Facts(self._facts) if self._facts is not None else None

    def handle_preemptions(self, kv_connector_metadata: Orders) -> None:
        """A step begins: nothing of it is computed or overwritten yet."""
        if self._worker is not None:
            self._worker.begin(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads that a step computes with are over before it computes."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored whole, behind the step."""

    def wait_for_save(self) -> None:
        """The step is computed; its blocks go to the saving thread, which nobody waits for."""
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return whose blocks are read, and whose are loaded."""
        if self._worker is None:
            return None, None
        read, loaded = self._worker.finished()
        return read or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that must be computed after all."""
        return self._worker.errors() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Report | None:
        """Tell the scheduler what became of loads."""
        answers = self._worker.answers() if self._worker is not None else None
        return Report(answers) if answers is not None else None

    def flush(self, seconds: float) -> bool:
        """Wait until everything is put, at most `seconds`; say whether it is. For tests and orderly ends."""
        return self._worker is None or self._worker.flush(seconds)

    # Scheduler side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Open the engine's namespace, now that all ranks have told their facts."""
        if self._reason:
            return
        config = self._vllm_config
        workers = [facts.worker for facts in metadata.values()]
        build = functools.partial(_namespace, engine_facts(config, self._options, version=vllm.__version__))
        self._names = NameBook(
            Client(self._options.address or None, limits=self._options.limits),
            functools.partial(build, workers),
            retention_class=self._options.retention_class,
        )
        part_bytes = max(part.bytes_max for part in self._names.namespace.layout.parts)
        self._scheduler = SchedulerSide(
            self._names,
            self._options,
            ranks=len(workers),
            save_blocks=self._options.staging_bytes // part_bytes,
            batches=config.max_concurrent_batches,
        )
        _log.info(
            "kvstore: namespace %s, %s", self._names.namespace.fingerprint.hex()[:16], self._names.where
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens the store has."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.probe(request, num_computed_tokens)
        return tokens, self._options.load_async and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Lease what is to be loaded."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Return where a planned load comes from."""
        planned: dict[CacheHitSource, int] = {}
        for tier, tokens in (self._scheduler.sources(request) if self._scheduler else {}).items():
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            planned[source] = planned.get(source, 0) + tokens
        return planned or {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """Return a step's orders."""
        if self._scheduler is None:
            return Orders(Step())
        waits = getattr(scheduler_output, "has_sync_kv_loads", not self._options.load_async)
        return Orders(self._scheduler.plan(scheduler_output, waits=waits))

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear what the workers did."""
        if self._scheduler is not None:
            report = connector_output.kv_connector_worker_meta
            self._scheduler.heard(
                report.answers if report is not None else None,
                failed_blocks=bool(connector_output.invalid_block_ids),
            )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Say whether a request's blocks must stay for a while."""
        if self._scheduler is None:
            return False, None
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        return self._scheduler.finished(request, computed), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished; more than one group is never stored."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool | None:
        """The weights may have changed in place: from now on this engine shares with itself alone."""
        if self._names is not None:
            self._names.rename(f"reset-{uuid.uuid4()}")
        return True

    # Both sides.

    def get_kv_connector_stats(self) -> Stats | None:
        """Return the counts since the last time."""
        side = self._worker or self._scheduler
        counts = side.tally.take() if side is not None else {}
        return Stats(counts) if counts else None

    def shutdown(self) -> None:
        """Put what is queued, and disconnect."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._worker = self._scheduler = None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Rebuild counts that came from another process."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Metrics:
        """Return the metrics of this connector."""
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _namespace(facts: Any, workers: list[WorkerFacts], adapter: str, generation: str) -> Namespace:
    namespace = engine_namespace(facts, workers, adapter=adapter)
    return replace(namespace, weights=f"{namespace.weights}+{generation}") if generation else namespace
