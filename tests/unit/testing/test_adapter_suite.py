"""The suite for engine adapters can fail: each scenario finds an adapter that is broken in its way."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cli.connection import Daemon
from kvstore.client import Client, Transport
from kvstore.errors import KVStoreError, LayoutMismatch
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.testing.adapter_suite import AdapterSuite, Engine, Sizes
from kvstore.testing.adapter_suite.daemon import TriedDaemon
from kvstore.testing.adapter_suite.harness import Answer
from kvstore.testing.adapter_suite.stage import Stage, StartEngine
from kvstore.testing.adapter_suite.toy import VOCABULARY, Found, Kv, Loaded, ToyEngine, ToyRank, layout_of
from kvstore.types import BlockHash, MissReason

SIZES = Sizes(
    vocabulary=VOCABULARY,
    prompt_tokens=100,
    block_tokens=16,
    full_hit_tokens=96,
    arena_bytes=16 << 20,
    short_patience_seconds=0.5,
    settle_seconds=2.0,
)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "adapters.md"
_casts = itertools.count()
Scenario = Callable[..., None]
Case = tuple[Scenario, tuple[object, ...], type[ToyEngine], str]
"""A scenario, its parameters, who fails it, and the complaint."""


class NeverLoads(ToyEngine):
    """Saves and never looks."""

    def resume(self, prompt: Sequence[int]) -> tuple[Kv, dict[str, int], tuple[str, ...]]:
        _, _, reasons = super().resume(prompt[:17])
        return self.model.extend(np.empty((0, 64), np.uint8), ()), {}, reasons or ("never_stored",)


class Boasts(ToyEngine):
    """Reports what was matched as hits; to the daemon it says that it used nothing."""

    class Rank(ToyRank):
        def release(self, owner: str, used: int) -> None:
            super().release(owner, 0)

    rank_kind = Rank


class SaysNoReason(ToyEngine):
    """Keeps to itself why a hit is short."""

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        answer = super().generate(prompt, new_tokens)
        return Answer(ids=answer.ids, hit_tokens=answer.hit_tokens)


class NamedByProcess(ToyEngine):
    """Names blocks by something that no other process has."""

    def named(self, weights: str, layout: Layout, block_tokens: int) -> Namespace:
        return super().named(f"{weights} {id(self)}", layout, block_tokens)


class NamedByShape(ToyEngine):
    """Leaves the weights out of the name."""

    def named(self, weights: str, layout: Layout, block_tokens: int) -> Namespace:
        return super().named(weights.removesuffix(" other"), layout, block_tokens)


class FailsWithTheStore(ToyEngine):
    """Lets the store's absence fail a request."""

    class Rank(ToyRank):
        def match(self, keys: bytes, owner: str) -> Found:
            found = super().match(keys, owner)
            fail(found.reason)
            return found

        def put(self, parent: BlockHash, keys: bytes, rows: Kv, put_id: bytes) -> MissReason | None:
            fail(super().put(parent, keys, rows, put_id))
            return None

    rank_kind = Rank


def fail(reason: MissReason | None) -> None:
    if reason in (MissReason.DAEMON_GONE, MissReason.DEADLINE, MissReason.BREAKER_OPEN):
        raise ConnectionError(reason)


class ChecksNothing(ToyEngine):
    """Turns the digests off."""

    rank_kind = partial(ToyRank, verify=False)


class TrustsThePlan(ToyEngine):
    """Takes what was matched for what came."""

    def agreed(self, loaded: Sequence[Loaded]) -> int:
        return max(len(load.rows) for load in loaded)


class WaitsForever(ToyEngine):
    """Has no deadlines."""

    def start_rank(self, address: str, *, rank: int, patience_seconds: float) -> ToyRank:
        return super().start_rank(address, rank=rank, patience_seconds=3600.0)


class NeverReleases(ToyEngine):
    """Leaves its leases to their deadlines."""

    class Rank(ToyRank):
        def release(self, owner: str, used: int) -> None:
            pass

    rank_kind = Rank


