"""The daemon under torture, and what is asked of it once it has recovered."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.rpc.v1 import admin_pb2
from kvstore.types import PAGE_BYTES
from tests.e2e.served import COMMAND, Home, Served, Wire

SETTINGS = {
    "KVSTORE_HOST__ARENA_BYTES": "8MiB",
    "KVSTORE_SSD__SEGMENT_BYTES": "4MiB",
    "KVSTORE_SSD__CAPACITY_BYTES": "8GiB",
    "KVSTORE_LOG__LEVEL": "warning",
}
HELD = ("kvstore_leases", "kvstore_reservations", "kvstore_quarantined_slots", "kvstore_loads_in_flight")
SETTLE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a daemon takes of the machine: memory without what it shares, descriptors without the read handles
    of its segments, which the tier bounds by a number of its own.
    """

    descriptors: int
    threads: int
    rss_mib: float

    @staticmethod
    def of(pid: int) -> Vitals:
        """Read them of a living process."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        descriptors = sum(not _is_segment(link) for link in Path(f"/proc/{pid}/fd").iterdir())
        return Vitals(descriptors, int(status["Threads"]), int(status["RssAnon"].split()[0]) / 1024)

    def __str__(self) -> str:
        return f"{self.descriptors} descriptors, {self.threads} threads, {self.rss_mib:.0f} MiB"


def encryption(home: Home) -> dict[str, str]:
    """Make a key for all tenants; returns the settings to use it."""
    path = home.root / "keys.toml"
    path.write_text(f'[[default]]\nid = 1\nkey = "{"5a" * 32}"\n')
    path.chmod(0o600)
    return {
        "KVSTORE_ENCRYPTION__ENABLED": "true",
        "KVSTORE_ENCRYPTION__KEY_FILE": str(path),
        "KVSTORE_ENCRYPTION__UNLISTED_TENANTS": "default_key",
    }


def _is_segment(link: Path) -> bool:
    try:
        return link.readlink().suffix == ".seg"
    except FileNotFoundError:  # closed meanwhile
        return True


class Tormented:
    """The present daemon of a home; `faults` collects what its ends and its log should not have said."""

    def __init__(self, home: Home, *, encrypted: bool) -> None:
        self.home = home
        self._environ = SETTINGS | (encryption(home) if encrypted else {})
        self.faults: list[str] = []
        self.starts = 0
        self.slowest_start_seconds = 0.0
        self.served = self._start()

    def _start(self) -> Served:
        begin = time.monotonic()
        served = Served(self.home, environ=self._environ).__enter__()
        self.starts += 1
        self.slowest_start_seconds = max(self.slowest_start_seconds, time.monotonic() - begin)
        return served

    def end(self, number: signal.Signals) -> None:
        """End it by a signal and look at what it leaves."""
        code = self.served.stop(number)
        expected = 0 if number is signal.SIGTERM else -int(number)
        if code != expected:
            self.faults.append(f"daemon ended with {code} instead of {expected}: {self.served.log[-2000:]}")
        elif "Traceback" in self.served.log:
            self.faults.append(f"daemon's log: {self.served.log[-2000:]}")

    def start(self) -> None:
        """Start it again."""
        self.served = self._start()

    def start_and_kill(self, after_seconds: float) -> None:
        """Start it and kill it while it starts."""
        environ = self.home.environ(**self._environ)
        with subprocess.Popen(
            COMMAND, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            time.sleep(after_seconds)
            process.kill()

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        with Wire(self.home.address) as tool:
            answer = tool.admin.Status(admin_pb2.StatusRequest(), timeout=SETTLE_SECONDS, wait_for_ready=True)
        document: dict[str, Any] = json.loads(answer.document)
        return document

    def accounting_fault(self) -> str:
        """Say how the tier's count differs from that of the file system; empty when it does not."""
        document = self.status()
        counted = next(int(row["used_bytes"]) for row in document["tiers"] if row["tier"] == "ssd")
        on_disk = sum(path.stat().st_blocks * 512 for path in (self.home.data / "segments").iterdir())
        if abs(counted - on_disk) <= PAGE_BYTES:
            return ""
        return f"accounting: the daemon counts {counted} bytes in segments, the file system {on_disk}"

    def held(self) -> dict[str, float]:
        """Return what is still held by clients that are gone, once nothing is or after a while."""
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            gauges = self.status()["gauges"]
            held = {name: float(gauges[name]) for name in HELD if gauges[name]}
            if not held or time.monotonic() > end:
                return held
            time.sleep(0.1)
