"""Opens the index at a start, or has it rebuilt: by its own word, by a mark, or because it ended starts."""

from __future__ import annotations

import logging
from contextlib import suppress

from kvstore.errors import TierUnavailable
from kvstore.tiers.fs import FileSystem
from kvstore.tiers.ssd.directory import (
    READING_NAME,
    STALE_NAME,
    DataDirectory,
    distrust_index,
    read_small,
    write_durable,
)
from kvstore.tiers.ssd.index import Index
from kvstore.tiers.ssd.index_rows import IndexUnusable

log = logging.getLogger(__name__)

DEATHS_MAX = 2


def open_index(
    fs: FileSystem, directory: DataDirectory, *, store: bytes, bytes_max: int
) -> tuple[Index, bool]:
    """Return the index, and whether one that cannot be trusted was put aside for an empty one.

    Errors: OSError, TierUnavailable when none can be created.
    """
    reason = _begin_reading(fs, directory)
    if not reason:
        try:
            index = Index(directory.index, store=store, bytes_max=bytes_max, create=False)
        except IndexUnusable as error:
            reason = str(error)
        else:
            index.forget_broken()
            return index, False
    is_there = directory.index.exists()
    if is_there:
        log.warning("index is rebuilt from the segments reason=%s", reason)
    try:
        return Index.rebuilt(directory.index, store=store, bytes_max=bytes_max), is_there
    except (IndexUnusable, OSError) as error:
        raise TierUnavailable(f"{directory.index} cannot be created: {error}; is the disk full?") from error


def _begin_reading(fs: FileSystem, directory: DataDirectory) -> str:
    """Note that the index is being read from now on; returns why it must not be, or an empty string.

    LMDB has no checksums: damaged pages can end the process. Starts that died while they read the index are
    counted, and after two of them it is rebuilt.
    """
    reading = directory.root / READING_NAME
    deaths = 0
    with suppress(FileNotFoundError, ValueError):
        deaths = int(read_small(fs, reading))
    try:
        write_durable(fs, reading, content=str(deaths + 1).encode())
    except OSError as error:
        # A full disk must not keep what is stored on it from being served.
        log.warning("this start is not counted error=%s", error)
    if deaths >= DEATHS_MAX:
        return f"{deaths} starts ended while they read it"
    try:
        fs.stat(directory.root / STALE_NAME)
    except FileNotFoundError:
        return ""
    return "it was marked as not to be trusted"


def end_reading(fs: FileSystem, directory: DataDirectory, *, is_damaged: bool) -> None:
    """Note that the index was read to its end; one that turned out damaged is rebuilt by the next start.

    Errors: OSError.
    """
    if is_damaged:
        distrust_index(fs, directory)
    else:
        with suppress(FileNotFoundError):
            fs.unlink(directory.root / STALE_NAME)
    with suppress(FileNotFoundError):
        fs.unlink(directory.root / READING_NAME)
    # Else power losses much later would count as starts that died.
    fs.fsync_directory(directory.root)
