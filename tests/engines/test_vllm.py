"""The real vLLM (CPU build) with a real model: main path, faults, several processes. `make vllm` runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_adapters.transformers import smollm2
from kvstore.bench.vllm_process import CONNECTOR, QUIET, missing_cpu_flags
from kvstore.cli.child import ChildDaemon
from kvstore.testing.adapter_suite import AdapterSuite, Engine, Sizes
from kvstore.testing.adapter_suite.process import Nursery
from tests.support.tiny_model import tiny_model

LACKS = missing_cpu_flags(Path("/proc/cpuinfo").read_text())
pytestmark = pytest.mark.skipif(bool(LACKS), reason=f"vLLM's CPU build needs {LACKS}, this CPU lacks them")
VENV, SITE = (Path(folder) for folder in os.environ["KVSTORE_VLLM"].split(":"))
SCRIPT = Path(__file__).with_name("vllm_engine.py")
BLOCK = 32
OPTIONS: dict[str, Any] = {
    "dtype": "float32",  # in which a hit's logits are those of a whole prefill, to rounding
    "block_size": BLOCK,
    "max_model_len": 2560,
    "max_num_seqs": 4,
}


class VllmNursery(Nursery):
    """Forks engines with vLLM imported, against our installed wheel."""

    def __init__(self, log: Path) -> None:
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environ = inherited | QUIET | {"PYTHONPATH": str(SITE)}
        pairs = [f"{key}={value}" for key, value in environ.items()]
        python = str(VENV / "bin" / "python")
        super().__init__(["env", "-i", "-C", str(log.parent), *pairs, python, str(SCRIPT)])

    def start(self, model: Path, address: str | None, *, many: bool = False, **changes: Any) -> Engine:
        """Start an engine; `options` and `extra` add to its own and to the connector's settings."""
        options = {**OPTIONS, **changes.pop("options", {})}
        extra = {"address": address, **PATIENT, **changes.pop("extra", {})}
        connector = {**CONNECTOR, "kv_connector_extra_config": extra} if address else None
        job = {"model": str(model), "connector": connector, "options": options, "many": many, **changes}
        return self.engine(job)


PATIENT = {"match_seconds": 10.0, "fetch_seconds": 60.0, "fetch_seconds_min": 60.0, "put_seconds": 60.0}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmNursery]:
    opened = VllmNursery(tmp_path_factory.mktemp("vllm") / "log")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2.prepare(lambda _: None)


@pytest.fixture(scope="module")
def prompt(model: Path) -> list[int]:
    """Return 2,100 tokens of text."""
    from engine_adapters.transformers.engine import load_tokenizer

    colours = ("red", "blue", "green", "amber")
    items = (
        f"Item {i}: the {colours[i % 4]} box number {i * 7 % 101} holds {i * i % 97} coins. "
        for i in range(400)
    )
    ids: list[int] = load_tokenizer(model)("".join(items), add_special_tokens=False)["input_ids"]
    return ids[:2100]


def test_fresh_processes_hit_from_host_and_from_ssd(
    nursery: VllmNursery, model: Path, prompt: list[int], tmp_path: Path
) -> None:
    whole = 2100 // BLOCK * BLOCK
    with ChildDaemon(tmp_path, arena_bytes=256 << 20) as daemon:
        one = nursery.start(model, daemon.address)
        cold = one.generate(prompt, 16)
        assert (cold.hit, cold.reasons) == (0, ("never_stored",))
        one.forget()
        assert one.generate(prompt, 16).ids == cold.ids, "an asynchronous load in the same process"
        one.close()
        other = nursery.start(model, daemon.address, many=True, extra={"load_async": False})
        warm = other.generate(prompt, 16)
        other.close()
        assert (warm.ids, warm.hit_tokens, warm.reasons) == (cold.ids, {"host": whole}, ())
        daemon.stop()
        daemon.start()
        third = nursery.start(model, daemon.address)
        again = third.generate(prompt, 16)
        third.close()
        assert (again.ids, again.hit_tokens, again.reasons) == (cold.ids, {"ssd": whole}, ())


def test_two_tensor_parallel_workers_load_save_and_measure_their_parts(
    nursery: VllmNursery, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    tiny_model(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32).save_pretrained(
        folder
    )
    ids = [(7 * i * i + i) % 500 for i in range(300)]
    options = {"tensor_parallel_size": 2, "skip_tokenizer_init": True, "max_model_len": 512}
    with ChildDaemon(tmp_path, arena_bytes=64 << 20) as daemon:
        answers = []
        for _ in range(2):
            engine = nursery.start(folder, daemon.address, many=True, options=options)
            answers.append(engine.generate(ids, 8))
            engine.close()
        # An engine that computes faster than anything can be loaded. What its workers measure is all that
        # tells the scheduler.
        hasty = {"prefill_tokens_per_second": 1e9, "fetch_seconds_min": 0.0}
        engine = nursery.start(folder, daemon.address, many=True, options=options, extra=hasty)
        for _ in range(2):
            answers.append(engine.generate(ids, 8))
            engine.forget()
        engine.close()
    assert [answer.ids for answer in answers[1:]] == [answers[0].ids] * 3
    assert (answers[0].hit, answers[1].hit_tokens) == (0, {"host": 300 // BLOCK * BLOCK})
    assert (answers[2].hit, answers[2].reasons) == (0, ("deadline",)), "nobody knew"
    assert (answers[3].hit, answers[3].reasons) == (0, ("slower_than_recompute",))


class TestVllmIsAnAdapter(AdapterSuite):
    """Every fault of the suite ends in the ids of an answer without a store."""

    sizes = Sizes(
        vocabulary=49_000,
        prompt_tokens=200,
        block_tokens=BLOCK,
        full_hit_tokens=192,
        arena_bytes=64 << 20,
        answer_seconds_max=300.0,
    )
    reuses_engines = True
    nursery: VllmNursery

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _nursery(cls, nursery: VllmNursery) -> None:
        cls.nursery = nursery

    @classmethod
    def start_engine(cls, address: str | None, *, patience_seconds: float, other_model: bool) -> Engine:
        extra = {
            "match_seconds": patience_seconds,
            "fetch_seconds": patience_seconds,
            "fetch_seconds_min": patience_seconds,
            "put_seconds": patience_seconds,
        }
        options: dict[str, Any] = {"max_model_len": 512}
        if other_model:
            options["hf_overrides"] = {"rms_norm_eps": 1e-2}
        return cls.nursery.start(smollm2.prepare(lambda _: None), address, options=options, extra=extra)
