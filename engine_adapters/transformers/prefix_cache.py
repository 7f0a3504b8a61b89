"""A model that remembers: requests resume from the longest stored prefix and leave their blocks behind."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from engine_adapters.transformers.engine import VERSION, EngineModel
from engine_adapters.transformers.identity import model_namespace, weights_fingerprint
from kvstore.api import TierRun
from kvstore.clock import Clock, SystemClock
from kvstore.errors import InvalidArgument
from kvstore.namespace import Namespace
from kvstore.types import HASH_BYTES, MissReason, PutOutcome, ReleaseOutcome, key_at

if TYPE_CHECKING:
    from kvstore.client import Client, Put

SUFFIX_TOKENS_MIN = 16
"""Rows that a hit leaves to compute. One to three rows run other kernels than a whole prompt: logits differ
in the last bits. From four rows on they are equal bit for bit (float32, SmolLM2, torch 2.13, AVX-512)."""
SAVE_BYTES_MAX = 64 << 20
"""Blocks are packed and put in portions of about this size: a long prompt needs no second copy of itself."""
TokenIds = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor
"""One request: [n] or [1, n]."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Prefill:
    """A prompt and how it was computed: `past` is the engine's cache object, `logits` the last token's.

    `reason` says why the hit ended before the last block that could have been used. Units: seconds per step.
    """

    prompt_tokens: int
    hit_tokens: int = 0
    tiers: tuple[TierRun, ...] = ()
    reason: MissReason | None = None
    past: Any = None
    logits: Any = None
    match_seconds: float = 0.0
    fetch_seconds: float = 0.0
    inject_seconds: float = 0.0
    compute_seconds: float = 0.0

    @property
    def computed_tokens(self) -> int:
        """Tokens that the model had to compute."""
        return self.prompt_tokens - self.hit_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What became of the blocks of a put: `present` are in the store now, `stored` of them by this put."""

    blocks: int = 0
    stored: int = 0
    present: int = 0
    reason: MissReason | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A greedy answer and where its prompt came from.

    Units: seconds from the call; saving starts behind the first token.
    """

    ids: tuple[int, ...]
    prefill: Prefill
    prompt_saved: Saved
    answer_saved: Saved
    first_token_seconds: float
    seconds: float
    keys: bytes = field(repr=False)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.prefill.prompt_tokens

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens whose keys and values came from the store."""
        return self.prefill.hit_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the model had to compute."""
        return self.prefill.computed_tokens

    @property
    def tiers(self) -> tuple[TierRun, ...]:
        """Where the blocks of the hit were found."""
        return self.prefill.tiers


