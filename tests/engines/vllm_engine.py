"""Forks vLLM engines from a process that has imported vLLM; runs in vLLM's environment.

    python vllm_engine.py DESCRIPTOR     (see kvstore.testing.adapter_suite.process)

A job is {"model", "connector" or null, "options", "many", "bind"}.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvstore.bench.vllm_engine import Engine as Vllm
from kvstore.testing.adapter_suite.harness import Answer
from kvstore.testing.adapter_suite.process import Job, nurse

HITS, MISSES, FAILED = "vllm:kvstore_hit_tokens", "vllm:kvstore_misses", "vllm:kvstore_failed_loads"


class TriedVllm:
    """vLLM as the suite's Engine."""

    def __init__(self, job: Job) -> None:
        self._is_one_process = not job.get("many")
        self._vllm = Vllm(job["model"], job["connector"], job["options"])
        self._seen: Counter[str] = Counter()

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        """Answer; SIGINT gives the request up between two steps."""
        stopped: list[int] = []
        before = signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
        try:
            told = self._vllm.generate([list(prompt)], new_tokens, stop=lambda: bool(stopped))
        finally:
            signal.signal(signal.SIGINT, before)
        if not told["results"]:
            if self._is_one_process:
                self._vllm.drain()
            raise KeyboardInterrupt
        result = told["results"][0]
        if result["finish"] != "length":
            raise RuntimeError(f"the request failed: {result}")
        counts = self._counts()
        tiers = {label: count for (name, label), count in counts.items() if name == HITS}
        reasons = [label for (name, label) in counts if name in (MISSES, FAILED)]
        return Answer(ids=tuple(result["ids"]), hit_tokens=tiers, reasons=tuple(reasons))

    def forget(self) -> None:
        """Let saves end, and drop vLLM's own prefixes."""
        if self._is_one_process:
            self._vllm.drain()
        self._vllm.reset()

    def close(self) -> None:
        """End it."""
        self._vllm.close()

    def _counts(self) -> dict[tuple[str, str], int]:
        """Return what was counted since the last time, by (metric, label)."""
        now = Counter({key: int(value) for key, value in self._vllm.metrics()["metrics"].items()})
        new, self._seen = now - self._seen, now
        return {_split(key): count for key, count in new.items()}


def _split(key: str) -> tuple[str, str]:
    name, _, label = key.partition("{")
    return name, label.removesuffix("}")


def open_engine(job: Job) -> Any:
    """Start an engine in this process, which was just forked."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(job.get("many", False)))
    os.environ.update(job.get("environ", {}))
    return TriedVllm(job)


def main() -> None:
    """Import vLLM, and fork engines."""
    os.dup2(2, 1)
    import vllm  # noqa: F401  (what takes long is imported once)

    nurse(socket.socket(fileno=int(sys.argv[1])), open_engine)


if __name__ == "__main__":
    main()
