"""A data directory of many blocks, made without their bytes: real segments, headers and index rows, and holes
in the place of the records. What starts on it is the daemon as it is, by its ordinary recovery.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.bench import prompt
from kvstore.clock import SystemClock
from kvstore.hashing import chain_root
from kvstore.namespace import Namespace
from kvstore.retention import DEFAULT_CLASS
from kvstore.tiers.base import FrameHeader, FrameKind, FrameLocation, FrameWrite
from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.ssd.directory import DataDirectory, prepare, write_namespace, write_store_id
from kvstore.tiers.ssd.format import (
    ID_BYTES,
    SegmentHeader,
    encode_frame,
    encode_seal,
    encode_segment,
    frame_bytes,
    header_bytes,
)
from kvstore.tiers.ssd.index import FIRST_OFFSET, INDEX_BYTES_MAX, Change, Growth, Index
from kvstore.tiers.ssd.index_rows import FrameRow, row_of_header
from kvstore.types import HASH_BYTES, BlockHash, key_at, key_count

SEGMENT_BYTES = 256 << 20
ROWS_PER_COMMIT = 8192
WRITTEN_APART_SECONDS = 0.001
"""No two runs were written at the same time: neighbours in a chain then differ in state and stay apart,
which is the dearest case for the index.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """How long runs are and how they hang together.

    A conversation is a first run and runs that follow one another; `branch_share` of those follow a block
    inside an earlier one. Lengths are lognormal. Units: blocks.
    """

    name: str
    first_median: float
    first_sigma: float
    next_median: float
    next_sigma: float
    runs: int
    branch_share: float

    def lengths(self, random: np.random.Generator, *, blocks_max: int) -> Iterator[int]:
        """Yield the lengths of the runs of one conversation."""
        for number in range(self.runs):
            median, sigma = (
                (self.next_median, self.next_sigma) if number else (self.first_median, self.first_sigma)
            )
            yield max(1, min(blocks_max, round(float(random.lognormal(np.log(median), sigma)))))


AGENT = Shape("coding agents", 430, 1.7, 11.5, 1.8, runs=64, branch_share=0.066)
"""As cc_dev, a trace of 504 coding-agent sessions: long first runs, many short ones after them; mean 64."""
CHAT = Shape("chat", 12, 0.8, 10, 0.8, runs=6, branch_share=0.02)
"""A few turns of about 15 blocks each."""


@dataclass(slots=True)
class Filled:
    """What a directory was filled with; `sample` are the keys of the first conversation's first run."""

    blocks: int = 0
    runs: int = 0
    segments: int = 0
    sample: bytes = b""


def fill(
    path: Path, *, blocks: int, shape: Shape, seed: int = 1, tell: Callable[[str], None] = lambda _: None
) -> Filled:
    """Fill a data directory that is not there yet with so many blocks, and an index that knows all of them.

    The blocks are those of `prompt.block_major("filled")`.
    """
    namespace = prompt.block_major("filled")
    fs, directory = OsFileSystem(), DataDirectory(path)
    prepare(fs, directory)
    identity = secrets.token_bytes(ID_BYTES)
    now = SystemClock().wall()
    write_store_id(fs, directory, identity=identity, created_at=now)
    write_namespace(fs, directory, namespace=namespace)
    index = Index(directory.index, store=identity, bytes_max=INDEX_BYTES_MAX, create=True)
    try:
        writer = _Writer(directory, index, identity)
        for header in _headers(namespace, shape, blocks=blocks, seed=seed, end=now - 60.0):
            writer.append(header)
            if not writer.filled.runs % 4096:
                tell(f"{shape.name}: writing headers of {writer.filled.blocks:,} of {blocks:,} blocks")
        return writer.finish()
    finally:
        index.close()


def _headers(
    namespace: Namespace, shape: Shape, *, blocks: int, seed: int, end: float
) -> Iterator[FrameHeader]:
    random = np.random.default_rng(seed)
    root, parts = chain_root(namespace.fingerprint), namespace.layout.parts
    longest = (SEGMENT_BYTES - (4 << 20)) // parts[0].stride_bytes
    made = number = 0
    while made < blocks:
        tails: list[bytes] = []
        parent = root
        for length in shape.lengths(random, blocks_max=longest):
            count = min(length, blocks - made)
            if tails and random.random() < shape.branch_share:
                inside = tails[int(random.integers(len(tails)))]
                parent = key_at(inside, int(random.integers(key_count(inside))))
            keys = random.bytes(count * HASH_BYTES)
            written_at = end - 3600.0 + number * WRITTEN_APART_SECONDS
            yield FrameHeader(
                namespace.fingerprint, FrameKind.MAIN, parent, keys, parts, DEFAULT_CLASS, written_at
            )
            tails.append(keys)
            parent = BlockHash(keys[-HASH_BYTES:])
            made, number = made + count, number + 1
            if made >= blocks:
                return


class _Writer:
    """Appends frames to segments, and their rows to the index."""

    def __init__(self, directory: DataDirectory, index: Index, store: bytes) -> None:
        self.filled = Filled()
        self._directory, self._index, self._store = directory, index, store
        self._file = -1
        self._number = 0
        self._identity = b""
        self._end = SEGMENT_BYTES
        self._rows: list[FrameRow] = []
        self._change = Change()
        self._waiting = 0

    def append(self, header: FrameHeader) -> None:
        """Write the header of a frame; its records are a hole."""
        length = frame_bytes(header)
        if self._end + length > SEGMENT_BYTES:
            self._seal()
            self._begin()
        frame = FrameWrite(header, (), f"{header.retention_class}-filled")
        pages = encode_frame(frame, segment_id=self._identity, sequence=len(self._rows))
        os.pwrite(self._file, pages, self._end)
        head = header_bytes(key_count(header.keys), parts=len(header.parts))
        self._rows.append(row_of_header(header, FrameLocation(self._number, self._end, head, length)))
        self._end += length
        self.filled.sample = self.filled.sample or header.keys
        self.filled.runs += 1
        self.filled.blocks += key_count(header.keys)

    def _begin(self) -> None:
        self._number += 1
        self._identity = secrets.token_bytes(ID_BYTES)
        self._file = os.open(self._directory.segment_path(self._number), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        created_at = SystemClock().wall()
        page = SegmentHeader(self._number, self._identity, self._store, "filled", created_at)
        os.pwrite(self._file, encode_segment(page), 0)
        self._end, self._rows = FIRST_OFFSET, []
        self.filled.segments += 1

    def _seal(self) -> None:
        if self._file < 0:
            return
        seal = encode_seal(
            segment_id=self._identity, frames=len(self._rows), end=self._end, sealed_at=SystemClock().wall()
        )
        os.pwrite(self._file, seal, self._end)
        os.close(self._file)
        self._file = -1
        growth = Growth(self._number, self._identity, FIRST_OFFSET, self._end, tuple(self._rows), sealed=True)
        self._change.growths.append(growth)
        self._waiting += len(self._rows)
        if self._waiting >= ROWS_PER_COMMIT:
            self._commit()

    def _commit(self) -> None:
        self._index.commit(self._change, next_number=self._number + 1)
        self._change, self._waiting = Change(), 0

    def finish(self) -> Filled:
        """Seal the last segment; its rows too are in the index then."""
        self._seal()
        self._commit()
        return self.filled
