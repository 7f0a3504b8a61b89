"""The scenarios. Each plays against a real daemon; each but the first few brings one real misfortune.

Whatever happens, an answer has the ids of an answer without a store, no request fails, and a hit that is not
full has a reason: Stage.ask checks that every time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest

from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.testing.adapter_suite import faults
from kvstore.testing.adapter_suite.daemon import TriedDaemon, eventually
from kvstore.testing.adapter_suite.harness import Answer, Cancellable, Cancelled, Engine
from kvstore.testing.adapter_suite.stage import Sizes, Stage
from kvstore.testing.adapter_suite.tap import Act, Message, Rule


class AdapterSuite:
    """What every adapter promises. Subclass it in a test module, say how the engine starts, run pytest.

    `reuses_engines` keeps engines from one scenario to the next, for those that take long to start.
    `ranks` above 1 adds the scenarios of ranks: part i of the layout is then what rank i brings.
    """

    sizes: Sizes
    reuses_engines = False
    ranks = 1

    @classmethod
    def start_engine(cls, address: str | None, *, patience_seconds: float, other_model: bool) -> Engine:
        """Start an engine in a fresh process against the daemon at `address`; None is without a store.

        `patience_seconds` is how long its adapter may wait for the store; `other_model` is another model of
        the same shape.
        """
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls) -> Iterator[Stage]:
        """Lend engines, and the daemon behind them."""
        with (
            TriedDaemon(arena_bytes=cls.sizes.arena_bytes) as daemon,
            Stage(daemon, cls.start_engine, cls.sizes, reuses_engines=cls.reuses_engines) as stage,
        ):
            yield stage

    @pytest.fixture(autouse=True)
    def _recovered(self, stage: Stage) -> Iterator[None]:
        yield
        stage.daemon.recover()

    def test_a_fresh_process_hits_and_counts_what_was_delivered(self, stage: Stage) -> None:
        with stage.engine() as engine:
            cold = stage.ask(engine, "fresh")
            assert cold.hit == 0, f"nothing was stored: {cold}"
            engine.forget()
        for tier in ("host", "ssd"):
            if tier == "ssd":
                stage.daemon.push_out_of_host()
            counted = stage.daemon.hit_tokens()
            with stage.engine(fresh=True) as engine:
                warm = stage.ask(engine, "fresh")
            assert warm.hit_tokens == {tier: self.sizes.full_hit_tokens}, f"a full hit from {tier}: {warm}"
            self._counts(stage, counted + warm.hit)

    def test_two_engines_share_a_daemon(self, stage: Stage) -> None:
        with stage.engine(fresh=True) as left, stage.engine(fresh=True) as right:
            for asked in [stage.asked(engine, "at once") for engine in (left, right)]:
                stage.checked(asked, "at once")
            for engine, name in ((left, "left"), (right, "right")):
                stage.ask(engine, name)
                engine.forget()
            for engine, name in ((left, "right"), (right, "left"), (right, "at once")):
                engine.forget()
                answer = stage.ask(engine, name)
                assert answer.hit == self.sizes.full_hit_tokens, f"{name}: stored by the other: {answer}"

    def test_another_model_never_hits(self, stage: Stage) -> None:
        stage.store("model")
        with stage.engine(other_model=True) as other:
            cold = stage.ask(other, "model", other_model=True)
            assert cold.hit == 0, f"another model's bytes: {cold}"
            other.forget()
            warm = stage.ask(other, "model", other_model=True)
            assert warm.hit == self.sizes.full_hit_tokens, f"its own bytes: {warm}"

    def test_without_a_daemon_it_computes(self, stage: Stage) -> None:
        nobody = f"unix:{stage.daemon.directory / 'nobody.sock'}"
        with stage.engine(address=nobody, fresh=True) as engine:
            assert stage.ask(engine, "no daemon").hit == 0

    @pytest.mark.parametrize("block", [0, 2])
    def test_bytes_that_rot_in_host_memory_are_no_hit(self, stage: Stage, block: int) -> None:
        name = f"rot {block}"
        stage.store(name)
        tap = stage.daemon.tap
        with stage.engine() as engine:
            rule = tap.on(
                "match reply",
                lambda reply: faults.rot(tap, reply, block=block),
                applies=lambda reply: bool(reply.match.extents),  # not of a probe
                times=1,
            )
            self._hits_at_most(stage.ask(engine, name), block, rule)

    @pytest.mark.parametrize("blocks", [0, 2])
    def test_a_load_that_fails_is_a_shorter_hit(self, stage: Stage, blocks: int) -> None:
        name = f"failed load {blocks}"
        self._store_on_ssd(stage, name)
        with stage.engine() as engine:
            rule = stage.daemon.tap.on(
                "progress reply", lambda reply: faults.failed_load(reply, blocks=blocks)
            )
            self._hits_at_most(stage.ask(engine, name), blocks, rule)

    @pytest.mark.parametrize("kind", ["match", "progress"])
    def test_what_comes_too_late_is_a_miss(self, stage: Stage, kind: str) -> None:
        name = f"late {kind}"
        self._store_on_ssd(stage, name)
        with stage.impatient() as engine, self._held(stage, f"{kind} reply") as (rule, go):
            self._hits_at_most(stage.ask(engine, name), 0, rule)
            go.set()
            stage.daemon.tap.clear()
            stage.daemon.holds_nothing(seconds=self.sizes.settle_seconds)
            stage.hits_again(engine, name)

    @pytest.mark.parametrize("fault", ["killed", "hung", "restarted"])
    def test_a_daemon_fails_in_the_middle_of_a_load(self, stage: Stage, fault: str) -> None:
        name = f"{fault} while loading"
        self._store_on_ssd(stage, name)
        with stage.impatient() if fault == "hung" else stage.engine() as engine:
            rule = stage.daemon.tap.on("progress reply", self._fault(stage, fault))
            self._hits_at_most(stage.ask(engine, name), 0, rule)
            stage.daemon.recover()
            stage.hits_again(engine, name)

    @pytest.mark.parametrize("fault", ["killed", "hung"])
    def test_a_daemon_fails_while_it_is_given_blocks(self, stage: Stage, fault: str) -> None:
        name = f"{fault} while saving"
        with stage.impatient() as engine:
            rule = stage.daemon.tap.on("commit request", self._fault(stage, fault), times=1)
            answer = stage.ask(engine, name)
            engine.forget()
            self._hits_at_most(answer, 0, rule)
            stage.daemon.recover()
            stage.hits_again(engine, name)

    def test_a_daemon_that_hangs_from_the_start_is_a_miss(self, stage: Stage) -> None:
        stage.store("hung")
        with stage.impatient() as engine:
            stage.ask(engine, "before hung")  # connects
            stage.daemon.hang()
            assert stage.ask(engine, "hung").hit == 0
            stage.daemon.recover()
            stage.hits_again(engine, "hung")

    def test_a_cancelled_request_holds_nothing(self, stage: Stage) -> None:
        self._store_on_ssd(stage, "cancelled")
        with stage.engine() as engine, self._held(stage, "progress reply") as (rule, go):
            if not isinstance(engine, Cancellable):
                pytest.skip("this engine cannot give a request up")
            thread, ends = stage.asked(engine, "cancelled")
            eventually(rule.met.is_set, "the request is loading")
            engine.cancel()
            thread.join(self.sizes.answer_seconds_max)
            go.set()
            assert ends, "a cancelled request did not end"
            assert isinstance(ends[0], Cancelled | Answer), f"a cancelled request failed: {ends[0]!r}"
            stage.daemon.tap.clear()
            stage.daemon.holds_nothing(seconds=self.sizes.settle_seconds)
            stage.hits_again(engine, "cancelled")

    def test_a_rank_that_never_saves_hides_the_blocks(self, stage: Stage) -> None:
        self._needs_ranks()
        with stage.impatient() as engine:
            rule = stage.daemon.tap.on(
                "reserve request",
                faults.lost,
                applies=lambda request: self._of_last_rank(request.reserve.parts),
            )
            stage.ask(engine, "rank missing")
            engine.forget()
            answer = stage.ask(engine, "rank missing")
            self._hits_at_most(answer, 0, rule)

    def test_a_rank_that_loads_less_decides_for_all(self, stage: Stage) -> None:
        self._needs_ranks()
        stage.store("rank short")
        tap = stage.daemon.tap
        with stage.engine() as engine:
            rule = tap.on(
                "match reply",
                lambda reply: faults.rot(tap, reply, block=2, part=self.ranks - 1),
                applies=lambda reply: self._of_last_rank(reply.match.extents),
                times=1,
            )
            self._hits_at_most(stage.ask(engine, "rank short"), 2, rule)

    def _needs_ranks(self) -> None:
        if self.ranks < 2:
            pytest.skip("this engine runs as one rank")

    def _of_last_rank(self, stretches: Iterable[pb.Extent | pb.PartBlocks]) -> bool:
        return any(stretch.part == self.ranks - 1 for stretch in stretches)

    @staticmethod
    def _store_on_ssd(stage: Stage, name: str) -> None:
        stage.store(name)
        stage.daemon.push_out_of_host()

    def _hits_at_most(self, answer: Answer, blocks: int, rule: Rule) -> None:
        # A scenario without its fault shows nothing.
        assert rule.met.is_set(), f"the engine never came to a {rule.kind}: {answer}"
        limit = blocks * self.sizes.block_tokens
        assert answer.hit <= limit, f"at most {limit} tokens were there to be had: {answer}"

    @staticmethod
    def _counts(stage: Stage, tokens: float) -> None:
        what = f"{tokens:g} tokens are counted as delivered"
        eventually(lambda: stage.daemon.hit_tokens() == tokens, what, seconds=stage.sizes.settle_seconds)

    @staticmethod
    def _fault(stage: Stage, fault: str) -> Act:
        """Return what lets the daemon fail before a message gets through. What it had sent by then on another
        stream, as news of a load to who matched and to who loads, is lost with it.
        """
        daemon = stage.daemon
        misfortunes: dict[str, Callable[[], None]] = {
            "killed": daemon.kill,
            "hung": daemon.hang,
            "restarted": daemon.restart,
        }

        is_first = threading.Lock()

        def act(message: Message) -> None:
            if is_first.acquire(blocking=False):
                misfortunes[fault]()

        return act

    @contextlib.contextmanager
    def _held(self, stage: Stage, kind: str) -> Iterator[tuple[Rule, threading.Event]]:
        """Hold messages of a kind back until the event is set; at the end they go on in any case."""
        go = threading.Event()

        def act(message: Message) -> Message:
            go.wait(self.sizes.answer_seconds_max)
            return message

        try:
            yield stage.daemon.tap.on(kind, act), go
        finally:
            go.set()
