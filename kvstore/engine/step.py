"""One step: pages for what is planned, one forward pass, and names for the blocks that it filled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvstore.clock import Clock
from kvstore.engine.admission import Admission
from kvstore.engine.attention import Span, StepAttention, rows_of
from kvstore.engine.hbm import Claimed, Hbm
from kvstore.engine.model import Model
from kvstore.engine.pool import KvPool
from kvstore.engine.running import Running
from kvstore.engine.scheduler import Planned
from kvstore.engine.windows import WindowRows
from kvstore.hashing import block_hashes
from kvstore.types import HASH_BYTES, BlockHash, PutOutcome

LATE_SECONDS = 2.0
"""The forward pass waits at most so long for a stage on its way; the load itself ends sooner."""


class Step:
    """Carries planned spans out. Threads: the engine's, which plans on while `engine-compute` computes."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        hbm: Hbm,
        admission: Admission,
        clock: Clock,
        *,
        root: BlockHash,
        threads: int,
        rows_min: int,
    ) -> None:
        self._model = model
        self._pool = pool
        self._hbm = hbm
        self._admission = admission
        self._clock = clock
        self._root = root
        self._rows_min = rows_min
        self._stage_of = {layer: i for i, stage in enumerate(pool.stages) for layer in stage}
        # How many threads torch takes is a property of the thread that computes.
        initializer = (lambda: torch.set_num_threads(threads)) if threads else (lambda: None)
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="engine-compute", initializer=initializer)

    def claim(self, planned: Planned) -> PutOutcome | None:
        """Take pages for the whole blocks that a chunk fills; None when it may run, else why not.

        DUPLICATE: the first of them is in the pool by now.
        """
        one, size = planned.sequence, self._pool.block_tokens
        first, stop = planned.first // size, (planned.first + planned.count) // size
        if planned.first % size or first == stop:
            return None
        claimed = self._admission.claim(one, first, stop)
        if not isinstance(claimed, Claimed):
            return claimed
        one.claimed = claimed
        return None

    def start(self, planned: Sequence[Planned]) -> Future[torch.Tensor]:
        """Begin to compute spans whose pages are claimed; `finish` wants the result."""
        return self._compute.submit(self._forward, planned)

    def finish(self, planned: Sequence[Planned], logits: torch.Tensor) -> list[Running]:
        """Take in what was computed; return the sequences that came further. One whose load broke off
        meanwhile did not: what it computed is void.
        """
        further = []
        for index, span in enumerate(planned):
            one = span.sequence
            if one.load is not None and not self._take_in(one):
                if one.claimed is not None:
                    self._hbm.abandon(one.claimed)
                    one.claimed = None
                continue
            self._advance(one, span.count)
            one.logits = logits[index]
            further.append(one)
        return further

    def close(self) -> None:
        """Wait for what is being computed."""
        self._compute.shutdown()

    def _forward(self, planned: Sequence[Planned]) -> torch.Tensor:
        spans = [Span(p.first, p.count, p.sequence.pages(), p.sequence.window) for p in planned]
        ids = [p.sequence.ids[p.first : p.first + p.count] for p in planned]
        rows = rows_of(ids, spans, device=self._model.weights.device, rows_min=self._rows_min)
        attention = StepAttention(self._model.config, self._pool, spans, self._model.weights.dtype)
        arriving = [p.sequence for p in planned if p.sequence.load is not None]
        return self._model.forward(
            rows, attention, before_layer=lambda layer: self._await_stage(arriving, layer)
        )

    def _await_stage(self, arriving: Sequence[Running], layer: int) -> None:
        stage = self._stage_of.get(layer, 0)  # a window layer needs rows that come ahead of stage 0
        for one in arriving:
            if one.load is None:
                continue
            begun = self._clock.monotonic()
            one.load.wait(stage, seconds=LATE_SECONDS)
            one.usage.load_wait_seconds += self._clock.monotonic() - begun
            if layer == 0 and self._pool.windows is not None:
                # A load that failed leaves rows of the right shape: what is computed with them is void.
                one.window.rows = (one.load.window or self._blank(one)).copy().rows

    def _blank(self, one: Running) -> WindowRows:
        weights = self._model.weights
        return WindowRows.blank(self._model.config, one.computed, dtype=weights.dtype, device=weights.device)

    def _take_in(self, one: Running) -> bool:
        """Take in a load that the forward pass ran along with; False when it did not come whole."""
        assert one.load is not None
        if not one.load.wait_end(seconds=LATE_SECONDS):
            return False
        return self._admission.settle(one, ran_along=True)

    def _advance(self, one: Running, count: int) -> None:
        one.computed += count
        one.usage.computed += count
        if one.claimed is not None:
            self._hbm.publish(one.claimed, len(one.claimed.pages))
            one.claimed = None
            self._admission.extend(one, one.computed // self._pool.block_tokens)
        if self._pool.windows is not None and one.computed % self._pool.block_tokens == 0:
            is_answer = one.computed > len(one.request.prompt)
            if one.computed <= one.resumable or is_answer:
                one.checkpoint = (one.computed // self._pool.block_tokens, one.window.copy())

    def seal(self, one: Running) -> bool:
        """Name the block that generated tokens filled and move it from scratch to a page of its own; False
        when there is no page for it.
        """
        size = self._pool.block_tokens
        block = one.computed // size - 1
        parent = one.parent(block, self._root)
        key = block_hashes(parent, one.ids[block * size : (block + 1) * size], block_tokens=size)
        claimed = self._hbm.claim(parent, key, retention_class=one.request.retention_class)
        if isinstance(claimed, Claimed):
            self._pool.copy_page(one.scratch, claimed.pages[0])
            self._hbm.publish(claimed, 1)
        elif claimed is not PutOutcome.DUPLICATE:
            return False
        one.keys = one.keys_of(0, block) + key + one.keys[(block + 1) * HASH_BYTES :]
        self._admission.extend(one, block + 1)
        return len(one.held.pages) == block + 1
