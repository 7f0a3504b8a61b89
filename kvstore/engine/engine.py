"""The engine: takes requests in, runs steps over all that are under way, hands tokens out.

submit -> lookup (hbm, daemon) -> admit (pages, load) -> steps -> answer, blocks saved behind it

While a step is computed, the next one is planned: requests are taken in and admitted, and it is decided who
computes how much, on the expectation that all goes well. What turns out otherwise is left out of that step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace

import torch

from kvstore.client.namespace import OpenNamespace
from kvstore.clock import Clock, SystemClock
from kvstore.engine.accounts import Accounts
from kvstore.engine.admission import MATCH_SECONDS, Admission
from kvstore.engine.costs import StepCosts
from kvstore.engine.hbm import Hbm
from kvstore.engine.loading import Loader
from kvstore.engine.model import Model
from kvstore.engine.pool import KvPool
from kvstore.engine.request import Answer, Request
from kvstore.engine.running import Running
from kvstore.engine.saving import Save, Saver
from kvstore.engine.scheduler import Budget, Planned, plan
from kvstore.engine.step import Step
from kvstore.engine.windows import Checkpoints, WindowRows
from kvstore.errors import InvalidArgument, ShuttingDown
from kvstore.hashing import block_hashes
from kvstore.types import BlockHash, PutOutcome

RENEW_SECONDS = 10.0
IDLE_SECONDS = 0.002
_log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one model and one pool.

    Threads: `submit` from any; everything else happens on the engine's own thread, `engine`.
    """

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        hbm: Hbm,
        store: OpenNamespace | None,
        costs: StepCosts,
        *,
        root: BlockHash,
        checkpoints: Checkpoints | None = None,
        budget: Budget | None = None,
        match_seconds: float = MATCH_SECONDS,
        threads: int = 0,
        rows_min: int = 1,
        unsaved_answers: Collection[str] = (),
        clock: Clock | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.costs = costs
        self.accounts = Accounts(costs)
        self._hbm = hbm
        self._store = store
        self._root = root
        self._clock = clock or SystemClock()
        self._budget = budget or Budget()
        self._loader = Loader(store, pool, self._clock) if store is not None else None
        self._saver = Saver(store, pool, hbm) if store is not None else None
        self._admission = Admission(
            hbm,
            store,
            self._loader,
            costs,
            self._clock,
            root=root,
            block_tokens=pool.block_tokens,
            checkpoints=checkpoints,
            match_seconds=match_seconds,
        )
        self._step = Step(
            model,
            pool,
            hbm,
            self._admission,
            self._clock,
            root=root,
            threads=threads,
            rows_min=rows_min,
        )
        self._unsaved_answers = unsaved_answers
        self._next: list[Planned] = []
        self._inbox: queue.SimpleQueue[Running] = queue.SimpleQueue()
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._scratch = list(pool.scratch)
        self._renewed_at = self._clock.monotonic()
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, *, on_token: Callable[[int], None] = lambda _: None) -> Future[Answer]:
        """Queue a request. `on_token` is called with each token on the engine's thread.

        Errors: InvalidArgument when it can never fit; ShuttingDown.
        """
        room = min(self._hbm.page_count * self.pool.block_tokens, self.model.config.context_tokens)
        if not request.prompt or len(request.prompt) + request.max_new_tokens > room:
            raise InvalidArgument(
                f"{request.name}: {len(request.prompt)} prompt and {request.max_new_tokens} new tokens, "
                f"the pool and the model have room for 1..{room}"
            )
        if self._closing.is_set():
            raise ShuttingDown("the engine is closing: nothing new is admitted")
        one = Running(request, list(request.prompt), self._clock.monotonic(), on_token)
        one.usage.input = len(request.prompt)
        self._inbox.put(one)
        self._wake.set()
        return one.answer

    def flush(self) -> None:
        """Wait until the daemon has what was submitted for saving."""
        if self._saver is not None:
            self._saver.flush()

    def close(self) -> None:
        """End what runs, save what is queued, and let go."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        self._step.close()
        if self._loader is not None:
            self._loader.close()
        if self._saver is not None:
            self._saver.close()

    # The engine's thread

    def _loop(self) -> None:
        try:
            while not self._closing.is_set():
                if not self.step():
                    self._idle()
            cause: Exception = ShuttingDown("the engine was closed")
        except Exception as error:
            _log.exception("event=engine_failed")
            self._closing.set()
            cause = error
        self._take_in()
        for one in [*self._waiting, *self._running]:
            with suppress(InvalidStateError):  # cancelled
                one.answer.set_exception(cause)

    def _idle(self) -> None:
        begun = self._clock.monotonic()
        loading = [one for one in self._running if one.load is not None]
        self._wake.wait(IDLE_SECONDS if self._waiting or self._running else None)
        self._wake.clear()
        for one in loading:
            one.usage.load_wait_seconds += self._clock.monotonic() - begun

    def step(self) -> bool:
        """Compute the step that is planned, plan the next one meanwhile, hand out tokens; say whether it is
        worth while to go on at once.
        """
        was_ahead, planned = bool(self._next), self._next or self._plan(())
        self._next = []
        spans = [ready for one in planned if (ready := self._claim(one)) is not None]
        spans = [span for span in spans if span.sequence in self._running]  # others were preempted since
        if not spans:
            return was_ahead
        logits = self._step.start(spans)
        try:
            self._next = self._plan(spans)
        finally:
            computed = logits.result()
        with torch.inference_mode():
            for one in self._step.finish(spans, computed):
                self._continue(one)
        return True

    def _plan(self, flying: Sequence[Planned]) -> list[Planned]:
        """Take in what has come, admit who can be, and return the spans of the next step."""
        under_way = [span.sequence for span in flying]
        self._take_in()
        self._admit(under_way)
        self._renew()
        return plan(
            self._ready(under_way),
            self.costs,
            self._budget,
            block_tokens=self.pool.block_tokens,
            flying=flying,
        )

    def _take_in(self) -> None:
        while not self._inbox.empty():
            one = self._inbox.get()
            one.keys = block_hashes(self._root, one.ids, block_tokens=self.pool.block_tokens)
            self._admission.look_up(one)
            self._waiting.append(one)

    def _admit(self, under_way: Sequence[Running]) -> None:
        """Admit in order of arrival; whose lookup has not come back lets the next one pass."""
        for one in [*self._waiting, *self._running]:
            if one.answer.cancelled() and one not in under_way:
                self._let_go(one)
        for one in list(self._waiting):
            if not self._scratch:
                return
            if (one.lookup is None or one.lookup.poll()) and self._admission.admit(one):
                one.scratch = self._scratch.pop()
                self._waiting.remove(one)
                self._running.append(one)

    def _ready(self, under_way: Sequence[Running]) -> list[Running]:
        """Return who may compute. A load that is over is taken in; one that is not holds nobody else up: its
        sequence starts before the last layer has arrived only where nobody else could use the time.
        """
        for one in self._running:
            if one.load is not None and one.load.result is not None and one not in under_way:
                self._admission.settle(one)
        ready = [one for one in self._running if one.load is None or one in under_way]
        return ready or [one for one in self._running if one.load is not None and one.load.has(0)][:1]

    def _claim(self, planned: Planned) -> Planned | None:
        """Return what of a span can be computed now."""
        one, size = planned.sequence, self.pool.block_tokens
        if one not in self._running or not planned.holds:
            return None
        refused = self._step.claim(planned)
        if refused is PutOutcome.THROTTLED:
            self._preempt(self._running[-1])
        elif refused is PutOutcome.DUPLICATE and not self._admission.catch_up(one):
            # It is the last block, whose rows give the next token: compute it aside, in scratch.
            return replace(planned, count=min(planned.count, size - planned.first % size))
        return planned if refused is None else None

    def _preempt(self, one: Running) -> None:
        """Take a sequence's pages away; it goes on from what is left of them when there is room again."""
        self._admission.remember(one)
        self._let_go(one)
        one.computed, one.window, one.checkpoint = 0, WindowRows(), None
        one.keys = block_hashes(self._root, one.ids, block_tokens=self.pool.block_tokens)
        one.usage.preemptions += 1
        self._waiting.appendleft(one)

    def _continue(self, one: Running) -> None:
        """After a step: name what is full, hand out the token, end what is over."""
        size = self.pool.block_tokens
        if one.computed // size > len(one.held.pages) and not self._step.seal(one):
            self._preempt(one)
            return
        if one.computed < len(one.ids):
            return
        assert one.logits is not None
        if not one.generated:
            one.usage.first_token_seconds = self._clock.monotonic() - one.submitted_at
            self._save(one, one.request.save_prompt)
        token = one.request.sampling.pick(one.ids, one.logits)
        one.ids.append(token)
        one.on_token(token)
        if token in one.request.stop_ids:
            self._end(one, "stop")
        elif one.generated >= one.request.max_new_tokens:
            self._end(one, "length")

    def _save(self, one: Running, is_wanted: bool) -> None:
        """Let the daemon have what is new, or hear that what it has was used."""
        self._admission.remember(one)
        checkpoint, one.checkpoint = one.checkpoint, None
        is_known = one.asked and one.saved == len(one.held.pages) and checkpoint is None
        if self._saver is None or not is_wanted or is_known:
            return
        held, blocks = self._admission.hold(one), len(one.held.pages)
        keys = one.keys_of(0, blocks)
        self._saver.submit(Save(keys, one.saved, held, one.request.retention_class, checkpoint))
        one.saved = blocks

    def _end(self, one: Running, why: str) -> None:
        is_prefix = one.request.save_answer and one.request.retention_class not in self._unsaved_answers
        self._save(one, is_prefix and len(one.held.pages) > one.saved)
        self._let_go(one)
        one.usage.generated = one.generated
        one.usage.seconds = self._clock.monotonic() - one.submitted_at
        self.accounts.add(one.request.retention_class, one.usage)
        with suppress(InvalidStateError):  # cancelled
            one.answer.set_result(Answer(tuple(one.ids[len(one.request.prompt) :]), one.usage, why))

    def _let_go(self, one: Running) -> None:
        """Give back everything that a sequence holds."""
        self._admission.let_go(one)
        if one in self._waiting:
            self._waiting.remove(one)
        if one in self._running:
            self._running.remove(one)
            self._scratch.append(one.scratch)

    def _renew(self) -> None:
        now = self._clock.monotonic()
        if now - self._renewed_at > RENEW_SECONDS:
            self._renewed_at = now
            self._hbm.renew([one.held for one in self._running])
            self._hbm.tick()
