"""A file system over another one that fails, stops short, hangs or rots, by operation and path."""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.tiers.fs import FileStat, FileSystem, OsFileSystem

HANG_SECONDS_MAX = 60.0
"""A call that hangs is let go after so long, so that a test that forgets it comes to its end."""


@dataclass(slots=True)
class Rule:
    """What befalls calls of some operations on some paths: after `after` of them, `times` of them.

    `go` lets calls that hang go on; `limit_bytes` is the most that one read or write takes.
    """

    operations: str
    path: str
    code: int = 0
    times: int = 1 << 60
    after: int = 0
    hangs: bool = False
    limit_bytes: int = 0
    go: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)

    def applies(self, operation: str, path: Path) -> bool:
        """Say whether this call is one of those, and count it."""
        if operation not in self.operations.split() and self.operations != "*":
            return False
        if not fnmatch.fnmatch(str(path), self.path):
            return False
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return self.times >= 0


class FaultFileSystem:
    """Hands calls on, unless a rule says otherwise. Operations are named as the methods are.

    `faults` counts what rules did. Threads: as the file system below; rules are made by one thread.
    """

    def __init__(self, fs: FileSystem | None = None) -> None:
        self.fs: FileSystem = fs or OsFileSystem()
        self.rules: list[Rule] = []
        self.faults = 0
        self.reads: list[Path] = []
        self._flips: dict[Path, dict[int, int]] = {}
        self._paths: dict[int, Path] = {}

    def fail(
        self, operations: str, *, path: str = "*", code: int = errno.EIO, times: int = 1 << 60, after: int = 0
    ) -> Rule:
        """Let calls fail."""
        return self._rule(Rule(operations, path, code=code, times=times, after=after))

    def hang(self, operations: str = "*", *, path: str = "*") -> Rule:
        """Let calls not return until the rule's `go` is set."""
        return self._rule(Rule(operations, path, hangs=True))

    def shorten(self, operations: str, limit_bytes: int, *, path: str = "*", times: int = 1 << 60) -> Rule:
        """Let reads or writes take a part only."""
        return self._rule(Rule(operations, path, limit_bytes=limit_bytes, times=times))

    def flip(self, path: Path, offset: int, *, bits: int = 0x40) -> None:
        """Let a byte of a file be read wrong for good."""
        self._flips.setdefault(path, {})[offset] = bits

    def heal(self) -> None:
        """Forget all rules and flips, and let go what hangs."""
        rules, self.rules = self.rules, []
        for rule in rules:
            rule.go.set()
        self._flips.clear()

    def _rule(self, rule: Rule) -> Rule:
        self.rules.append(rule)
        return rule

    def _enter(self, operation: str, path: Path) -> int:
        """Do what the rules say; returns how many bytes the call may take, 0 for all."""
        for rule in list(self.rules):
            if not rule.applies(operation, path):
                continue
            self.faults += 1
            rule.arrived.set()
            if rule.hangs:
                rule.go.wait(HANG_SECONDS_MAX)
            elif rule.code:
                raise OSError(rule.code, os.strerror(rule.code), str(path))
            else:
                return rule.limit_bytes
        return 0

    def open(self, path: Path, *, flags: int) -> int:
        """Open a file."""
        self._enter("open", path)
        handle = self.fs.open(path, flags=flags)
        self._paths[handle] = path
        return handle

    def close(self, handle: int) -> None:
        """Close a handle."""
        self._paths.pop(handle, None)
        self.fs.close(handle)

    def pwritev(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write, or a part."""
        limit = self._enter("pwritev", self._paths[handle])
        return self.fs.pwritev(handle, _first(buffers, limit), offset)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read, or a part, with bits flipped."""
        path = self._paths[handle]
        limit = self._enter("preadv", path)
        self.reads.append(path)
        came = self.fs.preadv(handle, _first(buffers, limit), offset)
        for at, bits in self._flips.get(path, {}).items():
            where = at - offset
            for view in buffers:
                if 0 <= where < view.nbytes and at < offset + came:
                    view[where] ^= bits
                    self.faults += 1
                where -= view.nbytes
        return came

    def fdatasync(self, handle: int) -> None:
        """Sync a file."""
        self._enter("fdatasync", self._paths[handle])
        self.fs.fdatasync(handle)

    def fsync_directory(self, path: Path) -> None:
        """Sync the names in a directory."""
        self._enter("fsync_directory", path)
        self.fs.fsync_directory(path)

    def truncate(self, handle: int, length_bytes: int) -> None:
        """Set the length of a file."""
        self._enter("truncate", self._paths[handle])
        self.fs.truncate(handle, length_bytes)

    def punch(self, handle: int, offset: int, *, length_bytes: int) -> bool:
        """Give a range back; EOPNOTSUPP means that holes cannot be made."""
        try:
            self._enter("punch", self._paths[handle])
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return False
            raise
        return self.fs.punch(handle, offset, length_bytes=length_bytes)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file."""
        self._enter("rename", target)
        self.fs.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        self._enter("unlink", path)
        self.fs.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make a directory."""
        self._enter("mkdir", path)
        self.fs.mkdir(path)

    def listdir(self, path: Path) -> list[str]:
        """Return the names in a directory."""
        self._enter("listdir", path)
        return self.fs.listdir(path)

    def stat(self, path: Path) -> FileStat:
        """Return length and allocation by name."""
        self._enter("stat", path)
        return self.fs.stat(path)

    def fstat(self, handle: int) -> FileStat:
        """Return length and allocation by handle."""
        self._enter("fstat", self._paths[handle])
        return self.fs.fstat(handle)

    def free_bytes(self, path: Path) -> int:
        """Return the free space."""
        self._enter("free_bytes", path)
        return self.fs.free_bytes(path)


def _first(buffers: Sequence[memoryview], limit: int) -> Sequence[memoryview]:
    """Return views of the first `limit` bytes; 0 stands for all."""
    if not limit:
        return buffers
    kept: list[memoryview] = []
    for view in buffers:
        if limit <= 0:
            break
        kept.append(view[:limit])
        limit -= view.nbytes
    return kept
