"""The scheduler's side of the connector: decides what is loaded and saved; knows no vLLM and no tensor.

A probe has no side effect and may be repeated; the lease is taken when vLLM has really given the request its
blocks, and handed to the workers. One side decides for all ranks, what to load included, so ranks cannot
disagree.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from engine_adapters.vllm.messages import Answers, LoadJob, SaveJob, Step
from engine_adapters.vllm.names import NameBook
from engine_adapters.vllm.options import LOADER_THREADS, Options, Wishes
from engine_adapters.vllm.pace import Pace
from engine_adapters.vllm.speeds import RankSpeeds, wait_seconds
from engine_adapters.vllm.tally import Tally
from engine_adapters.vllm.tracked import Lease, Names, RequestLike, Tracked
from kvstore.client import Match
from kvstore.client.recompute import Choice, choose, tiers_between
from kvstore.clock import Clock, SystemClock
from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.types import MatchMode, MissReason, ReleaseOutcome, Tier

PROBE_SECONDS = 0.25
"""A request that waits for blocks asks in every step; the store is asked again after so long."""
LEASE_MARGIN_SECONDS = 10.0
_log = logging.getLogger(__name__)


class NewRequest(Protocol):
    """vLLM's NewRequestData: a request scheduled for the first time, or anew."""

    req_id: str
    block_ids: Sequence[Sequence[int]]
    num_computed_tokens: int


class CachedRequests(Protocol):
    """vLLM's CachedRequestData: what changed of the requests that workers know. Lists go by `req_ids`."""

    req_ids: Sequence[str]
    resumed_req_ids: set[str]
    new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    num_computed_tokens: Sequence[int]


class Scheduled(Protocol):
    """The part of vLLM's SchedulerOutput that is read here."""

    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str] | None


