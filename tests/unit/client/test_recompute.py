"""Load or recompute: the decision itself, the speeds it goes by, and both branches with a throttled tier."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest

from kvstore.api import MatchAnswer, TierRun
from kvstore.client import Client, OpenNamespace
from kvstore.client.recompute import DECISIONS, REMEMBER_SECONDS, TRIAL_BLOCKS, Choice, TierSpeeds, choose
from kvstore.clock import ManualClock, SystemClock
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire import match_answer_to_wire
from kvstore.types import Tier
from tests.unit.client.conftest import LIMITS, NAMESPACE, SECONDS, empty, stored
from tests.unit.client.fake_daemon import FakeDaemon

HOST, SSD, SHARED = Tier.HOST, Tier.SSD, Tier.SHARED


def chosen(
    *tiers: TierRun,
    recompute: float,
    first: int = 0,
    may_try: bool = False,
    host: float = 0.0,
    ssd: float = 0.0,
    shared: float = 0.0,
) -> Choice:
    paces = {HOST: host, SSD: ssd, SHARED: shared}
    return choose(
        tiers,
        first=first,
        block_load_seconds=paces.__getitem__,
        block_recompute_seconds=recompute,
        may_try=lambda _: may_try,
    )


def test_what_is_faster_than_computing_is_loaded_and_the_rest_computed() -> None:
    tiers = (TierRun(HOST, 10), TierRun(SSD, 20))
    assert chosen(*tiers, host=0.1, ssd=0.5, recompute=1.0).blocks == 30
    assert chosen(*tiers, host=0.1, ssd=2.0, recompute=1.0) == Choice(10, 1.0, 10.0)
    assert chosen(*tiers, host=3.0, ssd=2.0, recompute=1.0) == Choice(0)
    assert chosen(*tiers, host=0.1, ssd=2.0, recompute=1.0, first=10) == Choice(10), "it has those already"


def test_a_slow_stretch_is_loaded_for_what_lies_behind_it() -> None:
    tiers = (TierRun(SSD, 5), TierRun(HOST, 20))
    assert chosen(*tiers, host=0.1, ssd=2.0, recompute=1.0).blocks == 25
    assert chosen(TierRun(SSD, 50), TierRun(HOST, 20), host=0.1, ssd=2.0, recompute=1.0).blocks == 0


def test_without_measurements_everything_is_loaded() -> None:
    tiers = (TierRun(HOST, 3), TierRun(SSD, 4))
    assert chosen(*tiers, recompute=1.0).blocks == 7
    assert chosen(*tiers, host=0.1, ssd=9.0, recompute=math.inf).blocks == 7, "the engine's pace is not known"


@pytest.mark.parametrize("seed", range(50))
def test_no_choice_is_slower_than_computing_all(seed: int) -> None:
    source = random.Random(seed)
    tiers = [TierRun(source.choice((HOST, SSD, SHARED)), source.randint(1, 30)) for _ in range(4)]
    host, ssd, shared = (source.random() for _ in range(3))
    paces = {HOST: host, SSD: ssd, SHARED: shared}
    found = chosen(*tiers, recompute=0.4, host=host, ssd=ssd, shared=shared)
    ends = [0, *accumulate(run.count for run in tiers)]
    load = [0.0, *accumulate(run.count * paces[run.tier] for run in tiers)]
    total = [seconds + 0.4 * (ends[-1] - end) for end, seconds in zip(ends, load, strict=True)]
    assert found.load_seconds + 0.4 * (ends[-1] - found.blocks) == pytest.approx(min(total))
    assert min(total) <= total[0]


def test_a_tier_that_was_left_out_is_tried_with_few_blocks() -> None:
    tiers = (TierRun(HOST, 10), TierRun(SSD, 20))
    found = chosen(*tiers, host=0.1, ssd=2.0, recompute=1.0, may_try=True)
    assert (found.blocks, found.trial) == (10 + TRIAL_BLOCKS, SSD)
    assert found.decision(first=10, found=30) == "try"


def test_what_waits_for_others_must_save_more() -> None:
    found = [
        choose(
            [TierRun(HOST, 10)],
            first=0,
            block_load_seconds=lambda _: 0.1,
            block_recompute_seconds=0.3,
            wait_seconds=wait,
        ).blocks
        for wait in (0.0, 1.9, 2.1)
    ]
    assert found == [10, 10, 0]


def test_speeds_follow_what_is_measured_and_old_ones_make_way() -> None:
    clock = ManualClock()
    speeds = TierSpeeds(clock)
    assert speeds.block_seconds(SSD, block_bytes=100) == 0.0
    assert not speeds.may_try(SSD), "nothing is known of it: it is used anyhow"
    speeds.note([TierRun(SSD, 10)], block_bytes=100, seconds=20.0)
    assert speeds.block_seconds(SSD, block_bytes=50) == pytest.approx(1.0)
    speeds.note([TierRun(SSD, 10)], block_bytes=100, seconds=10.0)
    assert speeds.block_seconds(SSD, block_bytes=100) == pytest.approx(1.7)
    assert not speeds.may_try(SSD)
    clock.advance(REMEMBER_SECONDS)
    assert speeds.may_try(SSD)
    assert not speeds.may_try(SSD), "one at a time"
    speeds.note([TierRun(SSD, 4)], block_bytes=100, seconds=0.4)
    assert speeds.block_seconds(SSD, block_bytes=100) == pytest.approx(0.1)


def test_what_was_given_up_early_says_nothing_good() -> None:
    speeds = TierSpeeds(ManualClock())
    speeds.note([TierRun(SSD, 1)], block_bytes=1, seconds=1.0, came=False)
    assert speeds.known() == {SSD: 1.0}, "at least so slow"
    speeds.note([TierRun(SSD, 1)], block_bytes=1, seconds=0.1, came=False)
    assert speeds.known() == {SSD: 1.0}
    speeds.note([TierRun(SSD, 1)], block_bytes=1, seconds=3.0, came=False)
    assert speeds.known()[SSD] > 1.0


def test_a_fetch_from_two_tiers_is_shared_by_what_was_known() -> None:
    speeds = TierSpeeds(ManualClock())
    speeds.note([TierRun(HOST, 10)], block_bytes=1, seconds=1.0)
    speeds.note([TierRun(SSD, 10)], block_bytes=1, seconds=9.0)
    speeds.note([TierRun(HOST, 10), TierRun(SSD, 10)], block_bytes=1, seconds=20.0)
    host, ssd = (speeds.block_seconds(tier, block_bytes=1) for tier in (HOST, SSD))
    assert ssd / host == pytest.approx(9.0)
    assert host > 0.1


class AheadClock(SystemClock):
    """The system's clock, so many seconds ahead."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


