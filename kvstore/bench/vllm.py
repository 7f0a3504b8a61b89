"""vllm: time to first token with the store behind the real vLLM, and what lookups and saving cost it.

Runs vLLM's CPU build with SmolLM2 in float32. Everything is said relative to the same engine in the same
run; how vLLM's own prefix cache and its example connector do stands beside it.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_adapters.transformers import smollm2
from kvstore.bench import rows
from kvstore.bench.harness import Bench, Timings, milliseconds
from kvstore.bench.rows import Row
from kvstore.bench.vllm_process import CONNECTOR, VllmProcess, missing_cpu_flags
from kvstore.cli.child import ChildDaemon

ROUNDS_MAX = 7
SHARED_TOKENS, PROMPT_TOKENS = 1920, 2133
"""90 % of a prompt, 15 blocks of vLLM's default size, is what a warm one shares."""
BATCH, BATCH_TOKENS, NEW_TOKENS = 4, 384, 32
VOCABULARY = 49_000
ARENA_BYTES = 1 << 30
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 2560, "max_num_seqs": BATCH}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
SPECS = (rows.VLLM_WARM_HOST, rows.VLLM_WARM_SSD, rows.VLLM_LOOKUP, rows.VLLM_SAVING)
_ids = random.Random(7)


def run(bench: Bench) -> Iterator[Row]:
    """Measure the rows of the group, if there is a vLLM."""
    if lacking := _lacking():
        yield from (Row(spec, None, f"not measured: {lacking}", lacks="vLLM") for spec in SPECS)
        return
    bench = replace(bench, rounds=min(bench.rounds, ROUNDS_MAX))
    with bench.daemon(arena_bytes=ARENA_BYTES) as child:
        cold_prompts: list[list[int]] = []
        with _engine(bench, child) as engine:
            yield from _host(bench, engine, cold_prompts)
            saving = _saving(bench, engine)
        child.stop()
        child.start()
        with _engine(bench, child) as engine:
            yield _ssd(bench, engine, cold_prompts)
    yield saving


def _lacking() -> str:
    if "KVSTORE_VLLM" not in os.environ:
        return "KVSTORE_VLLM does not name an environment with vLLM (make vllm-bench sets it)"
    flags = missing_cpu_flags(Path("/proc/cpuinfo").read_text())
    return f"vLLM's CPU build needs a processor with {', '.join(flags)}" if flags else ""


@contextmanager
def _engine(
    bench: Bench, child: ChildDaemon | None, connector: dict[str, Any] | None = None
) -> Iterator[VllmProcess]:
    """Run an engine: with the store, or with another connector, or with none."""
    bench.tell("starting vLLM")
    venv, site = (Path(folder) for folder in os.environ["KVSTORE_VLLM"].split(":"))
    if child is not None:
        extra = {"address": child.address, "match_seconds": 1.0, "fetch_seconds": 30.0}
        connector = {**CONNECTOR, "kv_connector_extra_config": extra}
    model = smollm2.prepare(bench.tell)
    with bench.scratch() as folder:
        log = folder / "vllm.log"
        with VllmProcess(venv, site, model=model, log=log, connector=connector, options=OPTIONS) as engine:
            engine.generate(_prompt(PROMPT_TOKENS), 2)  # a process's first request pays for its warm-up
            yield engine


def _prompt(tokens: int) -> list[int]:
    return [_ids.randrange(VOCABULARY) for _ in range(tokens)]


def _first_token(engine: VllmProcess, prompt: list[int], *, hit: int, forget: bool = True) -> float:
    """Return the seconds to the first token, in an engine that has no prefix itself."""
    if forget:
        engine.tell("drain")
        engine.tell("reset")
    answer = engine.generate(prompt, 1)
    if answer["cached"] != hit:
        raise OSError(f"vllm: {answer['cached']} tokens were cached, {hit} expected")
    return float(answer["first_token_seconds"])


