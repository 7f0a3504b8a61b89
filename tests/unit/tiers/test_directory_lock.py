"""One daemon per data directory, against a real second process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.tiers.ssd import DirectoryLock

HOLDER = """
import sys
from pathlib import Path
from kvstore.tiers.ssd import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_daemon_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(TierUnavailable, match=rf"pid {holder.pid}\b"):
        DirectoryLock(tmp_path)
    holder.kill()
    holder.communicate()
    mine = DirectoryLock(tmp_path)
    with pytest.raises(TierUnavailable, match=rf"pid {os.getpid()}\b"):
        DirectoryLock(tmp_path)
    mine.release()
    mine.release()
    DirectoryLock(tmp_path).release()
