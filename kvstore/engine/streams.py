"""How blocks get between host memory and the pool's device, beside what is being computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Views = Sequence[torch.Tensor]
"""Neighbouring blocks where they lie in the pool, layer by layer. Shapes: u8[blocks, bytes] each."""
STAGINGS = 2
"""While one is copied to the device, the next one fills."""


class Mark(Protocol):
    """A place in a stream: with `wait` the current stream waits for it, with `synchronize` the caller."""

    def wait(self) -> None: ...
    def synchronize(self) -> None: ...


class Stream(Protocol):
    """What is used of torch.Stream; entered, it is the current stream."""

    def __enter__(self) -> object: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...
    def record_event(self) -> Mark: ...


class InPlace:
    """The copies of one load or save where the pool is host memory: there are none, and nobody waits."""

    def staging(self, views: Views) -> list[Bytes]:
        """Return host memory to fill, or to read what `views` hold."""
        return [view.numpy() for view in views]

    def send(self, views: Views) -> Mark | None:
        """Begin to copy what was filled last to its views; the mark is behind that, None: it is there."""
        return None

    def receive(self, views: Views) -> list[Bytes]:
        """Return what the views hold."""
        return self.staging(views)

    def finish(self) -> None:
        """Wait until all that was sent is there."""


class SideStream(InPlace):
    """The same on a device: pinned staging, and a stream beside the one that computes.

    Threads: one.
    """

    def __init__(self, stream: Stream, allocate: Callable[[torch.Size], torch.Tensor]) -> None:
        self._stream = stream
        self._allocate = allocate
        self._filled: list[torch.Tensor] = []
        self._sent: deque[tuple[list[torch.Tensor], Mark]] = deque()

    @staticmethod
    def of(device: torch.device) -> InPlace:
        """Return what copies for a device. A stream begins behind all that was issued for the device: pages
        that come to be filled, or saved, may still be at use in a step before.
        """
        if device.type == "cpu":
            return InPlace()
        stream = torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        return SideStream(stream, lambda shape: torch.empty(shape, dtype=torch.uint8, pin_memory=True))

    def staging(self, views: Views) -> list[Bytes]:
        """Return a staging whose copy is over."""
        self._filled = []
        if len(self._sent) == STAGINGS:
            self._filled, mark = self._sent.popleft()
            mark.synchronize()
        if [buffer.shape for buffer in self._filled] != [view.shape for view in views]:
            self._filled = [self._allocate(view.shape) for view in views]
        return [buffer.numpy() for buffer in self._filled]

    def send(self, views: Views) -> Mark | None:
        """Copy the staging that was lent last to its views."""
        with self._stream:
            for buffer, view in zip(self._filled, views, strict=True):
                view.copy_(buffer, non_blocking=True)
        self._sent.append((self._filled, self._stream.record_event()))
        return self._sent[-1][1]

    def receive(self, views: Views) -> list[Bytes]:
        """Copy the views out, into memory that is the caller's."""
        buffers = [self._allocate(view.shape) for view in views]
        with self._stream:
            for buffer, view in zip(buffers, views, strict=True):
                buffer.copy_(view, non_blocking=True)
        self._stream.record_event().synchronize()
        return [buffer.numpy() for buffer in buffers]

    def finish(self) -> None:
        """Wait until all that was sent is there."""
        for _, mark in self._sent:
            mark.synchronize()
