"""Opening what holds a trace: plain, gzip or zstd text, told by its first bytes; a folder; standard input."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, cast

from kvstore.errors import InvalidArgument

STDIN = Path("-")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@contextmanager
def open_text(path: Path) -> Iterator[tuple[IO[str], Callable[[], int]]]:
    """Open a file, or standard input for `-`, as UTF-8 text; undecodable bytes become bad lines, not errors.
    Beside it comes what tells how many bytes of the file were read.

    Errors: InvalidArgument when it cannot be opened or read, or when zstd is not installed.
    """
    try:
        with _raw(path) as raw, _unpacked(path, raw) as unpacked:
            text = io.TextIOWrapper(cast(IO[bytes], unpacked), encoding="utf-8", errors="replace")
            yield text, raw.tell
    except (OSError, EOFError) as error:
        raise InvalidArgument(f"trace {path}: {getattr(error, 'strerror', None) or error}") from error


def size_of(path: Path) -> int:
    """Return how many bytes a file, a folder or standard input holds, packed as they are."""
    if path == STDIN:
        return len(standard_input())
    return sum(item.stat().st_size for item in (path.iterdir() if path.is_dir() else (path,)))


@contextmanager
def _raw(path: Path) -> Iterator[io.BufferedReader]:
    if path == STDIN:
        yield io.BufferedReader(cast(io.RawIOBase, io.BytesIO(standard_input())))
    else:
        with path.open("rb") as raw:
            yield raw


@cache
def standard_input() -> bytes:
    """Return what standard input holds: it comes once, but a trace is looked at before it is read."""
    return sys.stdin.buffer.read()


@contextmanager
def _unpacked(path: Path, raw: io.BufferedReader) -> Iterator[io.BufferedIOBase]:
    first = raw.peek(len(_ZSTD))[: len(_ZSTD)]
    if first.startswith(_GZIP):
        with gzip.open(raw) as unpacked:
            yield cast(io.BufferedIOBase, unpacked)
    elif first == _ZSTD:
        with _zstd(path, raw) as plain:
            yield plain
    else:
        yield raw


@contextmanager
def _zstd(path: Path, raw: io.BufferedReader) -> Iterator[io.BufferedIOBase]:
    try:
        import zstandard
    except ImportError as error:
        raise InvalidArgument(
            f"trace {path}: zstd needs `pip install 'tiered-kvstore[trace]'`, or unpack it: "
            f"zstd -dc {path} | kvstore ... -"
        ) from error
    reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
    try:
        yield io.BufferedReader(cast(io.RawIOBase, reader))
    except zstandard.ZstdError as error:
        raise InvalidArgument(f"trace {path}: broken zstd: {error}") from error
