"""The demo's end of a worker process: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.errors import KVStoreError, TierUnavailable

ANSWER_SECONDS_MAX = 600.0
LOG_LINES_SHOWN = 5
# Two OpenMP threads stall at barriers on a busy two-core machine; and nothing here may ask a hub.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


class WorkerProcess:
    """A fresh Python process with a model in it; a context manager that also ends it.

    Threads: one at a time.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.cli.demo_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | ENVIRONMENT,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        self._process.communicate()

    def ask(
        self, verb: str, *, heard: Callable[[str], None] | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Send a command and wait for its answer; `heard` is told what takes long inside.

        Errors: KVStoreError with the worker's message; TierUnavailable when it died or hung for ten minutes.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(ANSWER_SECONDS_MAX, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
            self._process.stdin.flush()
            while line := self._process.stdout.readline():
                message = json.loads(line)
                if "progress" in message:
                    if heard:
                        heard(message["progress"])
                elif "error" in message:
                    raise KVStoreError(message["error"])
                else:
                    answer: dict[str, Any] = message["answer"]
                    return answer
        except BrokenPipeError:
            pass  # it died before it could read: its log says why
        finally:
            late.cancel()
        raise TierUnavailable(f"a worker process ended while it did {verb!r}: {self._log_tail()}")

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LOG_LINES_SHOWN:]
        return " | ".join(lines) or "it said nothing"
