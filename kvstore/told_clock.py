"""A clock that stands still until another process moves it: for tests that live days in seconds.

The time lies in a small file that both map. Nobody gets such a clock by accident: the file must be there, and
say what it is.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgument

TEST_CLOCK_VARIABLE = "KVSTORE_TEST_CLOCK"
"""Names the file to a daemon."""
_MAGIC = b"kvstore told clk"
_BYTES = len(_MAGIC) + 8
_WALL, _MONOTONIC = 1_700_000_000.0, 1000.0


class ToldClock:
    """Both hands of one time. Units: seconds since the start.

    Threads and processes: one tells, any reads; a time is one aligned word.
    """

    def __init__(self, path: Path) -> None:
        """Errors: InvalidArgument when the file is no such clock."""
        try:
            content = path.read_bytes()
            if len(content) != _BYTES or not content.startswith(_MAGIC):
                raise InvalidArgument(f"{path}: no clock; the file must come from ToldClock.create")
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _BYTES)
        except OSError as error:
            raise InvalidArgument(f"clock {path}: {error.strerror}") from error
        self._seconds: npt.NDArray[np.float64] = np.frombuffer(self._map, np.float64, 1, len(_MAGIC))

    @staticmethod
    def create(path: Path) -> ToldClock:
        """Make a clock that begins at zero."""
        path.write_bytes(_MAGIC + bytes(8))
        return ToldClock(path)

    def tell(self, seconds: float) -> None:
        """Move both hands to a time since the start; never back."""
        assert seconds >= self._seconds[0]
        self._seconds[0] = seconds

    def monotonic(self) -> float:
        """Return the monotonic time as told."""
        return _MONOTONIC + float(self._seconds[0])

    def wall(self) -> float:
        """Return the wall time as told."""
        return _WALL + float(self._seconds[0])