class PrefixCache:
    """One model and one store.

    Token ids of a greedy answer are those of a run without the store as long as the model computes in float32
    and no two logits lie closer than rounding (about 3e-5); bfloat16 rounds differently for other row counts.
    Keys and values of an answer were computed one row at a time: they equal those of a prefill within the
    same rounding.
    A fetch has as long as computing would take, within `fetch_seconds_min` and `fetch_seconds_max`.
    `staging_bytes` of memory are touched at the start and kept for fetches that fit, as engines do with their
    pools: a first touch costs more than the copy itself.
    Errors: InvalidArgument when the model cannot be stored; LayoutMismatch when the store has it with other
    bytes. Whatever else fails in the store is a miss, and the model computes.
    Threads: one request at a time, as the model itself.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        *,
        block_tokens: int = 64,
        retention_class: str = "agent",
        tenant: str = "",
        tenant_secret: bytes = b"",
        model_name: str = "",
        weights: str | None = None,
        suffix_tokens_min: int = SUFFIX_TOKENS_MIN,
        match_seconds_max: float = 0.020,
        fetch_seconds_min: float = 0.05,
        fetch_seconds_max: float = 2.0,
        save_seconds_max: float = 2.0,
        staging_bytes: int = 0,
        clock: Clock | None = None,
    ) -> None:
        if suffix_tokens_min < 1:
            raise InvalidArgument(
                f"prefix cache: suffix_tokens_min is {suffix_tokens_min}, the model needs 1 row at least"
            )
        self.engine = EngineModel.wrap(model, block_tokens=block_tokens)
        self.namespace: Namespace = model_namespace(
            self.engine.config,
            self.engine.shape,
            model=model_name or self.engine.name,
            weights=weights or weights_fingerprint(self.engine.tensors()),
            engine=VERSION,
            attention=self.engine.attention,
            tenant=tenant,
        )
        self._blocks = client.open(
            self.namespace, tenant_secret=tenant_secret, retention_class=retention_class
        )
        self._suffix_tokens_min = suffix_tokens_min
        self._match_seconds_max = match_seconds_max
        self._fetch_seconds_min = fetch_seconds_min
        self._fetch_seconds_max = fetch_seconds_max
        self._save_seconds_max = save_seconds_max
        self._staging = self.engine.shape.new_blocks(staging_bytes // self.engine.shape.block_bytes)
        self._staging.fill(0)
        self._clock = clock or SystemClock()
        self._row_seconds = math.inf  # the model's best pace so far

    def generate(
        self,
        input_ids: TokenIds,
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int] | None = None,
        save_prompt: bool = True,
        save_answer: bool = True,
        on_token: Callable[[int], None] = lambda _: None,
    ) -> Generation:
        """Answer greedily; save the prompt's full blocks behind the first token, the answer's at the end."""
        started = self._clock.monotonic()
        ids = _one_row(input_ids)
        stop = self.engine.stop_ids if stop_ids is None else stop_ids
        prefill = self.prefill(ids, save=False)
        answer = [int(prefill.logits.argmax())]
        first_token_seconds = self._clock.monotonic() - started
        on_token(answer[0])
        known = prefill.hit_tokens // self.namespace.block_tokens
        prompt_saved = self.save(ids, prefill.past, first_block=known) if save_prompt else Saved()
        while len(answer) < max_new_tokens and answer[-1] not in stop:
            answer.append(int(self.engine.forward(answer[-1:], prefill.past).argmax()))
            on_token(answer[-1])
        everything = ids + answer
        known += prompt_saved.present
        # What was refused or too slow a moment ago is not tried again within the same request.
        save_answer = save_answer and prompt_saved.reason is None
        answer_saved = self.save(everything, prefill.past, first_block=known) if save_answer else Saved()
        return Generation(
            ids=tuple(answer),
            prefill=prefill,
            prompt_saved=prompt_saved,
            answer_saved=answer_saved,
            first_token_seconds=first_token_seconds,
            seconds=self._clock.monotonic() - started,
            keys=self._blocks.hashes(everything[: self.engine.length(prefill.past)]),
        )

    def prefill(self, input_ids: TokenIds, *, save: bool = True) -> Prefill:
        """Compute a prompt behind its longest stored prefix, and save what was missing."""
        ids = _one_row(input_ids)
        result = self.resume(ids)
        started = self._clock.monotonic()
        result.logits = self.engine.forward(ids[result.hit_tokens :], result.past)
        result.compute_seconds = self._clock.monotonic() - started
        self._row_seconds = min(self._row_seconds, result.compute_seconds / result.computed_tokens)
        if save:
            self.save(ids, result.past, first_block=result.hit_tokens // self.namespace.block_tokens)
        return result

    def resume(self, input_ids: TokenIds) -> Prefill:
        """Return a cache object with the longest stored prefix of a prompt in it, and nothing computed.

        For those who generate themselves: `model.generate(ids, past_key_values=resumed.past, ...)`, then
        `save`.
        Errors: InvalidArgument on a prompt without tokens.
        """
        ids = _one_row(input_ids)
        if not ids:
            raise InvalidArgument("prefix cache: the prompt has no tokens")
        result = Prefill(prompt_tokens=len(ids))
        usable = max(0, len(ids) - self._suffix_tokens_min) // self.namespace.block_tokens
        layers = []
        if usable:
            keys = self._blocks.hashes(ids[: usable * self.namespace.block_tokens])
            try:
                layers = self._load(keys, result)
            except Exception:  # the store failing never fails a request; what broke is in the log
                _log.exception("event=prefix_cache_load_failed")
                result.hit_tokens, result.tiers, result.reason = 0, (), MissReason.TIER_DOWN
        result.past = self.engine.resume(layers)
        return result

    def _load(self, keys: bytes, result: Prefill) -> list[Any]:
        """Match, fetch and unpack the longest prefix; fill in what `result` says about it."""
        begun = self._clock.monotonic()
        match = self._blocks.match(keys, deadline_seconds=self._match_seconds_max)
        result.match_seconds = self._clock.monotonic() - begun
        result.reason = match.reason
        if not match.blocks:
            return []
        begun = self._clock.monotonic()
        # A load that takes less than `fetch_seconds_min` is always worth it: nobody would notice.
        pace = max(self.namespace.block_tokens * self._row_seconds, self._fetch_seconds_min / match.blocks)
        count = self._blocks.worth(match, block_recompute_seconds=pace).blocks
        fits = count <= len(self._staging)
        blocks = self._staging[:count] if fits else self.engine.shape.new_blocks(count)
        used, outcome = 0, ReleaseOutcome.UNUSED
        try:
            deadline = self._fetch_deadline(count)
            fetched = self._blocks.fetch(match, blocks, blocks=count, deadline_seconds=deadline)
            used, outcome = fetched.blocks, ReleaseOutcome.USED if fetched.blocks else ReleaseOutcome.UNUSED
        finally:  # also when the request is given up
            self._blocks.release(match, used=used, outcome=outcome)
        result.fetch_seconds = self._clock.monotonic() - begun
        if fetched.blocks < count:
            result.reason = fetched.reason
        elif count < match.blocks:
            result.reason = MissReason.SLOWER_THAN_RECOMPUTE
        if not fetched.blocks:
            return []
        begun = self._clock.monotonic()
        layers = self.engine.shape.unpack(blocks[: fetched.blocks], devices=self.engine.devices)
        result.inject_seconds = self._clock.monotonic() - begun
        result.hit_tokens = fetched.blocks * self.namespace.block_tokens
        result.tiers = fetched.tiers
        return layers

    def _fetch_deadline(self, blocks: int) -> float:
        """A fetch is given up when computing would have been as fast, once the model's pace is known."""
        recompute = blocks * self.namespace.block_tokens * self._row_seconds
        return min(self._fetch_seconds_max, max(self._fetch_seconds_min, recompute))

    def save(self, token_ids: TokenIds, past: Any, *, first_block: int = 0) -> Saved:
        """Put the full blocks from `first_block` on that `past` holds the keys and values of.

        `token_ids` are all tokens from the first one; those that `past` has not seen yet are left out.
        Errors: InvalidArgument when `past` is no cache object of this model.
        """
        started = self._clock.monotonic()
        ids, size = _one_row(token_ids), self.namespace.block_tokens
        end = min(len(ids), self.engine.length(past)) // size
        keys = self._blocks.hashes(ids[: end * size])
        step = max(1, SAVE_BYTES_MAX // self.engine.shape.block_bytes)
        stored = present = 0
        reason = None
        for first in range(first_block, end, step):
            count = min(step, end - first)
            left = self._save_seconds_max - (self._clock.monotonic() - started)
            put = self._put(keys, past, first=first, count=count, deadline_seconds=max(0.0, left))
            if put is None:
                reason = MissReason.TIER_DOWN
                break
            stored, present = stored + put.stored, present + put.present
            if put.present < count:
                reason = put.reason or _why_not(put)
                break
        return Saved(
            blocks=max(0, end - first_block),
            stored=stored,
            present=present,
            reason=reason,
            seconds=self._clock.monotonic() - started,
        )

    def _put(self, keys: bytes, past: Any, *, first: int, count: int, deadline_seconds: float) -> Put | None:
        """Pack and put blocks [first, first + count); None when the store broke its promise not to raise."""
        blocks = self.engine.shape.pack(self.engine.layers(past), first_block=first, count=count)
        parent = key_at(keys, first - 1) if first else self._blocks.root
        try:
            wanted = keys[first * HASH_BYTES : (first + count) * HASH_BYTES]
            return self._blocks.put(parent, wanted, blocks, deadline_seconds=deadline_seconds)
        except Exception:  # as in resume
            _log.exception("event=prefix_cache_save_failed")
            return None


def _one_row(token_ids: TokenIds) -> list[int]:
    """Return the ids of one request from a sequence, an array or a tensor, [n] or [1, n].

    Errors: InvalidArgument on a batch.
    """
    row = np.asarray(token_ids, dtype=np.int64)
    if row.ndim == 2 and len(row) == 1:
        row = row[0]
    if row.ndim != 1:
        raise InvalidArgument(f"prefix cache: one request at a time, got ids of shape {list(row.shape)}")
    ids: list[int] = row.tolist()
    return ids


def _why_not(put: Put) -> MissReason:
    """Return why a put that was answered did not keep everything."""
    outcomes = {run.outcome for run in put.outcomes}
    if PutOutcome.THROTTLED in outcomes:
        return MissReason.THROTTLED
    return MissReason.IN_FLIGHT if PutOutcome.IN_FLIGHT in outcomes else MissReason.TIER_DOWN


def hit_blocks(tiers: Sequence[TierRun]) -> dict[str, int]:
    """Return how many blocks each tier gave."""
    totals: dict[str, int] = {}
    for run in tiers:
        totals[str(run.tier)] = totals.get(str(run.tier), 0) + run.count
    return totals
