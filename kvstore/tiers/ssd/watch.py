"""A file system whose calls the health knows of while they are under way, so that a disk that hangs shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.tiers.fs import FileStat, FileSystem
from kvstore.tiers.ssd.health import Health


class WatchedFileSystem:
    """Hands every call on. `close` is not watched: nothing is decided by it."""

    def __init__(self, fs: FileSystem, health: Health) -> None:
        self._fs = fs
        self._health = health

    def open(self, path: Path, *, flags: int) -> int:
        """Open a file."""
        with self._health.watching("open"):
            return self._fs.open(path, flags=flags)

    def close(self, handle: int) -> None:
        """Close a handle."""
        self._fs.close(handle)

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write buffers."""
        with self._health.watching("write"):
            return self._fs.pwritev(handle, buffers, offset)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers."""
        with self._health.watching("read"):
            return self._fs.preadv(handle, buffers, offset)

    def fdatasync(self, handle: int) -> None:
        """Sync a file."""
        with self._health.watching("sync"):
            self._fs.fdatasync(handle)

    def fsync_directory(self, path: Path) -> None:
        """Sync the names in a directory."""
        with self._health.watching("sync"):
            self._fs.fsync_directory(path)

    def truncate(self, handle: int, length_bytes: int) -> None:
        """Set the length of a file."""
        with self._health.watching("truncate"):
            self._fs.truncate(handle, length_bytes)

    def punch(self, handle: int, offset: int, *, length_bytes: int) -> bool:
        """Give a range back."""
        with self._health.watching("punch"):
            return self._fs.punch(handle, offset, length_bytes=length_bytes)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file."""
        with self._health.watching("rename"):
            self._fs.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        with self._health.watching("unlink"):
            self._fs.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make a directory and its parents."""
        with self._health.watching("mkdir"):
            self._fs.mkdir(path)

    def listdir(self, path: Path) -> list[str]:
        """Return the names in a directory."""
        with self._health.watching("list"):
            return self._fs.listdir(path)

    def stat(self, path: Path) -> FileStat:
        """Return length and allocation by name."""
        with self._health.watching("stat"):
            return self._fs.stat(path)

    def fstat(self, handle: int) -> FileStat:
        """Return length and allocation by handle."""
        with self._health.watching("stat"):
            return self._fs.fstat(handle)

    def free_bytes(self, path: Path) -> int:
        """Return the free space."""
        with self._health.watching("stat"):
            return self._fs.free_bytes(path)
