"""Starts and tells a vLLM engine in its own environment; the other end is vllm_engine.py."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.errors import TierUnavailable

ENGINE = Path(__file__).with_name("vllm_engine.py")
ANSWER_SECONDS = 900.0
CPU_FLAGS = ("avx2", "fma")
"""What vLLM's CPU build needs of an x86 processor at least."""
CONNECTOR: Mapping[str, Any] = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "engine_adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",  # two threads on a busy two-core machine stall at barriers
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def missing_cpu_flags(cpuinfo: str) -> list[str]:
    """Return what the processor described by /proc/cpuinfo lacks for vLLM's CPU build."""
    flags = next((line.split(":", 1)[1].split() for line in cpuinfo.splitlines() if line[:5] == "flags"), [])
    return [flag for flag in CPU_FLAGS if flag not in flags]


class VllmProcess:
    """An engine that runs; a context manager that ends it. Its log goes to `log`.

    `venv` holds vLLM, `site` our installed package. `many` runs the engine's core in a process of its own, as
    servers do; alone it starts in half the time.
    Errors: TierUnavailable with the end of the log when the engine ends, or does not answer.
    """

    def __init__(
        self,
        venv: Path,
        site: Path,
        *,
        model: Path,
        log: Path,
        connector: Mapping[str, Any] | None,
        options: Mapping[str, Any],
        many: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        job = {"model": str(model), "connector": connector, "options": options}
        self.log = log
        self._lock = threading.Lock()
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [str(venv / "bin" / "python"), str(ENGINE), json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=log.parent,
                env=self._environ(site, many) | dict(environ or {}),
            )

    @staticmethod
    def _environ(site: Path, many: bool) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHASHSEED")}
        own = {"PYTHONPATH": str(site), "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(many))}
        own["PYTHONSAFEPATH"] = "1"  # in our folder, `import vllm` would find the module beside ENGINE
        return inherited | QUIET | own

    def __enter__(self) -> Self:
        try:
            self.startup_seconds = float(self._answer()["seconds"])
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def tell(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give a command and return its answer."""
        stream = self._process.stdin
        assert stream is not None
        with self._lock:
            stream.write(json.dumps({"do": do, **arguments}) + "\n")
            stream.flush()
            return self._answer()

    def generate(self, prompt: Sequence[int], tokens: int, **arguments: Any) -> dict[str, Any]:
        """Answer one prompt."""
        result: dict[str, Any] = self.tell("generate", prompts=[list(prompt)], tokens=tokens, **arguments)
        answer: dict[str, Any] = result["results"][0]
        return answer

    def tokenize(self, text: str) -> list[int]:
        """Return a text's token ids."""
        ids: list[int] = self.tell("tokenize", text=text)["ids"]
        return ids

    def metrics(self) -> dict[str, float]:
        """Return the engine's counters about prefixes and the store."""
        found: dict[str, float] = self.tell("metrics")["metrics"]
        return found

    def stop(self, *, seconds: float = 60.0) -> int:
        """End the engine as its input ends, and return its exit code; killed when it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._process.stdout.close()
        return code

    def kill(self) -> None:
        """Kill it on the spot."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(ANSWER_SECONDS, self._process.kill)  # reading a pipe has no timeout
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            tail = self.log.read_text(errors="replace").strip().splitlines()[-15:]
            raise TierUnavailable("vllm ended or did not answer: " + "\n".join(tail))
        answer: dict[str, Any] = json.loads(line)
        return answer
