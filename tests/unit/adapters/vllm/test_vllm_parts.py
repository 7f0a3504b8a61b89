"""The small parts of the vLLM adapter: settings, counts, fingerprints, names, memory, pace."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine_adapters.vllm.identity import Tensor, WorkerFacts, engine_namespace
from engine_adapters.vllm.memory import block_rows, kv_memory
from engine_adapters.vllm.messages import RankSpeed
from engine_adapters.vllm.options import Options, Wishes
from engine_adapters.vllm.pace import Pace
from engine_adapters.vllm.speeds import RankSpeeds, wait_seconds
from engine_adapters.vllm.support import packing_of, why_not
from engine_adapters.vllm.tally import Tally, added, readable, split
from engine_adapters.vllm.weights import adapter_fingerprint, weights_fingerprint
from kvstore.bench.vllm_process import missing_cpu_flags
from kvstore.client.recompute import REMEMBER_SECONDS
from kvstore.clock import ManualClock
from kvstore.errors import InvalidArgument
from kvstore.types import Tier
from tests.support.toy_vllm import engine_facts, rank_facts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adress": "x"}, "unknown key 'adress'; known are address, fetch_seconds"),
        ({"load": "yes"}, "load takes a bool, got 'yes'"),
        ({"staging_bytes": True}, "staging_bytes takes a int, got True"),
        ({"match_seconds": -1}, "match_seconds must not be negative"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Options.parse(given)


def test_settings_and_wishes_are_read() -> None:
    assert Options.parse({"match_seconds": 1, "save_decode": True}).match_seconds == 1
    assert Wishes.parse(None) == Wishes.parse({"do_remote_prefill": True}) == Wishes()
    assert not Wishes.parse({"kvstore": {"save": False}}).save
    with pytest.raises(InvalidArgument, match="expected an object"):
        Wishes.parse({"kvstore": "no"})


def test_counts_are_taken_once_and_add_up() -> None:
    tally = Tally()
    tally.add("hit_tokens", 128, "host")
    tally.add("loads")
    counts = tally.take()
    assert tally.take() == {}
    both = added(counts, {"hit_tokens/host": 1.0, "load_seconds": 0.25})
    assert readable(both) == {"hit_tokens_host": 129, "load_seconds": 0.25, "loads": 1}
    assert split("hit_tokens/host") == ("hit_tokens", "host")
    assert split("loads") == ("loads", "")


def test_weights_are_their_bytes(tmp_path: Path) -> None:
    def model(name: str, content: bytes) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        (folder / "pytorch_model.bin").write_bytes(b"not what is loaded")
        return folder

    one, equal, other = (
        model("a", b"1" * 9_000_000),
        model("b", b"1" * 9_000_000),
        model("c", b"1" * 9_000_001),
    )
    assert weights_fingerprint(one) == weights_fingerprint(equal) != weights_fingerprint(other)
    with pytest.raises(InvalidArgument, match=r"by an immutable version instead"):
        weights_fingerprint(tmp_path)
    with pytest.raises(InvalidArgument, match="no adapter file"):
        adapter_fingerprint(tmp_path)


def test_a_hubs_name_of_a_file_is_its_content(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    found = []
    for name in ("a" * 64, "b" * 64):
        (blobs / name).write_bytes(b"huge")
        link = snapshot / "model.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(blobs / name)
        found.append(weights_fingerprint(snapshot))
    assert found[0] != found[1], "the files were not read"


@pytest.mark.parametrize(
    "change",
    [
        {"packing": "CPU_ATTN/amx LBHNC"},
        {"weights": "files-2"},
        {"tensors": (Tensor(layer="layers.0", bytes=4000, shape="[4000]"),) * 3},
    ],
)
def test_what_changes_the_bytes_changes_the_name(change: dict[str, Any]) -> None:
    one = engine_namespace(engine_facts(), [rank_facts(0)])
    given = {"tensors": rank_facts(0).tensors, "packing": "TOY/vec", "weights": "files-1", **change}
    other = engine_namespace(engine_facts(), [WorkerFacts(pp_rank=0, tp_rank=0, **given)])
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0.33.0"},
        {"dtype": "float32"},
        {"cache_dtype": "fp8"},
        {"quantisation": "awq"},
        {"block_tokens": 32},
        {"tenant": "t"},
        {"config": {"hidden_size": 8, "rope_theta": 5.0}},
        {"config": {"hidden_size": 9, "rope_theta": 10000.0}},
    ],
)
def test_the_configuration_is_part_of_the_name(change: dict[str, Any]) -> None:
    ranks = [rank_facts(0), rank_facts(1)]
    one, other = engine_namespace(engine_facts(), ranks), engine_namespace(engine_facts(**change), ranks)
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == engine_namespace(engine_facts(), ranks[::-1]).fingerprint
    assert one.fingerprint != engine_namespace(engine_facts(), ranks, adapter="lora").fingerprint


def test_the_longest_sequence_matters_where_it_rules_the_rotation() -> None:
    def name(config: dict[str, Any], longest: int) -> bytes:
        facts = engine_facts(config=config, max_model_len=longest)
        return engine_namespace(facts, [rank_facts(0)]).fingerprint

    plain, ruled = {"rope_theta": 1.0}, {"rope_scaling": {"rope_type": "longrope"}}
    assert name(plain, 1024) == name(plain, 2048)
    assert name(ruled, 1024) != name(ruled, 2048)


def test_ranks_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="ranks differ in packing"):
        engine_namespace(engine_facts(), [rank_facts(0), rank_facts(1, packing="other")])
    short = WorkerFacts(pp_rank=0, tp_rank=1, tensors=(), packing="TOY/vec", weights="files-1", replicas=2)
    with pytest.raises(InvalidArgument, match="shard pp0tp0 differ"):
        engine_namespace(engine_facts(), [rank_facts(0, replicas=2), short])
    with pytest.raises(InvalidArgument, match="no worker"):
        engine_namespace(engine_facts(), [])


def test_thirty_layers_are_eight_segments() -> None:
    tensors = tuple(Tensor(layer=f"l{i}", bytes=100, shape="") for i in range(30))
    facts = WorkerFacts(pp_rank=0, tp_rank=0, tensors=tensors, packing="p", weights="w")
    (part,) = engine_namespace(engine_facts(), [facts]).layout.parts
    assert (part.bytes_max, len(part.segments)) == (3000, 8)
    assert sum(segment.layer_count for segment in part.segments) == 30


def test_blocks_come_out_and_go_in_whole() -> None:
    one = torch.arange(8 * 3 * 4, dtype=torch.float32).reshape(8, 3, 4)
    packed = torch.arange(2 * 8 * 5, dtype=torch.int16).reshape(2, 8, 5)  # keys and values apart
    memory = kv_memory([one, packed], num_blocks=8)
    assert memory.row_bytes == (48, 10, 10)
    staged = memory.staging(3)
    memory.gather([6, 1], staged, after=memory.fence())
    assert staged[0, :48].tobytes() == one[6].numpy().tobytes()
    assert staged[1, 58:].tobytes() == packed[1, 1].numpy().tobytes()
    before = one[6].clone()
    one.zero_()
    packed.zero_()
    memory.scatter(staged[:1], [3])
    assert torch.equal(one[3], before)
    assert packed[0, 3].any()
    assert not one[6].any()


def test_blocks_of_strided_and_of_smaller_kernel_blocks() -> None:
    layers = torch.zeros((4, 2, 6), dtype=torch.uint8)  # all layers of a block lie together
    rows = block_rows(layers[:, 1], 4, 0)
    rows[0][2].fill_(7)
    assert layers[2, 1].eq(7).all()
    assert layers.sum() == 42
    (halves,) = block_rows(torch.zeros((8, 5), dtype=torch.uint8), 4, 0)
    assert list(halves.shape) == [4, 10]
    permuted = torch.zeros((4, 3, 2), dtype=torch.uint8).permute(0, 2, 1)
    assert list(block_rows(permuted, 4, 0)[0].shape) == [4, 6]
    for wrong in (torch.zeros((6, 5)), torch.zeros((4, 6, 5))[:, :, :3], torch.zeros((8, 2, 5))[:, 0]):
        with pytest.raises(InvalidArgument, match="KV tensor 3 has shape"):
            block_rows(wrong, 4, 3)


def test_a_load_may_take_what_computing_takes() -> None:
    clock = ManualClock()
    pace = Pace(clock, batches=2)
    assert pace.deadline(1000, least=0.05, most=2.0) == 2.0
    pace.step(1000)
    clock.advance(0.1)
    pace.step(1)  # begun while the first still runs
    clock.advance(0.4)
    pace.step(1)
    assert pace.deadline(1000, least=0.05, most=2.0) == pytest.approx(0.5)
    assert pace.deadline(10, least=0.05, most=2.0) == 0.05
    clock.advance(0.001)
    pace.step(1)  # a decode step says nothing about prompts
    assert pace.deadline(1000, least=0.05, most=2.0) == pytest.approx(0.5)


def test_a_stated_pace_is_not_measured() -> None:
    clock = ManualClock()
    pace = Pace(clock, batches=1, tokens_per_second=2000.0)
    for _ in range(3):
        pace.step(1000)
        clock.advance(0.001)
    assert pace.seconds(1000) == pytest.approx(0.5)
    assert Pace(clock, batches=1).seconds(1) == math.inf


def test_the_slowest_rank_counts_and_old_words_make_way_for_a_trial() -> None:
    clock = ManualClock()
    speeds = RankSpeeds(clock)
    assert (speeds.block_seconds(Tier.SSD), speeds.may_try(Tier.SSD)) == (0.0, False)
    told = [
        RankSpeed(rank="pp0tp0", tier=Tier.SSD, block_seconds=0.1),
        RankSpeed(rank="pp0tp1", tier=Tier.SSD, block_seconds=0.4),
    ]
    speeds.note(told)
    assert speeds.block_seconds(Tier.SSD) == 0.4
    clock.advance(REMEMBER_SECONDS)
    speeds.note(told)  # with another load: of this tier nothing is new
    assert [speeds.may_try(Tier.SSD) for _ in range(3)] == [True] * 3, "asking changes nothing"
    speeds.tried(Tier.SSD)
    assert not speeds.may_try(Tier.SSD)
    speeds.note([RankSpeed(rank="pp0tp1", tier=Tier.SSD, block_seconds=0.2)])
    assert speeds.block_seconds(Tier.SSD) == 0.2


def test_a_load_waits_for_those_that_keep_all_threads_busy() -> None:
    assert wait_seconds([], threads=2) == wait_seconds([3.0], threads=2) == 0.0
    assert wait_seconds([3.0, 1.0], threads=2) == 1.0
    assert wait_seconds([3.0, 1.0, 1.0, 4.0], threads=2) == 3.0


class FullAttentionSpec:
    pass


class SlidingWindowSpec:
    pass


def config(**changes: Any) -> tuple[Any, Any]:
    cache = SimpleNamespace(
        enable_prefix_caching=True, prefix_caching_hash_algo="sha256", calculate_kv_scales=False
    )
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    whole = SimpleNamespace(cache_config=cache, parallel_config=parallel, speculative_config=None)
    specs = changes.pop("specs", [FullAttentionSpec()])
    for key, value in changes.items():
        owner = next((part for part in (cache, parallel) if hasattr(part, key)), whole)
        setattr(owner, key, value)
    return whole, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        ({"prefix_caching_hash_algo": "xxhash"}, "collision safe and equal in every process"),
        ({"specs": [FullAttentionSpec(), SlidingWindowSpec()]}, "only one group of full attention"),
        ({"specs": [SlidingWindowSpec()]}, "SlidingWindowSpec"),
        ({"decode_context_parallel_size": 2}, "splits blocks by token"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "draft model"),
        ({"calculate_kv_scales": True}, "KV scales are measured"),
    ],
)
def test_what_cannot_be_told_for_sure_is_not_shared(changes: dict[str, Any], reason: str) -> None:
    assert reason in why_not(*config(**changes))


def test_what_can_be_shared_is() -> None:
    assert why_not(*config()) == ""
    assert why_not(*config(speculative_config=SimpleNamespace(method="ngram"))) == ""


def test_the_packing_names_backend_and_instruction_set() -> None:
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    amx = SimpleNamespace(get_attn_backend=lambda: backend, isa="amx")
    vec = SimpleNamespace(get_attn_backend=lambda: backend, isa="vec")
    assert packing_of({"a": amx}, ["a"], layout="LBHNC") == "CPU_ATTN/amx LBHNC"
    assert packing_of({"a": amx, "b": vec}, ["a", "b"], layout=None).startswith("CPU_ATTN/amx+CPU_ATTN/vec")


def test_a_cpu_without_what_vllm_needs_is_told() -> None:
    assert missing_cpu_flags("model name : x\nflags\t\t: fpu sse avx2 fma\n") == []
    assert missing_cpu_flags("flags : fpu sse\n") == ["avx2", "fma"]
    assert missing_cpu_flags("") == ["avx2", "fma"]


def test_staging_memory_is_touched() -> None:
    memory = kv_memory([torch.zeros((4, 8), dtype=torch.uint8)], num_blocks=4)
    assert np.count_nonzero(memory.staging(2)) == 0
