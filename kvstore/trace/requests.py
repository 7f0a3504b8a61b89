"""Trace files: one request a line, its blocks as ids. Equal id means equal content and equal prefix.

Formats: Mooncake JSONL (`timestamp` ms, `input_length`, `output_length`, `hash_ids`; Qin et al., FAST'25) and
`kvstore-runs/1` (the same with `hash_runs` [[first id, count], ...] behind a `_meta` line). Plain or gzip.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from kvstore.errors import InvalidArgument
from kvstore.types import HASH_BYTES

MOONCAKE_BLOCK_TOKENS = 512
RUNS_FORMAT = "kvstore-runs/1"
IDS_MAX = 1 << 20
Complain = Callable[[int, str], None]
"""Hears of each line that was skipped: its number and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Units: timestamp in milliseconds; `runs` are (first id, count) in prefix order."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    runs: tuple[tuple[int, int], ...]

    @property
    def blocks(self) -> int:
        """How many blocks the prompt has; the last may be a partial one."""
        return sum(count for _, count in self.runs)

    def keys(self) -> bytes:
        """Return the ids as packed keys, so that the store's own index can hold them."""
        words = np.zeros((self.blocks, HASH_BYTES // 8), np.uint64)
        if self.runs:
            words[:, 0] = np.concatenate([np.arange(a + 1, a + n + 1, dtype=np.uint64) for a, n in self.runs])
        return words.tobytes()


class TraceFile:
    """A trace on disk. `block_tokens` is what the file says, what it implies, or what the caller says."""

    def __init__(self, path: Path, *, block_tokens: int = 0, complain: Complain | None = None) -> None:
        self.path = path
        self.lines_skipped = 0
        self._complain = complain
        self.meta = self._head()
        self.block_tokens = int(block_tokens or self.meta.get("block_size") or MOONCAKE_BLOCK_TOKENS)
        if not 1 <= self.block_tokens <= 1 << 20:
            raise InvalidArgument(f"{path}: block size {self.block_tokens} is outside 1..{1 << 20}")

    def _open(self) -> IO[str]:
        try:
            with self.path.open("rb") as probe:
                is_gzip = probe.read(2) == b"\x1f\x8b"
            return gzip.open(self.path, "rt") if is_gzip else self.path.open()
        except OSError as error:
            raise InvalidArgument(f"trace {self.path}: {error.strerror}") from error

    def _head(self) -> Mapping[str, Any]:
        """Return the facts of the first line: the `_meta` of a runs file, a block size, or nothing."""
        with self._open() as lines:
            first = lines.readline()
        try:
            document = json.loads(first)
        except ValueError as error:
            raise InvalidArgument(f"trace {self.path}: the first line is no JSON: {error}") from error
        if not isinstance(document, dict):
            raise InvalidArgument(f"trace {self.path}: the first line is no JSON object")
        meta = document.get("_meta", document)
        if "_meta" in document and meta.get("format") != RUNS_FORMAT:
            raise InvalidArgument(
                f"trace {self.path}: format {meta.get('format')!r} is unknown, {RUNS_FORMAT} is"
            )
        return {"block_size": meta.get("block_size"), "requests": meta.get("requests")}

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests in file order; a bad line is reported with its number and skipped."""
        self.lines_skipped = 0
        with self._open() as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip() or (number == 1 and '"_meta"' in line):
                    continue
                try:
                    yield _request(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    self._skip(number, f"{type(error).__name__}: {error}")

    def _skip(self, number: int, fault: str) -> None:
        self.lines_skipped += 1
        if self._complain is not None:
            self._complain(number, fault)

    def sorted(self) -> list[TraceRequest]:
        """Return the requests by (timestamp, file order)."""
        return sorted(self, key=lambda request: request.timestamp_ms)


def _request(line: Mapping[str, Any]) -> TraceRequest:
    runs = line["hash_runs"] if "hash_runs" in line else _runs_of(line["hash_ids"])
    pairs = tuple((int(first), int(count)) for first, count in runs)
    if any(first < 0 or count < 1 for first, count in pairs) or sum(count for _, count in pairs) > IDS_MAX:
        raise ValueError(f"ids must be >= 0, runs not empty, and at most {IDS_MAX} in all")
    tokens, output = int(line["input_length"]), int(line.get("output_length") or 0)
    if tokens < 0 or output < 0:
        raise ValueError(f"lengths must be >= 0, got {tokens} and {output}")
    return TraceRequest(int(line["timestamp"]), tokens, output, pairs)


def _runs_of(ids: list[int]) -> list[tuple[int, int]]:
    if not ids:
        return []
    array = np.asarray(ids, dtype=np.int64)
    cuts = np.flatnonzero(np.diff(array) != 1) + 1
    starts = [0, *cuts.tolist()]
    ends = [*cuts.tolist(), len(array)]
    return [(int(array[a]), b - a) for a, b in zip(starts, ends, strict=True)]
