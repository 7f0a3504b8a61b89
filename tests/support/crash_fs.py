"""A file system in memory that forgets what was not synced: what a power loss leaves, or a bad disk says.

What was not synced survives sector by sector, name by name and directory by directory, as the seed decides,
and in any order.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.tiers.fs import FileStat
from kvstore.types import PAGE_BYTES

SECTOR_BYTES = 512
DISK_BYTES = 1 << 30


class Crashed(BaseException):
    """The power is gone. No `except Exception` may swallow it."""


@dataclass(slots=True)
class _Inode:
    """A file: its bytes as a program sees them, as they are on the platter, and what was changed in between.

    `dirty` are (offset, bytes) of writes and (length, None) of truncations, in order.
    """

    live: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    dirty: list[tuple[int, bytes | None]] = field(default_factory=list)
    holes: set[int] = field(default_factory=set)


class CrashFileSystem:
    """Keeps what was synced, and of the rest a share that the seed decides, sector by sector.

    `before` is told the name of each call before it is made; it may raise OSError (a fault) or Crashed.
    After a crash every call raises Crashed until `reboot` returns the file system that the next start finds.
    Threads: one caller at a time is enough for tests; the interpreter's lock keeps single calls whole.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.calls = 0
        self.before: Callable[[str], None] = lambda name: None
        self.disk_bytes = DISK_BYTES
        self._random = random.Random(seed)
        self._names: dict[Path, _Inode] = {}
        self._durable_names: dict[Path, _Inode] = {}
        self._directories: set[Path] = set()
        self._durable_directories: set[Path] = set()
        self._handles: dict[int, _Inode] = {}
        self._next_handle = 1000
        self._is_down = False

    def _enter(self, name: str) -> None:
        if self._is_down:
            raise Crashed
        self.calls += 1
        try:
            self.before(name)
        except Crashed:
            self._is_down = True
            raise

    @property
    def is_down(self) -> bool:
        """Whether the plug has been pulled."""
        return self._is_down

    def crash(self) -> None:
        """Pull the plug now."""
        self._is_down = True

    def crash_at(self, call: int) -> None:
        """Pull the plug before the call with this number, counted from 1."""

        def before(name: str) -> None:
            if self.calls == call:
                raise Crashed

        self.before = before

    def reboot(self) -> CrashFileSystem:
        """Return what is left after a crash, as a new file system."""
        self._is_down = True
        left = CrashFileSystem(seed=self._random.randrange(1 << 30))
        names = dict(self._durable_names)
        for path in sorted(set(self._names) | set(self._durable_names)):
            # A name that was not synced may or may not have made it.
            if self._names.get(path) is not self._durable_names.get(path) and self._random.random() < 0.5:
                if path in self._names:
                    names[path] = self._names[path]
                else:
                    names.pop(path, None)
        left._directories = self._surviving_directories()
        left._durable_directories = set(left._directories)
        for path, inode in names.items():
            if path.parent not in left._directories:
                continue
            content = self._survivor(inode)
            left._names[path] = _Inode(content, bytearray(content), holes=set(inode.holes))
        left._durable_names = dict(left._names)
        return left

    def _surviving_directories(self) -> set[Path]:
        kept: set[Path] = set()
        for path in sorted(self._directories):
            is_root = path.parent == path
            is_kept = path in self._durable_directories or self._random.random() < 0.5
            if is_root or (path.parent in kept and is_kept):
                kept.add(path)
        return kept

    def _survivor(self, inode: _Inode) -> bytearray:
        content = bytearray(inode.durable)
        changes = list(inode.dirty)
        if self._random.random() < 0.5:
            self._random.shuffle(changes)
        for offset, data in changes:
            if data is None:
                if self._random.random() < 0.5:
                    _resize(content, offset)
                continue
            for start in range(0, len(data), SECTOR_BYTES):
                if self._random.random() < 0.5:
                    _put(content, offset + start, data[start : start + SECTOR_BYTES])
        return content

    def open(self, path: Path, *, flags: int) -> int:
        """Open a file, creating it on request."""
        self._enter("open")
        inode = self._names.get(path)
        if inode is None:
            if path.parent not in self._directories:
                raise FileNotFoundError(errno.ENOENT, "no such directory", str(path.parent))
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            inode = self._names[path] = _Inode()
        elif flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "is there", str(path))
        if flags & os.O_TRUNC and inode.live:
            _resize(inode.live, 0)
            inode.dirty.append((0, None))
        self._next_handle += 1
        self._handles[self._next_handle] = inode
        return self._next_handle

    def close(self, handle: int) -> None:
        """Close a handle; also a crashed program's are closed."""
        self._handles.pop(handle, None)

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write into memory only."""
        self._enter("pwritev")
        data = b"".join(buffers)
        inode = self._handles[handle]
        _put(inode.live, offset, data)
        inode.dirty.append((offset, data))
        inode.holes -= set(range(offset // PAGE_BYTES, -(-(offset + len(data)) // PAGE_BYTES)))
        return len(data)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read what the program sees."""
        self._enter("preadv")
        inode = self._handles[handle]
        came = 0
        for buffer in buffers:
            piece = inode.live[offset + came : offset + came + buffer.nbytes]
            buffer[: len(piece)] = piece
            came += len(piece)
        return came

    def fdatasync(self, handle: int) -> None:
        """Make the content durable."""
        self._enter("fdatasync")
        inode = self._handles[handle]
        inode.durable = bytearray(inode.live)
        inode.dirty.clear()

    def fsync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        self._enter("fsync_directory")
        for name in [p for p in self._durable_names if p.parent == path and p not in self._names]:
            del self._durable_names[name]
        self._durable_names.update({p: inode for p, inode in self._names.items() if p.parent == path})
        self._durable_directories |= {p for p in self._directories if p.parent == path}

    def truncate(self, handle: int, length_bytes: int) -> None:
        """Set the length in memory."""
        self._enter("truncate")
        inode = self._handles[handle]
        _resize(inode.live, length_bytes)
        inode.dirty.append((length_bytes, None))

    def punch(self, handle: int, offset: int, *, length_bytes: int) -> bool:
        """Make a hole, at once and for good."""
        self._enter("punch")
        inode = self._handles[handle]
        zeros = bytes(length_bytes)
        _put(inode.live, offset, zeros)
        inode.dirty.append((offset, zeros))
        inode.holes |= set(range(offset // PAGE_BYTES, (offset + length_bytes) // PAGE_BYTES))
        return True

    def rename(self, source: Path, target: Path) -> None:
        """Rename in memory."""
        self._enter("rename")
        self._names[target] = self._names.pop(source)

    def unlink(self, path: Path) -> None:
        """Remove a name in memory."""
        self._enter("unlink")
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        del self._names[path]

    def mkdir(self, path: Path) -> None:
        """Make a directory and its parents in memory."""
        self._enter("mkdir")
        self._directories |= {path, *path.parents}

    def listdir(self, path: Path) -> list[str]:
        """Return the names in a directory."""
        self._enter("listdir")
        found = {p.name for p in [*self._names, *self._directories] if p.parent == path and p != path}
        return sorted(found)

    def stat(self, path: Path) -> FileStat:
        """Return length and allocation by name."""
        self._enter("stat")
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return _stat(self._names[path])

    def fstat(self, handle: int) -> FileStat:
        """Return length and allocation by handle."""
        self._enter("fstat")
        return _stat(self._handles[handle])

    def free_bytes(self, path: Path) -> int:
        """Return what is left of the disk."""
        self._enter("free_bytes")
        return self.disk_bytes - sum(_stat(inode).allocated_bytes for inode in self._names.values())


def _stat(inode: _Inode) -> FileStat:
    pages = -(-len(inode.live) // PAGE_BYTES)
    holes = sum(1 for page in inode.holes if page < pages)
    return FileStat(len(inode.live), (pages - holes) * PAGE_BYTES)


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _resize(content: bytearray, length: int) -> None:
    if length < len(content):
        del content[length:]
    else:
        content.extend(bytes(length - len(content)))
