"""A dict tier that loses power, refuses, rots, and completes what it was asked in any order."""

from __future__ import annotations

import random

from kvstore.tiers.base import FrameRead, FrameWrite, ReadResult
from kvstore.types import MissReason
from tests.support.memory import DictTier, Disk


class FaultyTier(DictTier):
    """Reads fail with a probability, writes complete in order among themselves, all else in any order."""

    def __init__(self, disk: Disk, *, rng: random.Random, frames_per_segment: int, manual: bool) -> None:
        super().__init__(disk, frames_per_segment=frames_per_segment, manual=manual)
        self.rng = rng
        self.down_share = 0.0

    def run(self, count: int = 1 << 30) -> int:
        done = 0
        while self._work and done < count:
            pick = self.rng.randrange(len(self._work)) if self.manual else 0
            if self._is_write(pick):
                pick = next(i for i in range(len(self._work)) if self._is_write(i))
            function, argument, future = self._work.pop(pick)
            future.set_result(function(argument))  # type: ignore[attr-defined,operator]
            done += 1
        return done

    def _is_write(self, index: int) -> bool:
        return isinstance(self._work[index][1], FrameWrite)

    def _read(self, read: FrameRead) -> ReadResult:
        if self.down_share and self.rng.random() < self.down_share:
            return ReadResult(0, b"", b"", MissReason.TIER_DOWN, "unplugged")
        return super()._read(read)

    def crash(self) -> None:
        """Power is lost: of the writes under way some made it to the disk, nobody was told."""
        for function, argument, _ in self._work:
            if isinstance(argument, FrameWrite) and self.rng.random() < 0.5:
                function(argument)  # type: ignore[operator]
        self._work.clear()

    def rot(self) -> bool:
        """Flip a byte of some record on the disk, for good; says whether there was one."""
        places = sorted(self.disk.frames)
        if not places:
            return False
        stored = self.disk.frames[self.rng.choice(places)]
        records = self.rng.choice(stored.records)
        index = self.rng.randrange(len(records))
        payload, digest = records[index]
        records[index] = (bytes([payload[0] ^ 1]) + payload[1:], digest)
        return True
