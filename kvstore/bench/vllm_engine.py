"""A vLLM engine in a process of its own, told what to do by JSON lines; run by vLLM's interpreter.

    python vllm_engine.py '{"model": DIR, "connector": {...} or null, "options": {...}}'

Answers each line of its input with one line on the descriptor that was stdout; what vLLM prints goes to
stderr. The first line says that the engine is ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

DRAIN_SECONDS = 60.0


def main() -> None:
    """Start an engine and serve commands until the input ends."""
    job = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    started = time.monotonic()
    engine = Engine(job["model"], job.get("connector"), job.get("options", {}))
    answer({"ready": True, "seconds": time.monotonic() - started})
    for line in sys.stdin:
        command = json.loads(line)
        answer(getattr(engine, command.pop("do"))(**command))
    engine.close()


class Engine:
    """The commands. Prompts are token ids; answers are greedy."""

    def __init__(self, model: str, connector: dict[str, Any] | None, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if connector is not None:
            options = {**options, "kv_transfer_config": KVTransferConfig(**connector)}
        self._llm = LLM(model, enforce_eager=True, disable_log_stats=False, **options)
        self._engine = self._llm.llm_engine
        self._number = 0

    def tokenize(self, text: str) -> dict[str, Any]:
        """Return a text's token ids."""
        return {"ids": self._llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]}

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        params: dict[str, Any] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Answer prompts together; the first token's time is counted from the call.

        Once `stop` says so, requests are aborted, and have no result.
        """
        started = time.monotonic()
        numbers = [self._add(prompt, tokens, params) for prompt in prompts]
        first: dict[str, float] = {}
        results: dict[str, dict[str, Any]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                number = output.request_id
                first.setdefault(number, time.monotonic() - started)
                if output.finished:
                    results[number] = {
                        "ids": list(output.outputs[0].token_ids),
                        "finish": output.outputs[0].finish_reason,
                        "cached": output.num_cached_tokens or 0,
                        "first_token_seconds": first[number],
                    }
            if stop():
                self._engine.abort_request(numbers)
                break
        found = [results[number] for number in numbers if number in results]
        return {"results": found, "seconds": time.monotonic() - started}

    def drain(self) -> dict[str, Any]:
        """Step until finished requests gave back their blocks, and wait for their saves (one process)."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        core = self._engine.engine_core.engine_core
        steps = 0
        while core.scheduler.has_requests():
            self._engine.step()
            steps += 1
        flushed = not has_kv_transfer_group() or get_kv_transfer_group().flush(DRAIN_SECONDS)
        return {"steps": steps, "flushed": flushed}

    def reset(self) -> dict[str, Any]:
        """Forget the engine's own prefix cache, not the store's."""
        return {"done": self._llm.reset_prefix_cache()}

    def metrics(self) -> dict[str, Any]:
        """Return the counters about prefixes and the connector, by name and label."""
        from prometheus_client import REGISTRY  # vLLM's own reader rounds to whole numbers

        found: dict[str, float] = {}
        for sample in (sample for metric in REGISTRY.collect() for sample in metric.samples):
            name = sample.name.removesuffix("_total")
            if ("kvstore" in name or "prefix_cache" in name) and not name.endswith("_created"):
                labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
                label = ",".join(v for v in labels.values() if v != "all")
                found[f"{name}{{{label}}}" if label else name] = sample.value
        return {"metrics": found}

    def close(self) -> None:
        """End the engine as a server does."""
        self._engine.engine_core.shutdown()

    def _add(self, prompt: list[int], tokens: int, params: dict[str, Any] | None) -> str:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
        self._number += 1
        self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, sampling)
        return str(self._number)


if __name__ == "__main__":
    main()
