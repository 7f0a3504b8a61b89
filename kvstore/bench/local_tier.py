"""The SSD tier and an arena in this process: what the disk gives when no daemon is in the way."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvstore.api import U32Array
from kvstore.bench.prompt import Array
from kvstore.clock import SystemClock
from kvstore.copying import copy_in
from kvstore.errors import TierUnavailable
from kvstore.events import Events
from kvstore.hashing import block_hashes, chain_root
from kvstore.namespace import Namespace
from kvstore.retention import DEFAULT_CLASS
from kvstore.tiers.base import FrameHeader, FrameKind, FrameLocation, FrameRead, FrameWrite, PartImage
from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.crypto_keys import KeyRing
from kvstore.types import HASH_BYTES

READ_BYTES = 2 << 20
"""What one read asks for, as the daemon does."""
SPARE_BYTES = 8 << 20
"""Room for the arena's own header and table."""
CAPACITY_BYTES = 8 << 30
QUEUE_BYTES = 1 << 30
WAIT_SECONDS = 120.0


class LocalTier:
    """One frame on SSD and the slots it is read into; a context manager that closes both.

    Threads: one at a time.
    """

    def __init__(
        self,
        namespace: Namespace,
        directory: Path,
        *,
        shared_memory: Path,
        blocks: int,
        keys: KeyRing | None = None,
    ) -> None:
        """Make an arena for so many blocks, touch it, and start a tier on the directory."""
        (self._part,) = namespace.layout.parts
        self._namespace = namespace
        self._directory = directory
        self._reads: list[FrameRead] = []
        self._frame: FrameWrite | None = None
        self._location: FrameLocation | None = None
        with ExitStack() as stack:
            self._arena = HostArena.create(
                shared_memory,
                total_bytes=blocks * self._part.stride_bytes + SPARE_BYTES,
                arena_id=secrets.randbits(63) + 1,
                boot_id=1,
            )
            stack.callback(self._arena.close)
            self._arena.start_prefault()
            self._tier = SsdTier(
                directory,
                fs=OsFileSystem(),
                clock=SystemClock(),
                events=Events(),
                capacity_bytes=CAPACITY_BYTES,
                min_free_bytes=0,
                queue_bytes_max=QUEUE_BYTES,
                keys=keys,
            )
            stack.callback(self._tier.close, deadline_seconds=WAIT_SECONDS)
            list(self._tier.recover())
            self._tier.register(namespace)
            self._arena.wait_prefault(WAIT_SECONDS)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reads, self._frame = [], None  # views of slots keep the mapping; let them go before the arena
        self._stack.close()

    def store(self, payload: Array) -> None:
        """Write the blocks as one frame and keep their slots for reading.

        Shapes: payload [blocks, bytes_max].
        Errors: TierUnavailable when the frame is refused.
        """
        count, part = len(payload), self._part
        slots = self._arena.first_page + np.arange(count, dtype=np.uint32) * np.uint32(part.stride_pages)
        copied = copy_in(self._arena.arena, part, slots=slots, source=payload)
        header = self._header(count)
        images = self._arena.images(slots, stride_pages=part.stride_pages)
        image = PartImage(part, images, copied.lengths, copied.digests)
        self._frame = FrameWrite(header, (image,), "bench")
        self._reads = list(self._planned(self.write(), slots, header.keys))

    def write(self) -> FrameLocation:
        """Write the stored frame once more, and have it read from there.

        Errors: TierUnavailable when it is refused.
        """
        assert self._frame is not None
        (future,) = self._tier.write([self._frame])
        result = future.result(WAIT_SECONDS)
        if result.location is None:
            raise TierUnavailable(f"the frame was refused: {result.refusal}")
        self._location = result.location
        self._reads = [replace(read, location=result.location) for read in self._reads]
        return result.location

    def forget(self) -> None:
        """Delete the frame that was written last, and give its bytes back."""
        if self._location is not None:
            self._tier.delete([self._location]).result(WAIT_SECONDS)
            self._location = None

    def _header(self, count: int) -> FrameHeader:
        root = chain_root(self._namespace.fingerprint)
        size = self._namespace.block_tokens
        keys = block_hashes(root, np.arange(count * size), block_tokens=size)
        now = SystemClock().wall()
        return FrameHeader(
            self._namespace.fingerprint, FrameKind.MAIN, root, keys, (self._part,), DEFAULT_CLASS, now
        )

    def _planned(self, location: FrameLocation, slots: U32Array, keys: bytes) -> Iterator[FrameRead]:
        part, count = self._part, len(slots)
        step = max(1, READ_BYTES // part.stride_bytes)
        for first in range(0, count, step):
            some = keys[first * HASH_BYTES : (first + step) * HASH_BYTES]
            into = self._arena.images(slots[first : first + step], stride_pages=part.stride_pages)
            yield FrameRead(location, count, (part,), 0, first, some, into)

    def read_all(self) -> None:
        """Read every record into its slot and check it.

        Errors: TierUnavailable when one of them is not intact.
        """
        for future in self._tier.read_into(self._reads):
            result = future.result(WAIT_SECONDS)
            if result.reason is not None:
                detail = f"{result.reason} {result.detail}"
                raise TierUnavailable(f"a read ended after {result.good} records: {detail}")

    def seconds_of_one(self, *, window_seconds: float) -> float:
        """Read everything again and again for a while; returns the seconds that one pass takes."""
        passes, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < window_seconds or not passes:
            self.read_all()
            passes += 1
        return spent / passes

    @property
    def segment_files(self) -> list[Path]:
        """The files that hold the frame."""
        return sorted((self._directory / "segments").glob("*.seg"))

    @property
    def has_huge_pages(self) -> bool:
        """Whether most of the arena is backed by huge pages."""
        facts = self._arena.facts()
        offered = facts.huge_pages in ("always", "within_size")
        return offered or facts.huge_bytes > facts.total_bytes // 2
