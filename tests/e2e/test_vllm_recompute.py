"""Load or recompute in the vLLM connector: ranks measure, the scheduler decides. The daemon is real, and time
passes where a throttled rank copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine_adapters.vllm.tally import added
from kvstore.cli.child import ChildDaemon
from kvstore.client.recompute import REMEMBER_SECONDS, TRIAL_BLOCKS
from kvstore.clock import ManualClock
from tests.support.toy_vllm import BLOCK, ROW_BYTES, ToyEngine, ToyRequest

BLOCKS = 10
COMPUTE_SECONDS = 1.0
"""Of a block."""
SLOW = "misses/slower_than_recompute"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildDaemon]:
    with ChildDaemon(tmp_path_factory.mktemp("d"), arena_bytes=64 << 20) as running:
        yield running


_salt = iter(range(1, 1 << 20))


@pytest.fixture
def prompt(daemon: ChildDaemon) -> list[int]:
    """A prompt that another engine of two ranks has stored."""
    salt = 10_000 + next(_salt)
    tokens = [salt * 1000 + i for i in range(BLOCKS * BLOCK + 5)]
    with ToyEngine(daemon.address, ranks=2) as other:
        other.run(ToyRequest("a", tokens))
    return tokens


class Throttled(ToyEngine):
    """An engine of two ranks. The second one gets a block in `block_seconds`, by its own clock; the first one
    takes no time at all.
    """

    def __init__(self, daemon: ChildDaemon, **options: Any) -> None:
        self._clocks = [ManualClock() for _ in range(3)]
        self.block_seconds = 0.0
        given = {
            "prefill_tokens_per_second": BLOCK / COMPUTE_SECONDS,
            "fetch_seconds": 1000.0,
            "fetch_seconds_min": 0.0,
            "staging_bytes": 3 * ROW_BYTES,  # a block: the deadline is looked at before each
            **options,
        }
        super().__init__(daemon.address, ranks=2, num_blocks=256, clocks=self._clocks, **given)
        memory = self.ranks[1].side._memory
        scatter = memory.scatter

        def throttled(rows: Any, block_ids: Any) -> None:
            self._clocks[1].advance(self.block_seconds * len(block_ids))
            scatter(rows, block_ids)

        memory.scatter = throttled  # type: ignore[method-assign,assignment]
        self._runs = iter(range(1 << 20))

    def sleep(self, seconds: float) -> None:
        """Let time pass for all."""
        for clock in self._clocks:
            clock.advance(seconds)

    def ask(self, prompt: list[int]) -> tuple[int, dict[str, float]]:
        """Run a request; return how many blocks were promised, and what was counted."""
        request = ToyRequest(f"r{next(self._runs)}", prompt)
        promised = self.run(request).promised_tokens // BLOCK
        assert self.is_right(request)
        counts = self.side.tally.take()
        for rank in self.ranks:
            counts = added(counts, rank.side.tally.take())
        assert "stored_blocks/stored_host" not in counts, "what is not loaded is in the store all the same"
        return promised, counts


@pytest.mark.parametrize("load_async", [True, False])
def test_a_throttled_rank_is_left_alone_by_all_and_used_again_when_it_is_fast(
    daemon: ChildDaemon, prompt: list[int], load_async: bool
) -> None:
    with Throttled(daemon, load_async=load_async) as engine:
        engine.block_seconds = 3.0
        promised, counts = engine.ask(prompt)
        assert promised == BLOCKS, "nobody knew that it is slow"
        assert counts["failed_loads/deadline"] == 1, "and computing would have been as fast"
        promised, counts = engine.ask(prompt)
        assert (promised, counts[SLOW], counts["load_decisions/recompute"]) == (0, 1, 1)
        assert "loads" not in counts
        engine.sleep(REMEMBER_SECONDS)
        assert engine.ask(prompt)[0] == TRIAL_BLOCKS, "still slow"
        assert engine.ask(prompt)[0] == 0
        engine.sleep(REMEMBER_SECONDS)
        engine.block_seconds = 0.25
        promised, counts = engine.ask(prompt)
        assert (promised, counts[SLOW], counts["load_decisions/try"]) == (TRIAL_BLOCKS, 1, 1)
        promised, counts = engine.ask(prompt)
        assert (promised, counts["hit_tokens/host"]) == (BLOCKS, BLOCKS * BLOCK)
        assert SLOW not in counts


def test_what_nobody_would_notice_is_loaded(daemon: ChildDaemon, prompt: list[int]) -> None:
    with Throttled(daemon, fetch_seconds_min=BLOCKS * 3.0) as engine:
        engine.block_seconds = 3.0
        assert [engine.ask(prompt)[0] for _ in range(3)] == [BLOCKS] * 3


def test_asking_again_decides_the_same_and_begins_no_trial(daemon: ChildDaemon, prompt: list[int]) -> None:
    with Throttled(daemon) as engine:
        engine.block_seconds = 3.0
        engine.ask(prompt)
        waiting, behind = ToyRequest("waiting", prompt), ToyRequest("behind", prompt)
        assert [engine.side.probe(waiting, 0) for _ in range(3)] == [0] * 3
        assert engine.side.tally.take().keys() <= {"lookup_seconds"}, "counted when it is admitted"
        engine.sleep(REMEMBER_SECONDS)
        assert {engine.side.probe(one, 0) for one in (waiting, behind, waiting)} == {TRIAL_BLOCKS * BLOCK}
        assert engine.admit(waiting) == TRIAL_BLOCKS * BLOCK
        assert engine.side.probe(behind, 0) == 0, "one trial at a time"


def test_a_load_behind_others_is_not_waited_for(daemon: ChildDaemon, prompt: list[int]) -> None:
    with Throttled(daemon) as engine:
        engine.block_seconds = 0.6
        engine.ask(prompt)
        queue = [ToyRequest(f"q{i}", prompt) for i in range(3)]
        assert [engine.admit(request) for request in queue] == [BLOCKS * BLOCK] * 2 + [0]
        # Both threads are busy for 6 s, and computing takes 10.
        assert engine.side.tally.take()[SLOW] == 1
