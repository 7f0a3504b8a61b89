"""A daemon of our own, as a subprocess with its own directories: for `bench` and `doctor --self-test`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.cli.connection import Daemon
from kvstore.errors import KVStoreError, TierUnavailable

POLL_SECONDS = 0.02
LOG_LINES_SHOWN = 5
ARENA_TOUCHED = b"arena touched"


class ChildDaemon:
    """`kvstore serve` on a directory that belongs to it alone; a context manager that also ends it.

    `settings` are dotted keys such as `classes.batch.ttl_seconds`; `environment` is for what is no setting.
    The caller makes and removes the directory.
    """

    def __init__(
        self,
        directory: Path,
        *,
        arena_bytes: int,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.address = f"unix:{directory / 'kvstore.sock'}"
        self.data = directory / "data"
        self.log = directory / "daemon.log"
        self._settings = {
            "server.address": self.address,
            "server.metrics_address": "",
            "server.drain_seconds": "30",
            "ssd.path": str(self.data),
            "ssd.min_free_bytes": "64MiB",
            "host.arena_bytes": str(arena_bytes),
            **(settings or {}),
        }
        self._more = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the running daemon."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, *, deadline_seconds: float = 60.0) -> float:
        """Start it and wait until it serves; returns the seconds that took.

        Errors: TierUnavailable with the end of its log when it does not come up.
        """
        began = time.monotonic()
        command = [sys.executable, "-m", "kvstore.cli.main", "serve"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment()
            )
        with Daemon(self.address) as daemon:
            while not self._is_serving(daemon):
                if self._process.poll() is not None or time.monotonic() - began > deadline_seconds:
                    self.stop()
                    raise TierUnavailable(f"the daemon did not start: {self._log_tail()}")
                time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def wait_touched(self, *, deadline_seconds: float) -> bool:
        """Wait until the arena's memory is there; says whether it is. Until then the daemon makes huge pages
        beside whatever else it does.
        """
        end = time.monotonic() + deadline_seconds
        while ARENA_TOUCHED not in self.log.read_bytes():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def stop(self, *, deadline_seconds: float = 30.0) -> None:
        """Let it drain and end; killed when it does not. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
        own = {f"KVSTORE_{key.upper().replace('.', '__')}": value for key, value in self._settings.items()}
        return inherited | own | self._more

    @staticmethod
    def _is_serving(daemon: Daemon) -> bool:
        try:
            return daemon.serving()
        except KVStoreError:
            return False

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LOG_LINES_SHOWN:]
        return " | ".join(lines) or "it said nothing"
