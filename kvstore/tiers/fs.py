"""The file-system seam: the few calls of a disk tier, so that crashes and faults can be put underneath."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore.types import PAGE_BYTES, round_up

IOVECS_MAX = 1024
"""Linux takes at most this many buffers in one preadv or pwritev."""
_STAT_BLOCK_BYTES = 512
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


@dataclass(frozen=True, slots=True)
class FileStat:
    """Length of a file and the bytes that the file system has given it; a hole has length but no bytes."""

    size_bytes: int
    allocated_bytes: int


class FileSystem(Protocol):
    """What a disk tier needs from a file system. Every call may raise OSError.

    Threads: all calls are thread-safe; positional reads and writes share no file position.
    """

    def open(self, path: Path, *, flags: int) -> int:
        """Open a file and return its handle; O_CREAT makes it readable by its owner and group."""
        ...

    def close(self, handle: int) -> None:
        """Close a handle."""
        ...

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write buffers one after the other at an offset; returns how many bytes were taken."""
        ...

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers one after the other from an offset; returns how many bytes came, fewer at the end."""
        ...

    def fdatasync(self, handle: int) -> None:
        """Return when the content of the file, and its length, would survive a power loss."""
        ...

    def fsync_directory(self, path: Path) -> None:
        """Return when the names in a directory would survive a power loss."""
        ...

    def truncate(self, handle: int, length_bytes: int) -> None:
        """Set the length of a file."""
        ...

    def punch(self, handle: int, offset: int, *, length_bytes: int) -> bool:
        """Give a range back; it then reads as zeros. Returns False where holes cannot be made."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing the target."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        ...

    def mkdir(self, path: Path) -> None:
        """Make a directory and its parents; fine when it is there."""
        ...

    def listdir(self, path: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        ...

    def stat(self, path: Path) -> FileStat:
        """Return length and allocation by name."""
        ...

    def fstat(self, handle: int) -> FileStat:
        """Return length and allocation by handle."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Return what an unprivileged process may still write below a directory."""
        ...


class OsFileSystem:
    """The machine's file system."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    def open(self, path: Path, *, flags: int) -> int:
        """Open a file; never inherited by a child process."""
        return os.open(path, flags | os.O_CLOEXEC, 0o640)

    def close(self, handle: int) -> None:
        """Close a handle."""
        os.close(handle)

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Call pwritev once."""
        return os.pwritev(handle, buffers, offset)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Call preadv once."""
        return os.preadv(handle, buffers, offset)

    def fdatasync(self, handle: int) -> None:
        """Call fdatasync."""
        os.fdatasync(handle)

    def fsync_directory(self, path: Path) -> None:
        """Call fsync on the directory."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def truncate(self, handle: int, length_bytes: int) -> None:
        """Call ftruncate."""
        os.ftruncate(handle, length_bytes)

    def punch(self, handle: int, offset: int, *, length_bytes: int) -> bool:
        """Call fallocate with PUNCH_HOLE; the standard library has no binding for it."""
        if self._libc.fallocate(handle, _PUNCH_HOLE_KEEP_SIZE, offset, length_bytes) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise OSError(code, os.strerror(code))

    def rename(self, source: Path, target: Path) -> None:
        """Call rename."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Call unlink."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make a directory and its parents."""
        path.mkdir(mode=0o750, parents=True, exist_ok=True)

    def listdir(self, path: Path) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(os.listdir(path))

    def stat(self, path: Path) -> FileStat:
        """Call stat."""
        return _file_stat(os.stat(path))

    def fstat(self, handle: int) -> FileStat:
        """Call fstat."""
        return _file_stat(os.fstat(handle))

    def free_bytes(self, path: Path) -> int:
        """Call statvfs."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


def _file_stat(found: os.stat_result) -> FileStat:
    return FileStat(found.st_size, found.st_blocks * _STAT_BLOCK_BYTES)


def aligned_buffer(size_bytes: int) -> memoryview:
    """Return zeroed private memory that starts on a page, as direct I/O wants it; whole pages."""
    return memoryview(mmap.mmap(-1, round_up(max(size_bytes, 1), PAGE_BYTES)))


def is_aligned(buffer: memoryview) -> bool:
    """Say whether a buffer starts on a page and covers whole pages."""
    address = int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
    return address % PAGE_BYTES == 0 and buffer.nbytes % PAGE_BYTES == 0


def write_all(fs: FileSystem, handle: int, buffers: Sequence[memoryview], *, offset: int) -> None:
    """Write every byte, in as many calls as it takes.

    Errors: OSError; EIO when the file system takes nothing more without saying why.
    """
    rest = list(buffers)
    while rest:
        taken = fs.pwritev(handle, rest[:IOVECS_MAX], offset)
        if taken <= 0:
            raise OSError(errno.EIO, "the file system took no more bytes")
        offset += taken
        rest = _behind(rest, taken)


def read_up_to(fs: FileSystem, handle: int, buffers: Sequence[memoryview], *, offset: int) -> int:
    """Fill buffers in as many calls as it takes; returns how many bytes came, fewer only at the end."""
    total = best = 0
    while rest := _behind(list(buffers), total):
        came = fs.preadv(handle, rest[:IOVECS_MAX], offset + total)
        if came <= 0 or (came % PAGE_BYTES and total + came <= best):
            return max(best, total)
        best = max(best, total + came)
        # Direct I/O cannot go on inside a page: that page is read again, and only if no more comes of it, a
        # read that stopped there has met the end.
        total += came if came == sum(view.nbytes for view in rest) else came - came % PAGE_BYTES
    return total


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[index + 1 :]] if done else buffers[index:]
        done -= buffer.nbytes
    return []