def _host(bench: Bench, engine: VllmProcess, cold_prompts: list[list[int]]) -> Iterator[Row]:
    shared = _prompt(PROMPT_TOKENS)
    engine.generate(shared, 1)

    def cold() -> float:
        cold_prompts.append(_prompt(PROMPT_TOKENS))
        return _first_token(engine, cold_prompts[-1], hit=0)

    def resumed(*, forget: bool) -> float:
        prompt = shared[:SHARED_TOKENS] + _prompt(PROMPT_TOKENS - SHARED_TOKENS)
        return _first_token(engine, prompt, hit=SHARED_TOKENS, forget=forget)

    before = engine.metrics()
    timings = bench.alternate(
        "vllm_warm_host", warm_up=1, cold=cold, warm=lambda: resumed(forget=True), own=lambda: _own(resumed)
    )
    own = timings.median("own") / timings.median("cold")
    note = f"vLLM's own prefix cache {own:.2f}; {_example(bench)}"
    yield timings.row(rows.VLLM_WARM_HOST, "warm", "cold", note=note)
    yield _lookup(timings, before, engine.metrics())


def _own(resumed: Callable[..., float]) -> float:
    """Time a hit in the engine's own memory: the store's hit just before left the prefix there."""
    resumed(forget=True)
    return resumed(forget=False)


def _lookup(timings: Timings, before: dict[str, float], after: dict[str, float]) -> Row:
    """Return what lookups and leases took of the scheduler's time, as a share of a cold first token."""
    seconds, asked = (after[f"vllm:kvstore_{name}"] - before[f"vllm:kvstore_{name}"] for name in (
        "lookup_seconds", "lookups",
    ))  # fmt: skip
    each, cold = seconds / asked, timings.median("cold")
    detail = (
        f"{milliseconds(each)} each of {asked:.0f} lookups, leases included, against {milliseconds(cold)}"
    )
    return Row(rows.VLLM_LOOKUP, each / cold, detail)


def _example(bench: Bench) -> str:
    """Return how vLLM's example connector does with a whole prompt; it knows no shorter prefixes."""
    with bench.scratch() as folder:
        config = {**EXAMPLE, "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
        with _engine(bench, None, config) as engine:
            cold, warm = [], []
            for _ in range(max(2, bench.rounds // 2)):
                prompt = _prompt(PROMPT_TOKENS)
                cold.append(engine.generate(prompt, 1)["first_token_seconds"])
                engine.tell("reset")
                warm.append(engine.generate(prompt, 1)["first_token_seconds"])
                engine.tell("reset")
    return f"its example connector, the whole prompt again {min(warm) / min(cold):.2f}"


def _saving(bench: Bench, engine: VllmProcess) -> Row:
    def batch(which: VllmProcess) -> float:
        prompts = [_prompt(BATCH_TOKENS) for _ in range(BATCH)]
        return float(which.tell("generate", prompts=prompts, tokens=NEW_TOKENS)["seconds"])

    with _engine(bench, None) as plain:
        timings = bench.alternate(
            "vllm_saving", warm_up=1, saving=lambda: batch(engine), plain=lambda: batch(plain)
        )
    note = f"{BATCH} prompts of {BATCH_TOKENS} tokens, {NEW_TOKENS} generated each"
    return timings.row(rows.VLLM_SAVING, "saving", "plain", note=note)


def _ssd(bench: Bench, engine: VllmProcess, stored: list[list[int]]) -> Row:
    """Each round resumes from a prompt that was stored before the restart and not touched since."""
    fresh = itertools.cycle(reversed(stored))

    def warm() -> float:
        prompt = next(fresh)[:SHARED_TOKENS] + _prompt(PROMPT_TOKENS - SHARED_TOKENS)
        return _first_token(engine, prompt, hit=SHARED_TOKENS)

    before = engine.metrics()
    timings = bench.alternate(
        "vllm_warm_ssd",
        warm_up=1,
        cold=lambda: _first_token(engine, _prompt(PROMPT_TOKENS), hit=0),
        warm=warm,
    )
    hits = "vllm:kvstore_hit_tokens{ssd}"
    blocks = (engine.metrics().get(hits, 0) - before.get(hits, 0)) / SHARED_TOKENS
    return timings.row(rows.VLLM_WARM_SSD, "warm", "cold", note=f"{blocks:.0f} hits came from SSD")