def test_a_throttled_tier_is_left_alone_and_used_again_when_it_is_fast(daemon: FakeDaemon) -> None:
    clock, blocks = AheadClock(), 8

    def on_ssd(request: pb.SessionRequest) -> dict[str, pb.MatchReply]:
        answer = MatchAnswer(
            blocks=blocks,
            reason=None,
            lease=77,
            lease_seconds=30.0,
            tiers=(TierRun(SSD, blocks),),
            ready=False,
        )
        return {"match": match_answer_to_wire(answer, layout=daemon.layout)}

    def fetch(namespace: OpenNamespace, keys: bytes, *, seconds: float) -> tuple[int, int]:
        """Match, decide, and fetch what is worth it, which the tier brings after so many seconds."""
        match = namespace.match(keys, deadline_seconds=SECONDS)
        worth = namespace.worth(match, block_recompute_seconds=0.5)
        if not worth.blocks:
            return 0, 0
        ticket = namespace.submit_fetch(match, empty(blocks), blocks=worth.blocks, deadline_seconds=100.0)
        clock.ahead += seconds
        number = [request for request in daemon.seen if request.WhichOneof("verb") == "match"][-1].request_id
        daemon.send(number, progress=daemon.progress(keys, first=0, count=blocks, done=True, blocks=blocks))
        return worth.blocks, ticket.result(SECONDS).blocks

    with Client(daemon.address, limits=LIMITS, clock=clock) as client:
        namespace = client.open(NAMESPACE)
        keys = stored(namespace, blocks)
        daemon.scripts["match"] = on_ssd
        assert fetch(namespace, keys, seconds=16.0) == (8, 8), "nobody knew that it is slow"
        assert fetch(namespace, keys, seconds=16.0) == (0, 0)
        clock.ahead += REMEMBER_SECONDS
        assert fetch(namespace, keys, seconds=8.0) == (TRIAL_BLOCKS, TRIAL_BLOCKS), "still slow"
        assert fetch(namespace, keys, seconds=0.0) == (0, 0)
        clock.ahead += REMEMBER_SECONDS
        assert fetch(namespace, keys, seconds=0.0) == (TRIAL_BLOCKS, TRIAL_BLOCKS), "fast again"
        assert fetch(namespace, keys, seconds=0.0) == (8, 8)
        counted = {
            kind: client.events.total(DECISIONS, decision=kind) for kind in ("load", "recompute", "try")
        }
        assert counted == {"load": 2, "recompute": 2, "try": 2}