class PutsForOthers(ToyEngine):
    """Its first rank brings all parts of a block, though it has one of them."""

    class Rank(ToyRank):
        def put(self, parent: BlockHash, keys: bytes, rows: Kv, put_id: bytes) -> MissReason | None:
            if self._part.index:
                return super().put(parent, keys, rows, put_id)
            everybody = {0: rows, 1: np.zeros_like(rows)}
            return self._space.put(parent, keys, everybody, put_id=put_id, deadline_seconds=1.0).reason

    rank_kind = Rank


class EachForItself(ToyEngine):
    """Believes the rank that has most."""

    def agreed(self, loaded: Sequence[Loaded]) -> int:
        return max(load.good for load in loaded)


FRESH = AdapterSuite.test_a_fresh_process_hits_and_counts_what_was_delivered
TWO = AdapterSuite.test_two_engines_share_a_daemon
OTHER = AdapterSuite.test_another_model_never_hits
NOBODY = AdapterSuite.test_without_a_daemon_it_computes
ROT = AdapterSuite.test_bytes_that_rot_in_host_memory_are_no_hit
FAILED_LOAD = AdapterSuite.test_a_load_that_fails_is_a_shorter_hit
LATE = AdapterSuite.test_what_comes_too_late_is_a_miss
LOADING = AdapterSuite.test_a_daemon_fails_in_the_middle_of_a_load
SAVING = AdapterSuite.test_a_daemon_fails_while_it_is_given_blocks
HUNG = AdapterSuite.test_a_daemon_that_hangs_from_the_start_is_a_miss
CANCELLED = AdapterSuite.test_a_cancelled_request_holds_nothing
RANK_MISSING = AdapterSuite.test_a_rank_that_never_saves_hides_the_blocks
RANK_SHORT = AdapterSuite.test_a_rank_that_loads_less_decides_for_all

OTHER_IDS, NO_REASON = "differs from the one without a store", "needs a reason"
FAILED, TOO_LONG, HELD = "the request failed", "no answer within", "none of kvstore_leases"
FAILS: tuple[Case, ...] = (
    (FRESH, (), NeverLoads, "a full hit from host"),
    (FRESH, (), SaysNoReason, NO_REASON),
    (TWO, (), NamedByProcess, "stored by the other"),
    (OTHER, (), NamedByShape, OTHER_IDS),
    (NOBODY, (), FailsWithTheStore, FAILED),
    (ROT, (0,), ChecksNothing, OTHER_IDS),
    (ROT, (2,), TrustsThePlan, OTHER_IDS),
    (FAILED_LOAD, (2,), TrustsThePlan, OTHER_IDS),
    (LATE, ("progress",), TrustsThePlan, OTHER_IDS),
    (SAVING, ("hung",), FailsWithTheStore, FAILED),
    (HUNG, (), FailsWithTheStore, FAILED),
    (RANK_MISSING, (), PutsForOthers, OTHER_IDS),
    (RANK_SHORT, (), EachForItself, OTHER_IDS),
)
# These wait for what must not come, or for a daemon that starts again.
FAILS_SLOWLY: tuple[Case, ...] = (
    (FRESH, (), Boasts, "are counted as delivered"),
    (LATE, ("match",), WaitsForever, TOO_LONG),
    (LATE, ("progress",), NeverReleases, HELD),
    (LOADING, ("killed",), TrustsThePlan, OTHER_IDS),
    (LOADING, ("restarted",), TrustsThePlan, OTHER_IDS),
    (LOADING, ("hung",), WaitsForever, TOO_LONG),
    (SAVING, ("killed",), FailsWithTheStore, FAILED),
    (HUNG, (), WaitsForever, TOO_LONG),
    (CANCELLED, (), NeverReleases, HELD),
)


def cast(kind: type[ToyEngine], sizes: Sizes, ranks: int) -> tuple[AdapterSuite, StartEngine]:
    """Return a suite and who plays in it; no two casts share blocks."""
    name = f"{os.getpid()} {next(_casts)}"
    suite = AdapterSuite()
    suite.sizes, suite.ranks = sizes, ranks

    def start(address: str | None, *, patience_seconds: float, other_model: bool) -> Engine:
        weights = f"{name} other" if other_model else name
        return kind(address, patience_seconds=patience_seconds, weights=weights, ranks=ranks)

    return suite, start


