"""fio as a baseline: how fast the disk gives the very same files."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import TierUnavailable

TIMEOUT_SECONDS = 120.0


def is_installed() -> bool:
    """Return whether there is a fio to run."""
    return shutil.which("fio") is not None


def read_bytes_per_second(files: Sequence[Path], *, window_seconds: float) -> float:
    """Read the files in order with libaio, 1 MiB at depth 16, past the page cache; writes nothing.

    Errors: TierUnavailable with what fio said.
    """
    command = [
        "fio",
        "--name=read",
        f"--filename={':'.join(map(str, files))}",
        "--readonly",
        "--rw=read",
        "--bs=1M",
        "--iodepth=16",
        "--ioengine=libaio",
        "--direct=1",
        "--time_based",
        f"--runtime={int(1000 * window_seconds)}ms",
        "--output-format=json",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
        document = json.loads(done.stdout[done.stdout.index("{") :])
        speed = float(document["jobs"][0]["read"]["bw_bytes"])
    except (OSError, ValueError, KeyError, IndexError, subprocess.TimeoutExpired) as error:
        raise TierUnavailable(f"fio failed: {error}") from error
    if done.returncode or not speed:
        raise TierUnavailable(f"fio ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return speed
