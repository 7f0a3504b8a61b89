"""The two sides of the vLLM connector against a real daemon, driven by a stand-in for vLLM's call order.

tests/engines runs the real vLLM; here are the cases that it cannot be brought to at will, and several ranks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapters.vllm.tally import added
from kvstore.arena import Arena
from kvstore.cli.child import ChildDaemon
from kvstore.cli.connection import Daemon
from kvstore.client import Client
from kvstore.types import Tier
from tests.support.toy_vllm import BLOCK, PATIENT, ROW_BYTES, ToyEngine, ToyRequest


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildDaemon]:
    with ChildDaemon(tmp_path_factory.mktemp("d"), arena_bytes=64 << 20) as running:
        yield running


_salt = iter(range(1, 1 << 20))


@pytest.fixture
def prompt() -> list[int]:
    """A prompt of ten full blocks and a piece that no other test has."""
    salt = next(_salt)
    return [salt * 1000 + i for i in range(10 * BLOCK + 5)]


def counts(engine: ToyEngine) -> dict[str, float]:
    total = engine.side.tally.take()
    for rank in engine.ranks:
        total = added(total, rank.side.tally.take())
    return total


def gauge(daemon: ChildDaemon, name: str) -> float:
    with Daemon(daemon.address) as opened:
        return float(opened.status()["gauges"][name])


def eventually(check: Callable[[], object]) -> None:
    done = threading.Event()
    for _ in range(500):
        if check():
            return
        done.wait(0.02)
    raise AssertionError("it never came about")


@pytest.mark.parametrize(("ranks", "load_async"), [(1, True), (2, False)])
def test_another_engine_loads_what_one_saved(
    daemon: ChildDaemon, prompt: list[int], ranks: int, load_async: bool
) -> None:
    with ToyEngine(daemon.address, ranks=ranks) as one:
        cold = one.run(ToyRequest("a", prompt))
        assert cold.promised_tokens == 0
        assert counts(one)["stored_blocks/stored_host"] in (10, 20)  # with two ranks the last one's is heard
    with ToyEngine(daemon.address, ranks=ranks, load_async=load_async) as other:
        request = ToyRequest("a", prompt)
        warm = other.run(request)
        assert (warm.promised_tokens, warm.failed) == (10 * BLOCK, set())
        assert other.is_right(request)
        seen = counts(other)
        assert (seen["hit_tokens/host"], seen["lookups"]) == (10 * BLOCK, 1)
        assert "stored_blocks/stored_host" not in seen
        eventually(lambda: gauge(daemon, "kvstore_leases") == 0)


def test_a_full_hit_leaves_a_token_to_compute(daemon: ChildDaemon, prompt: list[int]) -> None:
    whole = prompt[: 4 * BLOCK]
    with ToyEngine(daemon.address) as engine:
        engine.run(ToyRequest("a", whole))
        assert engine.run(ToyRequest("b", whole)).promised_tokens == 3 * BLOCK


def test_a_probe_has_no_side_effect_and_is_asked_once(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address) as engine:
        engine.run(ToyRequest("a", prompt))
        request = ToyRequest("b", prompt)
        assert [engine.side.probe(request, 0) for _ in range(3)] == [10 * BLOCK] * 3
        assert engine.side.probe(request, 4 * BLOCK) == 6 * BLOCK
        assert gauge(daemon, "kvstore_leases") == 0
        assert counts(engine)["lookups"] == 1, "the first request's"
        assert not engine.side.finished(request, 0)


def test_behind_the_engines_own_hits_only_the_rest_is_loaded(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address) as one:
        one.run(ToyRequest("a", prompt))
    with ToyEngine(daemon.address) as engine:
        head = ToyRequest("a", prompt[: 3 * BLOCK])
        engine.run(head)
        local = engine.tables["a"][:2]
        request = ToyRequest("b", prompt)
        outcome = engine.run(request, local=local)
        assert (outcome.promised_tokens, outcome.failed) == (8 * BLOCK, set())
        assert engine.is_right(request)
        load = next(job for step in outcome.steps for job in step.loads)
        assert (load.first, len(load.block_ids)) == (2, 8)


def test_a_long_load_goes_through_little_memory(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address) as one:
        one.run(ToyRequest("a", prompt))
    with ToyEngine(daemon.address, staging_bytes=3 * 3 * ROW_BYTES) as engine:
        request = ToyRequest("a", prompt)
        assert engine.run(request).promised_tokens == 10 * BLOCK
        assert engine.is_right(request)


def rot(daemon: ChildDaemon, engine: ToyEngine, request: ToyRequest, *, block: int, part: int) -> None:
    """Flip bytes of one stored part where it lies in the arena."""
    with Client(daemon.address) as client:
        space = client.open(engine.names.namespace)
        keys = engine.side._requests[request.request_id].keys_of(0, block + 1)
        match = space.match(keys, deadline_seconds=10.0)
        assert match.blocks == block + 1
        extents = [e for e in match.extents if e.part == part and e.first <= block < e.first + e.count]
        arena_path = match.link._arena.path  # type: ignore[union-attr]
        arena = Arena.map(arena_path, writable=True)
        try:
            start = int(extents[0].slots[block - extents[0].first]) * 4096
            arena.bytes[start : start + 64] ^= 0xFF
        finally:
            arena.close()
        space.release(match, used=0)


@pytest.mark.parametrize(("load_async", "part"), [(True, 1), (False, 0)])
def test_what_one_rank_lacks_no_rank_uses(
    daemon: ChildDaemon, prompt: list[int], load_async: bool, part: int
) -> None:
    with ToyEngine(daemon.address, ranks=2) as one:
        one.run(ToyRequest("a", prompt))
    with ToyEngine(daemon.address, ranks=2, load_async=load_async) as engine:
        request = ToyRequest("a", prompt)
        engine.side.probe(request, 0)
        rot(daemon, engine, request, block=6, part=part)
        outcome = engine.run(request)
        assert outcome.promised_tokens == 10 * BLOCK
        assert engine.is_right(request), "blocks 6 to 9 were computed again"
        seen = counts(engine)
        # The rank that found it ended the lease, so the other one may have come too late for any.
        assert seen.get("hit_tokens/host", 0) <= 6 * BLOCK
        assert sum(value for key, value in seen.items() if key.startswith("failed_loads/")) == 1
        assert engine.side.probe(ToyRequest("b", prompt), 0) == 10 * BLOCK, "and stored again"
        # Word of the corruption may overtake what was stored again, which then is stored once more.
        later = [ToyRequest(name, prompt) for name in "cde"]
        failures = sum(bool(engine.run(again).failed) for again in later)
        assert failures < len(later)
        assert all(engine.is_right(again) for again in later)


def test_what_is_computed_on_a_failed_load_is_not_stored(daemon: ChildDaemon, prompt: list[int]) -> None:
    longer = [*prompt, *range(7000, 7000 + 3 * BLOCK)]
    with ToyEngine(daemon.address) as one:
        one.run(ToyRequest("a", prompt))
    with ToyEngine(daemon.address, load_async=False) as engine:
        request = ToyRequest("a", longer)
        engine.side.probe(request, 0)
        rot(daemon, engine, request, block=2, part=0)
        outcome = engine.run(request)
        assert outcome.failed
        assert counts(engine)["dropped_blocks/behind_failed_load"] == 3
    with ToyEngine(daemon.address) as third:
        check = ToyRequest("z", longer)
        assert third.run(check).promised_tokens == 13 * BLOCK
        assert third.is_right(check)


def test_the_saves_of_a_preempted_request_are_thrown_away(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address) as engine:
        request = ToyRequest("a", prompt)
        engine.admit(request)
        saver_busy = threading.Event()
        go_on = threading.Event()
        rank = engine.ranks[0]
        gather = rank.side._memory.gather

        def slow(block_ids: Any, into: Any, *, after: Any) -> None:
            saver_busy.set()
            assert go_on.wait(20.0)
            gather(block_ids, into, after=after)

        rank.side._memory.gather = slow  # type: ignore[method-assign]
        engine.step({"a": request.num_tokens}, {"a": request})
        assert saver_busy.wait(20.0)
        engine.preempted = {"a"}
        engine.step()
        for row in rank.rows:
            row.fill(0xEE)  # the blocks are somebody else's now
        go_on.set()
        assert rank.side.flush(20.0)
        assert counts(engine)["dropped_blocks/preempted"] == 10
        request.num_computed_tokens = 0
        engine.tables.pop("a")
        assert engine.admit(request) == 0, "nothing was stored"
        engine.step({"a": request.num_tokens}, {"a": request})
        assert engine.finish(request)
    with ToyEngine(daemon.address) as other:
        check = ToyRequest("a", prompt)
        assert other.run(check).promised_tokens == 10 * BLOCK
        assert other.is_right(check)


def test_a_cancelled_request_gives_its_lease_back(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address) as engine:
        engine.run(ToyRequest("a", prompt))
        request = ToyRequest("b", prompt)
        assert engine.admit(request) == 10 * BLOCK
        assert gauge(daemon, "kvstore_leases") == 1
        assert not engine.side.finished(request, 0), "vLLM waits for the load, not for saves"
        engine.step()
        eventually(lambda: engine.step() is not None and engine.loaded["b"] == 1)
        eventually(lambda: gauge(daemon, "kvstore_leases") == 0)


@pytest.mark.parametrize(
    ("wishes", "promised", "stored"),
    [
        ({"load": False}, 0, 12 - 0),
        ({"save": False}, 10, 0),
        ({"retention_class": "batch"}, 10, 2),
        ({"retention_class": "nonsense"}, 10, 12),
        ({"sava": True}, 0, 0),
    ],
)
def test_a_request_says_what_it_wants(
    daemon: ChildDaemon, prompt: list[int], wishes: dict[str, Any], promised: int, stored: int
) -> None:
    longer = [*prompt[: 10 * BLOCK], *range(9000, 9000 + 2 * BLOCK), 5]
    with ToyEngine(daemon.address) as engine:
        engine.run(ToyRequest("a", prompt))
        counts(engine)
        request = ToyRequest("b", longer, kv_transfer_params={"kvstore": wishes})
        outcome = engine.run(request)
        assert outcome.promised_tokens == promised * BLOCK
        offered = sum(v for k, v in counts(engine).items() if k.startswith("stored_blocks/"))
        assert offered == stored
        assert engine.is_right(request)
        if wishes.get("retention_class") == "batch":
            with Client(daemon.address) as client:
                runs = client.open(engine.names.namespace).list().runs
            assert any(run.retention_class == "batch" for run in runs)


@pytest.mark.parametrize("save_decode", [False, True])
def test_generated_blocks_are_stored_by_switch(
    daemon: ChildDaemon, prompt: list[int], save_decode: bool
) -> None:
    with ToyEngine(daemon.address, save_decode=save_decode) as engine:
        request = ToyRequest("a", prompt)
        engine.admit(request)
        engine.step({"a": len(prompt)}, {"a": request})
        request.tokens += range(5000, 5000 + BLOCK)
        engine.tables["a"] += [engine.free.pop(0)]
        engine.step({"a": BLOCK}, {"a": request})
        engine.finish(request)
        follow = ToyRequest("b", [*request.tokens, *range(BLOCK)])
        assert engine.side.probe(follow, 0) == (11 if save_decode else 10) * BLOCK


def test_engines_that_pack_otherwise_never_meet(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address) as engine:
        engine.run(ToyRequest("a", prompt))
        assert engine.side.probe(ToyRequest("b", prompt), 0) == 10 * BLOCK
    for facts in ({"packing": "TOY/amx"}, {"weights": "files-2"}):
        with ToyEngine(daemon.address, facts=facts) as other:
            assert other.run(ToyRequest("a", prompt)).promised_tokens == 0
            (miss,) = (key for key in counts(other) if key.startswith("misses/"))
            assert miss == "misses/identity_mismatch"


@pytest.mark.slow
def test_of_equal_ranks_one_stores_and_all_load(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address, ranks=2, facts={"replicas": 2, "packing": "TOY/mla"}) as engine:
        engine.run(ToyRequest("a", prompt))
        engine.ranks[1].rank = 0  # equal bytes
        request = ToyRequest("b", prompt)
        assert engine.run(request).promised_tokens == 10 * BLOCK
        assert engine.is_right(request)
        assert not any(key.startswith("stored") for key in engine.ranks[1].side.tally.take())


@pytest.mark.slow
def test_an_adapter_is_named_by_its_content(daemon: ChildDaemon, prompt: list[int], tmp_path: Path) -> None:
    def adapter(number: int, content: bytes) -> SimpleNamespace:
        folder = tmp_path / f"lora{number}"
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(content)
        return SimpleNamespace(lora_int_id=number, lora_name="same", lora_path=str(folder))

    first, equal, other = adapter(1, b"A"), adapter(2, b"A"), adapter(3, b"B")
    with ToyEngine(daemon.address) as engine:
        loras = (first, equal, other)
        eventually(lambda: all(engine.names.of(lora) is not None for lora in loras))
        engine.run(ToyRequest("a", prompt, lora_request=first))
        assert engine.side.probe(ToyRequest("b", prompt, lora_request=equal), 0) == 10 * BLOCK
        assert engine.side.probe(ToyRequest("c", prompt, lora_request=other), 0) == 0
        assert engine.side.probe(ToyRequest("d", prompt), 0) == 0


@pytest.mark.slow
def test_after_a_reset_nothing_old_is_found(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address) as engine:
        engine.run(ToyRequest("a", prompt))
        engine.names.rename("weights changed in place")
        assert engine.run(ToyRequest("b", prompt)).promised_tokens == 0
        assert engine.run(ToyRequest("c", prompt)).promised_tokens == 10 * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("load_async", [True, False])
def test_a_daemon_that_dies_between_lease_and_load_costs_a_recompute(
    prompt: list[int], tmp_path: Path, load_async: bool
) -> None:
    with ChildDaemon(tmp_path, arena_bytes=16 << 20) as mortal:
        with ToyEngine(mortal.address) as one:
            one.run(ToyRequest("a", prompt))
        with ToyEngine(mortal.address, load_async=load_async, put_seconds=1.0) as engine:
            request = ToyRequest("a", prompt)
            engine.side.probe(request, 0)
            lease = engine.side._lease

            def die(*args: Any, **kwargs: Any) -> None:
                lease(*args, **kwargs)
                os.kill(mortal.pid, signal.SIGKILL)

            engine.side._lease = die  # type: ignore[method-assign]
            outcome = engine.run(request)
            assert outcome.promised_tokens == 10 * BLOCK
            assert len(outcome.failed) == 10
            assert engine.is_right(request)
            assert engine.run(ToyRequest("b", [1, *prompt])).promised_tokens == 0


@pytest.mark.slow
def test_without_a_daemon_the_engine_computes(prompt: list[int], tmp_path: Path) -> None:
    nobody = {**PATIENT, "match_seconds": 0.02, "put_seconds": 0.2}
    with ToyEngine(f"unix:{tmp_path}/nobody.sock", **nobody) as engine:
        request = ToyRequest("a", prompt)
        assert engine.run(request).promised_tokens == 0
        assert engine.is_right(request)
        assert sum(v for k, v in counts(engine).items() if k.startswith("misses/")) == 1


def test_a_full_queue_drops_the_tail_of_a_request(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address, save_queue_blocks=9) as engine:
        engine.run(ToyRequest("a", prompt))
        dropped = counts(engine)["dropped_blocks/queue_full"]
        assert dropped in (2, 6)  # jobs have four blocks; the saver may have taken the first one already
        assert engine.side.probe(ToyRequest("b", prompt), 0) == (10 - dropped) * BLOCK


@pytest.mark.slow
def test_what_the_engine_has_itself_is_kept_alive_in_the_store(
    daemon: ChildDaemon, prompt: list[int]
) -> None:
    with ToyEngine(daemon.address) as engine:
        engine.run(ToyRequest("a", prompt))
        with Client(daemon.address) as client:
            space = client.open(engine.names.namespace)
            before = max(run.touched_at for run in space.list().runs)
            engine.run(ToyRequest("b", prompt), local=engine.tables["a"][:10])
            eventually(lambda: max(run.touched_at for run in space.list().runs) > before)


def test_the_plan_says_where_a_load_comes_from(daemon: ChildDaemon, prompt: list[int]) -> None:
    with ToyEngine(daemon.address) as engine:
        engine.run(ToyRequest("a", prompt))
        request = ToyRequest("b", prompt)
        engine.admit(request)
        assert engine.side.sources(request) == {Tier.HOST: 10 * BLOCK}
