"""From a request to a sequence that can run: what is found where, and pages for what has to be loaded."""

from __future__ import annotations

from kvstore.api import TierRun
from kvstore.client import Match
from kvstore.client.namespace import OpenNamespace
from kvstore.clock import Clock
from kvstore.engine.costs import StepCosts
from kvstore.engine.hbm import Claimed, Hbm, Held
from kvstore.engine.loading import Loader
from kvstore.engine.running import NOTHING, Running
from kvstore.engine.windows import Checkpoints, WindowRows
from kvstore.types import HASH_BYTES, BlockHash, MissReason, PutOutcome, ReleaseOutcome, Tier, key_at

SUFFIX_TOKENS_MIN = 16
"""Rows that a hit leaves to compute. Fewer run other kernels than a whole prompt and round differently; from
16 on they are equal bit for bit (float32, torch 2.13, AVX-512, the shapes of SmolLM2)."""
MATCH_SECONDS = 0.020
FETCH_SECONDS_MAX = 2.0
FETCH_SECONDS_MIN = 0.05


class Admission:
    """Looks prefixes up and starts loads. Without a daemon (`store` None) only the pool is asked.

    With window layers a prefix goes on from one of the `checkpoints`, or from one that the daemon has.
    """

    def __init__(
        self,
        hbm: Hbm,
        store: OpenNamespace | None,
        loader: Loader | None,
        costs: StepCosts,
        clock: Clock,
        *,
        root: BlockHash,
        block_tokens: int,
        checkpoints: Checkpoints | None = None,
        match_seconds: float = MATCH_SECONDS,
    ) -> None:
        self._hbm = hbm
        self._store = store
        self._loader = loader
        self._costs = costs
        self._clock = clock
        self._root = root
        self._block_tokens = block_tokens
        self._checkpoints = checkpoints
        self._match_seconds = match_seconds

    def usable(self, one: Running) -> int:
        """Return how many leading blocks of a sequence may come from somewhere else."""
        return max(0, len(one.ids) - SUFFIX_TOKENS_MIN) // self._block_tokens

    def _resume(self, keys: bytes, blocks: int) -> tuple[int, WindowRows]:
        """Return after how many of the pool's first `blocks` blocks a sequence can go on, and with what."""
        if self._checkpoints is None:
            return blocks, WindowRows()
        return self._checkpoints.latest(keys, blocks)

    def look_up(self, one: Running) -> None:
        """Ask the daemon for what the pool lacks. It leases the prefix and starts to read it from SSD, while
        the request still waits for its turn. Does not wait.
        """
        usable = one.keys_of(0, self.usable(one))
        if self._checkpoints is not None:
            one.resumable = self.usable(one) * self._block_tokens
        if self._store is None or not one.may_load or not usable:
            return
        if self._resume(usable, self._hbm.resident(usable))[0] * HASH_BYTES < len(usable):
            one.lookup = self._store.submit_match(
                usable,
                parts=range(len(self._store.layout.parts)),
                owner=one.request.name,
                retention_class=one.request.retention_class,
                deadline_seconds=self._match_seconds,
            )

    def admit(self, one: Running) -> bool:
        """Hold what the pool has, and start to load what the daemon has beyond it.

        False: it cannot run now, since somebody else fills the same blocks, or there is no room for them.
        """
        keys = one.keys_of(0, self.usable(one))
        held = self._match(one, self.usable(one))
        found = one.lookup.result() if one.lookup is not None else None
        there, window = self._resume(keys, len(held.pages))
        goal = self._goal(one, found, there) if found is not None else 0
        if goal > there:
            recompute = self._recompute_seconds(there, goal)
            there = min(goal, len(held.pages))
            claimed = self.claim(one, there, goal) if goal > there else None
            if isinstance(claimed, PutOutcome):
                self._hbm.release(held, used=0)
                return claimed is PutOutcome.DUPLICATE and self.admit(one)
            assert found is not None
            self._start_load(one, found, there, claimed, recompute_seconds=recompute)
        elif found is not None:
            self._give_back(found)
        one.lookup, one.asked = None, found is not None
        one.held, one.window = held, window
        if len(held.pages) > there:
            self.extend(one, there)
        one.computed = max(there, goal) * self._block_tokens
        one.saved = found.blocks if found is not None else there
        one.usage.add_hits([TierRun(Tier.HBM, there)] if there else [], block_tokens=self._block_tokens)
        one.usage.reason = (found.reason if found is not None else held.reason) or one.usage.reason
        if one.worth is not None and found is not None and one.worth < found.boundaries[0]:
            one.usage.reason = MissReason.SLOWER_THAN_RECOMPUTE
        one.worth = None
        return True

    def _recompute_seconds(self, first: int, stop: int) -> float:
        return self._costs.span(first * self._block_tokens, (stop - first) * self._block_tokens)

    def _goal(self, one: Running, found: Match, there: int) -> int:
        """Return how many blocks a sequence that has the first `there` will begin with: those that come
        sooner than they would be computed. Decided once, however long there is no room. Window rows are there
        for one boundary alone: it is reached, or nothing is loaded.
        """
        goal = found.boundaries[0] if found.boundaries else 0
        if goal <= there:
            return goal
        if one.worth is None:
            assert self._store is not None
            # What takes no longer than this nobody would notice.
            seconds = max(FETCH_SECONDS_MIN, self._recompute_seconds(there, goal))
            pace = seconds / (goal - there)
            one.worth = min(goal, self._store.worth(found, first=there, block_recompute_seconds=pace).blocks)
        return one.worth if one.worth == goal or self._checkpoints is None else 0

    def claim(self, one: Running, first: int, stop: int) -> Claimed | PutOutcome:
        """Take pages for blocks [first, stop) of a sequence, all of them or none; else say why not."""
        return self._hbm.claim(
            one.parent(first, self._root),
            one.keys_of(first, stop),
            retention_class=one.request.retention_class,
        )

    def _match(self, one: Running, blocks: int) -> Held:
        return self._hbm.match(one.keys_of(0, blocks), retention_class=one.request.retention_class)

    def _start_load(
        self, one: Running, found: Match, first: int, claimed: Claimed | None, *, recompute_seconds: float
    ) -> None:
        assert self._loader is not None
        one.loading_pages = claimed
        one.load = self._loader.start(
            found,
            first=first,
            pages=claimed.pages if claimed is not None else (),
            seconds=min(FETCH_SECONDS_MAX, max(FETCH_SECONDS_MIN, recompute_seconds)),
        )

    def settle(self, one: Running, *, ran_along: bool = False) -> bool:
        """Take in a load that is over; say whether all of it came. What came of it is a prefix all the same,
        and a sequence loads only once: what is missing is computed. A step that `ran_along` has taken the
        window rows already.
        """
        load, claimed = one.load, one.loading_pages
        assert load is not None and load.result is not None
        result = load.result
        if claimed is not None and result.blocks:
            self._hbm.publish(claimed, result.blocks)
        elif claimed is not None:
            self._hbm.abandon(claimed)
        one.load, one.loading_pages = None, None
        there = load.first + result.blocks
        if not result.whole:
            there, one.window = self._resume(one.keys, there)
            one.computed = there * self._block_tokens
            one.usage.fallbacks += 1
            one.usage.reason = result.reason
            one.may_load = False
            one.saved = min(one.saved, there)
        elif load.window is not None and not ran_along:
            one.window = load.window
        self.extend(one, there)
        one.usage.add_hits(result.tiers, block_tokens=self._block_tokens)
        one.usage.load_seconds += result.seconds
        return result.whole

    def extend(self, one: Running, blocks: int) -> None:
        """Hold the first `blocks` blocks of a sequence, now that they are published."""
        before, one.held = one.held, NOTHING
        if blocks:
            one.held = self._match(one, blocks)
        self._hbm.release(before)

    def catch_up(self, one: Running) -> bool:
        """Hold what others have published of a sequence's blocks since it was admitted; False: nothing that
        it may use.
        """
        if self._checkpoints is not None:
            return False
        now = self._match(one, self.usable(one))
        gained = len(now.pages) - len(one.held.pages)
        if gained <= 0:
            self._hbm.release(now, used=0)
            return False
        self._hbm.release(one.held)
        one.held, one.computed = now, len(now.pages) * self._block_tokens
        one.usage.add_hits([TierRun(Tier.HBM, gained)], block_tokens=self._block_tokens)
        return True

    def remember(self, one: Running) -> None:
        """Keep the window rows of a sequence's last boundary, so that others may go on from there."""
        if self._checkpoints is None or one.checkpoint is None:
            return
        boundary, window = one.checkpoint
        if len(one.keys) >= boundary * HASH_BYTES:  # a block that found no page has no name yet
            self._checkpoints.keep(key_at(one.keys, boundary - 1), window)

    def hold(self, one: Running) -> Held:
        """Hold a sequence's published blocks once more, for somebody who outlives it."""
        return self._match(one, len(one.held.pages))

    def let_go(self, one: Running) -> None:
        """Give back what a sequence holds; a load under way is waited for, since it writes into its pages."""
        if one.load is not None:
            one.load.wait_end(seconds=FETCH_SECONDS_MAX + MATCH_SECONDS)
            self.settle(one)
        if one.claimed is not None:
            self._hbm.abandon(one.claimed)
            one.claimed = None
        if one.lookup is not None and one.lookup.poll():
            self._give_back(one.lookup.result())
        one.lookup = None
        self._hbm.release(one.held)
        one.held = NOTHING

    def _give_back(self, found: Match) -> None:
        if self._store is not None and found.lease:
            self._store.release(found, used=0, outcome=ReleaseOutcome.UNUSED)
