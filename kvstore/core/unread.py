"""Frames on SSD that a start left alone: a later start may return them, so a purge has to know of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from kvstore.tiers.base import FrameLocation, UnreadFrame
from kvstore.types import Fingerprint, split_keys


class UnreadFrames:
    """What lies on SSD without a key or a layout to read it by. Guarded by the ladder's lock."""

    def __init__(self) -> None:
        self._frames: defaultdict[Fingerprint, list[UnreadFrame]] = defaultdict(list)

    def adopt(self, frames: Iterable[UnreadFrame]) -> None:
        """Take over what a start found."""
        for frame in frames:
            self._frames[frame.namespace].append(frame)

    def take_all(self, space: Fingerprint) -> list[FrameLocation]:
        """Forget all frames of a namespace; they are the caller's to bury."""
        return self._take(space, lambda _: True)

    def take_class(self, space: Fingerprint, holds: Callable[[str], bool]) -> list[FrameLocation]:
        """Forget the frames that were written under a class."""
        return self._take(space, lambda frame: holds(frame.retention_class))

    def take_blocks(self, space: Fingerprint, keys: set[bytes]) -> list[FrameLocation]:
        """Forget the frames that hold one of these blocks, or follow one in its chain."""
        if not self._frames.get(space):
            return []
        gone, found = set(keys), list[FrameLocation]()

        def goes(frame: UnreadFrame) -> bool:
            names = split_keys(frame.keys)
            is_meant = frame.parent in gone or not gone.isdisjoint(names)
            if is_meant:
                gone.update(names)
            return is_meant

        while more := self._take(space, goes):  # each round finds what follows the one before
            found += more
        return found

    def _take(self, space: Fingerprint, goes: Callable[[UnreadFrame], bool]) -> list[FrameLocation]:
        kept, taken = list[UnreadFrame](), list[FrameLocation]()
        for frame in self._frames.pop(space, ()):
            if goes(frame):
                taken.append(frame.location)
            else:
                kept.append(frame)
        if kept:
            self._frames[space] = kept
        return taken
