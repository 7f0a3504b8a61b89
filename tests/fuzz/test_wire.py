"""A short run of the wire fuzz; `python -m tests.fuzz.marathon` is the long one."""

from __future__ import annotations

import pytest

from tests.fuzz.world import fuzz, fuzzed_daemon

CALLS = 2000


@pytest.mark.parametrize("seed", [1])
def test_a_daemon_survives_strangers(seed: int) -> None:
    with fuzzed_daemon() as world:
        fuzzer, _, _ = fuzz(world, calls=CALLS, seed=seed)
        assert fuzzer.calls >= CALLS
        answered = {name.split()[0] for name in fuzzer.counts}
        assert {"Open", "Match", "Reserve", "Status", "Put", "Session"} <= answered