def play(daemon: TriedDaemon, sizes: Sizes, kind: type[ToyEngine], scenario: Scenario, *how: object) -> None:
    """Play one scenario with engines of one kind."""
    suite, start = cast(kind, sizes, 2 if scenario in (RANK_MISSING, RANK_SHORT) else 1)
    try:
        with Stage(daemon, start, sizes) as stage:
            scenario(suite, stage, *how)
    finally:
        daemon.recover()


@pytest.fixture(scope="module")
def daemon() -> Iterator[TriedDaemon]:
    with TriedDaemon(arena_bytes=SIZES.arena_bytes) as running:
        yield running


def told(case: Case) -> str:
    scenario, how, kind, _ = case
    return "-".join([kind.__name__, scenario.__name__.removeprefix("test_"), *map(str, how)])


def check(daemon: TriedDaemon, case: Case) -> None:
    scenario, how, kind, complaint = case
    # Who waits forever need not be waited for.
    sizes = replace(SIZES, answer_seconds_max=4.0) if kind is WaitsForever else SIZES
    with pytest.raises(AssertionError, match=complaint):
        play(daemon, sizes, kind, scenario, *how)


@pytest.mark.parametrize("case", FAILS, ids=told)
def test_a_broken_adapter_fails(daemon: TriedDaemon, case: Case) -> None:
    check(daemon, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILS_SLOWLY, ids=told)
def test_a_broken_adapter_fails_after_a_while(daemon: TriedDaemon, case: Case) -> None:
    check(daemon, case)


@pytest.mark.parametrize("scenario", [RANK_MISSING, RANK_SHORT, CANCELLED], ids=lambda s: s.__name__)
def test_a_sound_adapter_passes(daemon: TriedDaemon, scenario: Scenario) -> None:
    play(daemon, SIZES, ToyEngine, scenario)


@pytest.mark.slow
def test_kept_engines_are_started_once_and_find_their_way_back(daemon: TriedDaemon) -> None:
    suite, start = cast(ToyEngine, SIZES, 1)
    started: list[float] = []

    def counted(address: str | None, *, patience_seconds: float, other_model: bool) -> Engine:
        started.append(patience_seconds)
        return start(address, patience_seconds=patience_seconds, other_model=other_model)

    with Stage(daemon, counted, SIZES, reuses_engines=True) as stage:
        HUNG(suite, stage)
        LATE(suite, stage, "match")
        ROT(suite, stage, 2)
    plain, patient, impatient = started
    assert plain == patient == SIZES.patience_seconds > impatient


def test_every_scenario_finds_somebody() -> None:
    found = {scenario.__name__ for scenario, _, _, _ in FAILS + FAILS_SLOWLY}
    assert found == {name for name in vars(AdapterSuite) if name.startswith("test_")}


def test_a_tap_without_rules_changes_nothing(daemon: TriedDaemon) -> None:
    namespace = Namespace(model="tapped", weights="v1", layout=layout_of(1, 16), block_tokens=16)
    rows = np.arange(3 * 1024, dtype=np.uint64).astype(np.uint8).reshape(3, 1024)
    with Client(daemon.tap.address, transport=Transport.FRAMED) as client:
        space = client.open(namespace)
        keys = space.hashes(range(48))
        assert space.put(space.root, keys, rows).stored == 3
        assert space.get(keys, into := np.zeros_like(rows)).blocks == 3
        assert np.array_equal(into, rows)
        with pytest.raises(LayoutMismatch, match="same identity, different layout"):
            client.open(replace(namespace, layout=layout_of(2, 16)))
        with pytest.raises(KVStoreError, match="page"):
            space.list("no cursor")
    with Daemon(daemon.tap.address) as tool:
        assert tool.serving()
        assert tool.status()["counters"]


def test_the_page_on_adapters_runs(daemon: TriedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    verbs, suite = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    verbs = verbs.replace("Client()", f"Client({daemon.tap.address!r})")
    exec(verbs, {})
    assert capsys.readouterr().out == "0 blocks loaded, 6 stored\n"
    exec(verbs, found := dict[str, Any]())
    assert (found["good"], capsys.readouterr().out) == (6, "")
    exec(suite, found)
    mine = found["TestMyAdapter"]
    with Stage(daemon, mine.start_engine, mine.sizes) as stage:
        mine().test_two_engines_share_a_daemon(stage)
