"""The queue before the writer: bounded in bytes, answered in order, cut at the tail when full."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvstore.tiers.base import FrameLocation, FrameWrite, WriteResult
from kvstore.tiers.ssd.format import check_frame, frame_bytes

BATCH_BYTES_MAX = 128 << 20
"""A commit takes no more than this, so that the first of many waiting frames is not answered last."""


@dataclass(slots=True)
class QueuedFrame:
    """A frame on its way to disk; `call` numbers its write. The writer sets location or refusal, and key."""

    frame: FrameWrite
    length_bytes: int
    call: int = 0
    future: Future[WriteResult] = field(default_factory=Future)
    location: FrameLocation | None = None
    refusal: str = ""
    key_id: int = 0
    key_check: int = 0


class WriteQueue:
    """Frames that wait for the writer.

    Threads: thread-safe; one thread takes batches and answers them.
    """

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._wake = threading.Condition()
        self._waiting: deque[QueuedFrame] = deque()
        self._bytes = 0
        self._is_busy = False
        self._closed = ""
        self._calls = 0

    @property
    def bytes(self) -> int:
        """Bytes submitted and not yet answered."""
        with self._wake:
            return self._bytes

    def submit(self, frames: Sequence[FrameWrite], *, refusal: str) -> list[Future[WriteResult]]:
        """Queue frames in order; what has no room is refused with all behind it; `refusal` refuses all.

        Errors: InvalidArgument on a frame whose parts do not fit together; then none is queued.
        """
        for frame in frames:
            check_frame(frame)
        items = [QueuedFrame(frame, frame_bytes(frame.header)) for frame in frames]
        with self._wake:
            self._calls += 1
            taken = 0
            for item in items:
                item.call = self._calls
                refusal = refusal or self._closed or self._no_room(item)
                if refusal:
                    break
                self._waiting.append(item)
                self._bytes += item.length_bytes
                taken += 1
            self._wake.notify_all()
        for item in items[taken:]:
            item.future.set_result(WriteResult(None, refusal))
        return [item.future for item in items]

    def _no_room(self, item: QueuedFrame) -> str:
        if self._bytes + item.length_bytes > self._bytes_max:
            return (
                f"queue full: limit {self._bytes_max} bytes, queued {self._bytes}, frame {item.length_bytes}"
            )
        return ""

    def take(self, *, timeout_seconds: float) -> list[QueuedFrame] | None:
        """Return the next batch, empty after the timeout, or None when the queue is closed and empty."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closed, timeout=timeout_seconds)
            if self._closed and not self._waiting:
                return None
            batch: list[QueuedFrame] = []
            taken = 0
            while self._waiting and (not taken or taken + self._waiting[0].length_bytes <= BATCH_BYTES_MAX):
                item = self._waiting.popleft()
                if item.future.set_running_or_notify_cancel():
                    batch.append(item)
                    taken += item.length_bytes
                else:
                    self._bytes -= item.length_bytes
            self._is_busy = bool(batch)
            return batch

    def answer(self, batch: Sequence[QueuedFrame]) -> None:
        """Resolve the futures of a batch in order."""
        with self._wake:
            self._bytes -= sum(item.length_bytes for item in batch)
        for item in batch:
            item.future.set_result(WriteResult(item.location, item.refusal))
        with self._wake:
            self._is_busy = False
            self._wake.notify_all()

    def drain(self, *, timeout_seconds: float) -> bool:
        """Wait until all that is queued is answered; says whether it is."""
        with self._wake:
            return self._wake.wait_for(
                lambda: not self._waiting and not self._is_busy, timeout=timeout_seconds
            )

    def close(self, reason: str) -> None:
        """Refuse what still waits and all that comes later; a batch at hand goes on."""
        with self._wake:
            self._closed = self._closed or reason
        self.refuse(reason)

    def refuse(self, reason: str) -> None:
        """Refuse what waits now."""
        with self._wake:
            rest = list(self._waiting)
            self._waiting.clear()
            self._bytes -= sum(item.length_bytes for item in rest)
            self._wake.notify_all()
        for item in rest:
            if item.future.set_running_or_notify_cancel():
                item.future.set_result(WriteResult(None, reason))