class SchedulerSide:
    """Plans loads and saves of all requests of one engine.

    `ranks` workers answer each load; `save_blocks` is the most that one put may bring.
    Threads: the scheduler's only.
    """

    def __init__(
        self,
        names: NameBook,
        options: Options,
        *,
        ranks: int,
        save_blocks: int,
        batches: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self._names = names
        self._options = options
        self._block_tokens = names.block_tokens
        self._ranks = ranks
        self._save_blocks = max(1, save_blocks)
        self._clock = clock or SystemClock()
        self._pace = Pace(self._clock, batches=batches, tokens_per_second=options.prefill_tokens_per_second)
        self._speeds = RankSpeeds(self._clock)
        self.tally = Tally()
        self._owner = os.urandom(8).hex()
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadJob] = []
        self._saves: list[SaveJob] = []
        self._draining: set[str] = set()
        self._epoch = 0

    def probe(self, request: RequestLike, computed_tokens: int) -> int:
        """Return how many tokens behind `computed_tokens` the store has that come sooner than they would be
        computed; at least one is left to compute.
        """
        tracked = self._track(request)
        tracked.local = computed_tokens // self._block_tokens
        names = tracked.names
        if names is None or not (self._options.load and tracked.wishes.load and tracked.may_load):
            return 0
        usable = min((request.num_tokens - 1) // self._block_tokens, tracked.know_keys())
        if usable <= 0:
            return 0
        now = self._clock.monotonic()
        if tracked.found is None or tracked.asked != usable or now - tracked.probed_at > PROBE_SECONDS:
            with self._timed():
                tracked.found = self._ask(names, tracked.keys_of(0, usable), mode=MatchMode.PROBE)
            tracked.asked, tracked.probed_at = usable, now
        tracked.choice = self._worth(tracked, tracked.found)
        return max(0, min(tracked.choice.blocks, usable) - tracked.local) * self._block_tokens

    def allocated(self, request: RequestLike, block_ids: Sequence[int], external_tokens: int) -> None:
        """The request has its blocks: lease what is to be loaded into them."""
        tracked = self._track(request)
        found = tracked.found
        if tracked.lease is not None or found is None:
            return  # the second call, behind an asynchronous load; or a request that asks for nothing
        first, end = tracked.local, tracked.local + external_tokens // self._block_tokens
        tracked.settled = tracked.stored = max(
            end if external_tokens else 0, min(found.blocks, tracked.asked)
        )
        self._count_lookup(tracked, found)
        if external_tokens:
            self._lease(tracked, tuple(block_ids[first:end]), first=first, end=end)
        if tracked.names is not None and (found.blocks > end or (found.blocks and not external_tokens)):
            # vLLM has it itself, or computes it sooner: the store's copy is kept alive for the others.
            self._names.touch(tracked.names, tracked.keys_of(0, found.blocks), tracked.wishes.retention_class)
        tracked.found, tracked.asked = None, -1

    def sources(self, request: RequestLike) -> dict[Tier, int]:
        """Return from which tiers the load that was just planned comes, in tokens."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.lease is None:
            return {}
        job, match = tracked.lease.job, tracked.lease.match
        return self._tokens_by_tier(match, job.first, job.first + len(job.block_ids))

    def _worth(self, tracked: Tracked, found: Match) -> Choice:
        """Decide how far a match is worth loading. Changes nothing, so that it may be asked again."""
        first = tracked.local
        if found.blocks <= first:
            return Choice(first)
        wait = self._wait_seconds()
        if wait >= self._options.fetch_seconds > 0.0:
            return Choice(first)  # it would be given up before it began
        # What takes no longer than a load has in any case is always worth it: nobody would notice.
        tokens = (found.blocks - first) * self._block_tokens
        seconds = max(self._options.fetch_seconds_min, self._pace.seconds(tokens))
        return choose(
            found.tiers,
            first=first,
            block_load_seconds=self._speeds.block_seconds,
            block_recompute_seconds=seconds / (found.blocks - first),
            may_try=self._speeds.may_try,
            wait_seconds=wait,
        )

    def _wait_seconds(self) -> float:
        """Return how long a load would wait for those ordered before it."""
        leases = (tracked.lease for tracked in self._requests.values())
        return wait_seconds((lease.seconds for lease in leases if lease), threads=LOADER_THREADS)

    def _load_seconds(self, match: Match, first: int, end: int) -> float:
        runs = tiers_between(match.tiers, first, end)
        return sum(run.count * self._speeds.block_seconds(run.tier) for run in runs)

    def plan(self, scheduled: Scheduled, *, waits: bool) -> Step:
        """Return the orders of a step: the loads leased since the last one, and what it completes to save."""
        self._pace.step(scheduled.total_num_scheduled_tokens)
        preempted = frozenset(scheduled.preempted_req_ids or ())
        for request_id in preempted:
            if tracked := self._requests.get(request_id):
                tracked.restart()
        for request_id, computed in self._advance(scheduled):
            self._order_saves(request_id, computed)
        loads, self._loads = tuple(self._loads), []
        saves, self._saves = tuple(self._saves), []
        draining, self._draining = frozenset(self._draining), set()
        return Step(
            epoch=self._epoch,
            loads=loads,
            waits=waits,
            saves=saves,
            preempted=preempted,
            draining=draining,
            idle=not scheduled.total_num_scheduled_tokens,
        )

    def heard(self, answers: Answers | None, *, failed_blocks: bool) -> None:
        """Take note of the loads that ended, and whether the engine was told of failed blocks."""
        self._speeds.note(answers.speeds if answers else ())
        for loaded in answers.loaded if answers else ():
            tracked = self._requests.get(loaded.request_id)
            if tracked is None or tracked.lease is None:
                continue
            tracked.lease.answers.append(loaded)
            if len(tracked.lease.answers) == self._ranks:
                self._end_load(tracked, tracked.lease)
        if failed_blocks and not self._options.load_async:
            # What was computed with them may be garbage, and was not stored: it is ordered once more.
            self._epoch += 1
            for tracked in self._requests.values():
                tracked.settled = min(tracked.settled, tracked.stored)

    def finished(self, request: RequestLike, computed_tokens: int) -> bool:
        """The request is over; return whether its blocks must stay until its saves have been read."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.lease is not None:
            # It was cancelled with a load under way: vLLM waits for that, and for nothing else.
            self._release(tracked.lease.match, used=0)
            return False
        self._order_saves_of(tracked, computed_tokens)
        if tracked.has_saves:
            self._draining.add(request.request_id)
        return tracked.has_saves

    def close(self) -> None:
        """Give the leases back and let go of the store."""
        for tracked in self._requests.values():
            if tracked.lease is not None:
                self._release(tracked.lease.match, used=0)
        self._requests.clear()
        self._names.close()

    def _track(self, request: RequestLike) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            try:
                wishes = Wishes.parse(request.kv_transfer_params)
            except InvalidArgument as error:
                # Whoever asked for privacy with a misspelt word must not be stored.
                _log.warning("event=vllm_request_ignored cause=%s", error)
                wishes = Wishes(load=False, save=False)
            tracked = Tracked(request=request, wishes=wishes, names=self._names.of(request.lora_request))
            self._requests[request.request_id] = tracked
        return tracked

    def _ask(self, names: Names, keys: bytes, **how: Any) -> Match:
        try:
            return names.opened.match(keys, deadline_seconds=self._options.match_seconds, **how)
        except KVStoreError as error:  # such as a retention class that the daemon does not know
            _log.warning("event=vllm_match_refused cause=%s", error)
            return Match(blocks=0, reason=MissReason.TIER_DOWN)

    def _lease(self, tracked: Tracked, block_ids: tuple[int, ...], *, first: int, end: int) -> None:
        assert tracked.names is not None
        seconds = self._pace.deadline(
            (end - first) * self._block_tokens,
            least=self._options.fetch_seconds_min,
            most=self._options.fetch_seconds,
        )
        with self._timed():
            match = self._ask(
                tracked.names,
                tracked.keys_of(0, end),
                owner=f"{self._owner}/{tracked.request.request_id}",
                retention_class=tracked.wishes.retention_class,
                lease_seconds=seconds + LEASE_MARGIN_SECONDS,
            )
        job = LoadJob(
            request_id=tracked.request.request_id,
            namespace=tracked.names.canonical,
            lease=match.lease,
            blocks=min(match.blocks, end),
            first=first,
            block_ids=block_ids,
            seconds=seconds,
            tiers=match.tiers,
        )
        tracked.lease = Lease(match, job, self._load_seconds(match, first, job.blocks))
        self._loads.append(job)

    def _end_load(self, tracked: Tracked, lease: Lease) -> None:
        """All ranks have answered: what every one of them has counts as delivered."""
        tracked.lease = None
        job = lease.job
        worst = min(lease.answers, key=lambda loaded: loaded.blocks)
        end = job.first + worst.blocks
        self._release(lease.match, used=end if worst.blocks else 0)
        for tier, tokens in self._tokens_by_tier(lease.match, job.first, end).items():
            self.tally.add("hit_tokens", tokens, str(tier))
        if worst.blocks < len(job.block_ids):
            tracked.may_load = False
            tracked.settled = tracked.stored = min(tracked.stored, end)
            self.tally.add("failed_loads", 1, str(worst.reason or lease.match.reason or MissReason.TIER_DOWN))

    def _release(self, match: Match, *, used: int) -> None:
        outcome = ReleaseOutcome.USED if used else ReleaseOutcome.UNUSED
        self._names.release(match, used=used, outcome=outcome)

    def _tokens_by_tier(self, match: Match, first: int, end: int) -> dict[Tier, int]:
        tokens: dict[Tier, int] = {}
        for run in tiers_between(match.tiers, first, end):
            tokens[run.tier] = tokens.get(run.tier, 0) + run.count * self._block_tokens
        return tokens

    def _advance(self, scheduled: Scheduled) -> Iterator[tuple[str, int]]:
        """Bring the block tables up to date; yield (request, tokens computed after this step)."""
        for new in scheduled.scheduled_new_reqs:
            if tracked := self._requests.get(new.req_id):
                tracked.block_ids = list(new.block_ids[0])
            yield new.req_id, new.num_computed_tokens + scheduled.num_scheduled_tokens[new.req_id]
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if tracked := self._requests.get(request_id):
                if request_id in cached.resumed_req_ids:
                    tracked.block_ids.clear()
                tracked.block_ids += blocks[0] if blocks else ()
            yield request_id, computed + scheduled.num_scheduled_tokens[request_id]

    def _order_saves(self, request_id: str, computed_tokens: int) -> None:
        if tracked := self._requests.get(request_id):
            self._order_saves_of(tracked, computed_tokens)

    def _order_saves_of(self, tracked: Tracked, computed_tokens: int) -> None:
        """Order the full blocks behind `settled` that `computed_tokens` complete."""
        names = tracked.names
        if names is None or not (self._options.save and tracked.wishes.save):
            return
        decodes = self._options.save_decode and tracked.wishes.save_decode
        tokens = computed_tokens if decodes else min(computed_tokens, tracked.request.num_prompt_tokens)
        end = min(tokens // self._block_tokens, tracked.know_keys(), len(tracked.block_ids))
        for start in range(tracked.settled, end, self._save_blocks):
            stop = min(start + self._save_blocks, end)
            self._saves.append(
                SaveJob(
                    request_id=tracked.request.request_id,
                    namespace=names.canonical,
                    parent=tracked.parent_of(start),
                    keys=tracked.keys_of(start, stop),
                    block_ids=tuple(tracked.block_ids[start:stop]),
                    put_id=os.urandom(16),
                    retention_class=tracked.wishes.retention_class,
                )
            )
            tracked.has_saves = True
        tracked.settled = max(tracked.settled, end)

    def _count_lookup(self, tracked: Tracked, found: Match) -> None:
        self.tally.add("lookups")
        self.tally.add("lookup_tokens", tracked.asked * self._block_tokens)
        choice = tracked.choice
        if found.blocks > tracked.local:
            self.tally.add("load_decisions", 1, choice.decision(first=tracked.local, found=found.blocks))
        if tracked.local < found.blocks > choice.blocks:
            self.tally.add("misses", 1, str(MissReason.SLOWER_THAN_RECOMPUTE))
        elif found.blocks < tracked.asked:
            self.tally.add("misses", 1, str(found.reason or MissReason.NEVER_STORED))
        if choice.trial is not None:
            self._speeds.tried(choice.trial)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = self._clock.monotonic()
        try:
            yield
        finally:
            self.tally.add("lookup_seconds", self._clock.monotonic() - started)
