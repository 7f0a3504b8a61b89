"""kill -9 of a process that writes: what it was promised is found intact, what it deleted stays deleted."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.testing.tier_suite import assert_reads_back, found_frames
from kvstore.types import PAGE_BYTES
from tests.crash.ssd_victim import frame_of
from tests.support.ssd import open_ssd

WAIT_SECONDS = 30.0
ROOT = Path(__file__).resolve().parents[2]


def killed(directory: Path, *, seed: int, lines_min: int) -> list[str]:
    """Run a victim, kill it in the middle of its work, and return what it had said."""
    command = [sys.executable, "-m", "tests.crash.ssd_victim", str(directory), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        said = [victim.stdout.readline() for _ in range(lines_min)]
        victim.send_signal(signal.SIGKILL)
        said += victim.stdout.readlines()
    assert victim.returncode == -signal.SIGKILL
    # A line that was cut off in the middle was not said.
    return [line.strip() for line in said if line.endswith("\n")]


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_a_killed_writer_loses_nothing_it_was_promised(tmp_path: Path, index: str) -> None:
    promised: dict[bytes, tuple[int, int]] = {}
    gone: set[bytes] = set()
    for seed in range(3):
        for line in killed(tmp_path, seed=seed, lines_min=20 + 13 * seed):
            what, name = line.split()
            keys = frame_of(seed, int(name)).keys
            if what == "written":
                promised[keys] = (seed, int(name))
            elif what == "deleting":
                promised.pop(keys)
            else:
                gone.add(keys)
        if index == "lost":
            shutil.rmtree(tmp_path / "index")
        tier = open_ssd(tmp_path, seed=100 + seed)
        found = {frame.header.keys: frame for frame in found_frames(tier)}
        assert set(promised) <= set(found)
        assert not gone & set(found)
        for keys, (writer, number) in promised.items():
            built = frame_of(writer, number)
            assert found[keys].header == built.write.header
            assert_reads_back(tier, built, found[keys].location)
        on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "segments").iterdir())
        assert abs(tier.usage().used_bytes - on_disk) <= PAGE_BYTES
        tier.close(deadline_seconds=WAIT_SECONDS)
