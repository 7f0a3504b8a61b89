"""What the machine and its container allow: memory and what is left of it, mounts and their huge pages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 control groups write a number near 2^63 for "no limit"."""


class HugePages(StrEnum):
    """The `huge=` option of a tmpfs mount."""

    ALWAYS = "always"
    WITHIN_SIZE = "within_size"
    ADVISE = "advise"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory as this process may use it; `limit_source` names what limits it: MemTotal or a control group."""

    memory_limit_bytes: int
    memory_room_bytes: int
    limit_source: str

    @staticmethod
    def read(root: Path = Path("/")) -> Machine:
        """Read /proc and the control groups (versions 1 and 2) below `root`.

        `memory_room_bytes` is what can still be allocated on the machine and in every group of this process;
        page cache that the kernel would drop counts as room.
        """
        info = _meminfo(root)
        limit, room, source = info["MemTotal"], info.get("MemAvailable", info["MemTotal"]), "MemTotal"
        for group in _memory_groups(root):
            allowed = group.limit_bytes()
            if allowed is None:
                continue
            room = min(room, max(0, allowed - group.used_bytes()))
            if allowed < limit:
                limit, source = allowed, f"control group {group.directory}"
        return Machine(limit, room, source)


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that holds a path. Units: free_bytes is what this user may still allocate."""

    point: str
    kind: str
    options: tuple[str, ...]
    total_bytes: int
    free_bytes: int

    @staticmethod
    def of(path: str | Path) -> Mount:
        """Look up the mount of an existing path.

        Errors: OSError when the path does not exist.
        """
        real = Path(path).resolve(strict=True)
        stats = os.statvfs(real)
        best = _MountLine("", "/", "unknown", ())
        for line in _mount_lines(Path("/")):
            point = Path(line.point)
            # Of several mounts on one point the last one listed is the visible one.
            if (point == real or point in real.parents) and len(line.point) >= len(best.point):
                best = line
        free = stats.f_bavail * stats.f_frsize
        return Mount(best.point, best.kind, best.options, stats.f_blocks * stats.f_frsize, free)

    @property
    def is_memory(self) -> bool:
        """Whether its files live in memory."""
        return self.kind in ("tmpfs", "ramfs", "hugetlbfs")

    @property
    def huge_pages(self) -> HugePages:
        """The mount's huge page policy; the kernel-wide `shmem_enabled` can overrule it."""
        for option in self.options:
            if option.startswith("huge="):
                return HugePages(option.removeprefix("huge="))
        return HugePages.NEVER


def shmem_enabled(root: Path = Path("/")) -> str:
    """Return the kernel's policy for shared memory (`deny` and `force` overrule mounts); empty if unknown."""
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


@dataclass(frozen=True, slots=True)
class _MountLine:
    root: str
    point: str
    kind: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    """One directory of the memory controller; `version` 1 or 2 decides the names of its files."""

    directory: Path
    version: int

    def limit_bytes(self) -> int | None:
        """Return the limit, None where there is none."""
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        values = [value for name in names if (value := _number(self.directory / name)) is not None]
        return min((value for value in values if value < _UNLIMITED), default=None)

    def used_bytes(self) -> int:
        """Return what cannot be reclaimed: the usage less inactive page cache."""
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        key = "inactive_file" if self.version == 2 else "total_inactive_file"
        used = _number(self.directory / name) or 0
        try:
            lines = (self.directory / "memory.stat").read_text().splitlines()
        except OSError:
            return used
        cache = sum(int(value) for name, _, value in (line.partition(" ") for line in lines) if name == key)
        return max(0, used - cache)


def _memory_groups(root: Path) -> Iterator[_MemoryGroup]:
    """Yield the groups that hold this process, innermost first, up to the mount of the controller."""
    mounts = _mount_lines(root)
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            is_match = (
                mount.kind == "cgroup2"
                if version == 2
                else mount.kind == "cgroup" and "memory" in mount.options
            )
            if is_match:
                yield from _groups_below(root / mount.point.lstrip("/"), path, mount.root, version)
                break


def _groups_below(mount: Path, path: str, mount_root: str, version: int) -> Iterator[_MemoryGroup]:
    # Inside a container the mount may show a subtree: its root is then a prefix of our path, or unrelated.
    inner = path.removeprefix(mount_root) if mount_root != "/" else path
    directory = mount / inner.lstrip("/")
    if not directory.is_dir():
        directory = mount
    while True:
        yield _MemoryGroup(directory, version)
        if directory == mount:
            return
        directory = directory.parent


def _mount_lines(root: Path) -> list[_MountLine]:
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        front, _, back = line.partition(" - ")
        fields, tail = front.split(), back.split()
        if len(fields) < 5 or not tail:
            continue
        options = tail[2].split(",") if len(tail) > 2 else []
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])  # a blank is \040
        found.append(_MountLine(fields[3], point, tail[0], tuple(options)))
    return found


def _meminfo(root: Path) -> dict[str, int]:
    found = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # ValueError: version 2 writes "max"
        return None
