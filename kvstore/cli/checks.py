"""What `doctor` asks of the machine: one function per finding, each with what to do about it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.cli.output import bytes_text
from kvstore.finding import Finding, Level
from kvstore.machine import HugePages, Machine, Mount, shmem_enabled
from kvstore.types import PAGE_BYTES

MIB = 1 << 20
GIB = 1 << 30
ARENA_BYTES_MIN = 64 * MIB
FREE_BYTES_MIN = 4 * GIB
"""The daemon keeps 2 GiB free by default; less than as much again is not worth having."""
SOCKET_PATH_BYTES_MAX = 107
OPEN_FILES_MIN = 1024
EARLIEST_WALL = 1_735_689_600.0
"""2025-01-01: an earlier wall clock is wrong, whatever the time zone."""
NETWORK_FILE_SYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "afs",
    "fuse",
)
VOLATILE_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")
FALLOCATE_KEEP_SIZE, FALLOCATE_PUNCH_HOLE = 1, 2
TIME_ERROR = 5
"""adjtimex's answer when the kernel knows that nothing disciplines the clock."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the daemon keeps things: its data, its arena's mount, its address."""

    data: Path
    shared_memory: Path
    address: str

    @property
    def existing_data(self) -> Path:
        """The data directory, or the nearest parent that is there already."""
        return next(path for path in (self.data, *self.data.parents) if path.exists())


def shared_memory(place: Place) -> Finding:
    """Is there room for an arena worth having?"""
    check = "shared memory"
    try:
        mount = Mount.of(place.shared_memory)
    except OSError as error:
        advice = "mount a tmpfs there (`mount -t tmpfs tmpfs DIR`), or point host.directory at one"
        return Finding(check, Level.PROBLEM, f"{place.shared_memory}: {error.strerror}", advice)
    found = f"{place.shared_memory}: {bytes_text(mount.free_bytes)} free of {bytes_text(mount.total_bytes)}"
    if not os.access(place.shared_memory, os.W_OK):
        return Finding(check, Level.PROBLEM, found + ", not writable", "give this user write access to it")
    if mount.free_bytes < ARENA_BYTES_MIN:
        advice = (
            f"the arena is allocated in full at start and needs {bytes_text(ARENA_BYTES_MIN)} at least: in "
            "Docker `--shm-size 16g`, in Kubernetes an emptyDir of medium Memory, else "
            f"`mount -o remount,size=16g {mount.point}`"
        )
        return Finding(check, Level.PROBLEM, found, advice)
    if not mount.is_memory:
        advice = f"{mount.kind} writes every page to disk too: point host.directory at a tmpfs"
        return Finding(check, Level.NOTE, f"{found}, {mount.kind}", advice)
    return Finding(check, Level.OK, found)


def huge_pages(place: Place) -> Finding:
    """Does the arena's mount give huge pages? SSD reads into them are about 1.4x faster."""
    check = "huge pages"
    mount, policy = Mount.of(place.shared_memory), shmem_enabled()
    if mount.kind == "hugetlbfs" or policy == "force":
        return Finding(check, Level.OK, f"{mount.point} gives huge pages")
    if policy == "deny":
        advice = (
            "`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`: SSD reads up to 1.4x faster"
        )
        return Finding(check, Level.NOTE, "the kernel denies huge pages in shared memory", advice)
    if mount.huge_pages in (HugePages.ALWAYS, HugePages.WITHIN_SIZE):
        return Finding(check, Level.OK, f"{mount.point} is mounted with huge={mount.huge_pages}")
    advice = f"the daemon makes them in the background; `mount -o remount,huge=always {mount.point}` at once"
    return Finding(check, Level.NOTE, f"{mount.point} gives 4 KiB pages", advice)


def memory_limit(place: Place) -> Finding:
    """Does a container limit leave room? An arena counts against it."""
    check = "memory limit"
    machine = Machine.read()
    found = (
        f"{bytes_text(machine.memory_room_bytes)} left of {bytes_text(machine.memory_limit_bytes)} "
        f"({machine.limit_source})"
    )
    if machine.memory_room_bytes < 2 * ARENA_BYTES_MIN:
        advice = (
            f"the arena counts against it: raise the limit, {bytes_text(2 * ARENA_BYTES_MIN)} must be left"
        )
        return Finding(check, Level.PROBLEM, found, advice)
    return Finding(check, Level.OK, found)


def data_directory(place: Place) -> Finding:
    """Can the daemon write its data directory?"""
    check = "data directory"
    base = place.existing_data
    if not os.access(base, os.W_OK | os.X_OK):
        advice = f"`chown $(id -u) {base}`, or point ssd.path at a directory that this user may write"
        return Finding(check, Level.PROBLEM, f"{base} is not writable", advice)
    if base == place.data:
        return Finding(check, Level.OK, f"{place.data} is writable")
    return Finding(check, Level.OK, f"{place.data} will be made in {base}")


def free_space(place: Place) -> Finding:
    """Is there room for segments?"""
    check = "free space"
    usage = os.statvfs(place.existing_data)
    free, total = usage.f_frsize * usage.f_bavail, usage.f_frsize * usage.f_blocks
    found = f"{place.existing_data}: {bytes_text(free)} free of {bytes_text(total)}"
    if free < FREE_BYTES_MIN:
        advice = f"free {bytes_text(FREE_BYTES_MIN)} at least, or point ssd.path at another disk"
        return Finding(check, Level.PROBLEM, found, advice)
    return Finding(check, Level.OK, found)


def file_system(place: Place) -> Finding:
    """Is the index (LMDB) on a local disk? Over a network its locks and its mapping are not safe."""
    check = "index file system"
    mount = Mount.of(place.existing_data)
    found = f"{place.existing_data} is on {mount.kind} ({mount.point})"
    if mount.kind.startswith(NETWORK_FILE_SYSTEMS):
        advice = (
            "put the data directory on a local disk: LMDB's locks and mapping are not safe over a network"
        )
        return Finding(check, Level.PROBLEM, found, advice)
    if mount.kind.startswith(VOLATILE_FILE_SYSTEMS):
        advice = "its content goes away with the machine or container: mount a volume on a local disk there"
        return Finding(check, Level.NOTE, found, advice)
    return Finding(check, Level.OK, found)


def direct_io(place: Place) -> Finding:
    """Does the file system do O_DIRECT, so that the page cache does not take a second copy?"""
    check = "direct I/O"
    try:
        with _scratch(place.existing_data, flags=os.O_DIRECT) as file:
            page = mmap.mmap(-1, PAGE_BYTES)
            page.write(b"kvstore" + bytes(PAGE_BYTES - 7))
            os.pwrite(file.descriptor, page, 0)
            os.preadv(file.descriptor, [page], 0)
    except OSError as error:
        advice = "works, slower and with a second copy in the page cache; ext4 and xfs have it"
        return Finding(check, Level.NOTE, f"{place.existing_data}: no O_DIRECT ({error.strerror})", advice)
    return Finding(check, Level.OK, f"{place.existing_data}: reads and writes of 4 KiB bypass the page cache")


def hole_punching(place: Place) -> Finding:
    """Can bytes be given back from the middle of a segment?"""
    check = "hole punching"
    try:
        with _scratch(place.existing_data) as file:
            os.pwrite(file.descriptor, bytes(16 * PAGE_BYTES), 0)
            os.fsync(file.descriptor)
            before = os.fstat(file.descriptor).st_blocks
            _punch(file.descriptor, offset=0, length=8 * PAGE_BYTES)
            after = os.fstat(file.descriptor).st_blocks
    except OSError as error:
        advice = (
            "deleted blocks keep their room until their whole segment expires; ext4, xfs and btrfs can do it"
        )
        return Finding(check, Level.NOTE, f"{place.existing_data}: {error.strerror}", advice)
    freed = (before - after) * 512
    return Finding(check, Level.OK, f"{place.existing_data}: a hole gave back {bytes_text(freed)}")


def _punch(descriptor: int, *, offset: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    mode = FALLOCATE_KEEP_SIZE | FALLOCATE_PUNCH_HOLE
    if libc.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class _Scratch:
    """A file without a name left behind."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def _scratch(directory: Path, *, flags: int = 0) -> _Scratch:
    descriptor, name = tempfile.mkstemp(prefix=".kvstore-doctor-", dir=directory)
    os.close(descriptor)
    try:
        return _Scratch(os.open(name, os.O_RDWR | flags))
    finally:
        Path(name).unlink()


def clock(place: Place) -> Finding:
    """Is wall time plausible, kept by something, and not behind the data?"""
    check = "clock"
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(now))
    if now < EARLIEST_WALL:
        return Finding(
            check, Level.PROBLEM, f"wall time is {stamp}", "set the clock: TTLs are judged by wall time"
        )
    newest = (
        max((path.stat().st_mtime for path in place.data.glob("*")), default=0.0)
        if place.data.is_dir()
        else 0.0
    )
    if newest > now + 60:
        advice = "set the clock: blocks written in the future would outlive their class"
        return Finding(
            check, Level.PROBLEM, f"wall time is {stamp}, the data is {newest - now:.0f} s newer", advice
        )
    buffer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None).adjtimex(buffer) == TIME_ERROR:
        advice = "run chrony, ntpd or systemd-timesyncd; small errors only shift expiry"
        return Finding(check, Level.NOTE, f"{stamp}; the kernel sees no time synchronisation", advice)
    return Finding(check, Level.OK, f"{stamp}, synchronised")


def open_files(place: Place) -> Finding:
    """May the daemon open enough files? One per segment, and the index."""
    check = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} allowed (hard limit {hard})"
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES_MIN:
        return Finding(
            check, Level.PROBLEM, found, f"allow {OPEN_FILES_MIN} at least: `ulimit -n`, LimitNOFILE="
        )
    return Finding(check, Level.OK, found)


def socket_path(place: Place) -> Finding:
    """Can the daemon's socket be made, and who may use it?"""
    check = "socket"
    if not place.address.startswith("unix:"):
        return Finding(
            check,
            Level.NOTE,
            f"{place.address} is TCP: payload takes the framed path, over server.byte_port",
            "",
        )
    path = Path(place.address.removeprefix("unix:"))
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        found = f"{path} has {len(os.fsencode(path))} bytes, {SOCKET_PATH_BYTES_MAX} fit"
        return Finding(check, Level.PROBLEM, found, "choose a shorter path with --address or KVSTORE_ADDRESS")
    if not path.parent.exists():
        return Finding(check, Level.OK, f"{path.parent} will be made by the daemon, for this user only")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return Finding(check, Level.PROBLEM, f"{path.parent} is not writable", "choose another --address")
    mode = path.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        advice = f"`chmod 700 {path.parent}`: who can replace the socket can pose as the daemon"
        return Finding(check, Level.PROBLEM, f"{path.parent} is writable for everybody", advice)
    return _socket_file(path)


def _socket_file(path: Path) -> Finding:
    if not path.exists():
        return Finding("socket", Level.OK, f"{path.parent} is ready for {path.name}")
    probe = socket.socket(socket.AF_UNIX)
    try:
        probe.connect(str(path))
    except OSError as error:
        if error.errno == errno.EACCES:
            advice = "join the group that owns the socket, or ask the daemon's user (service.group)"
            return Finding("socket", Level.PROBLEM, f"{path}: this user may not connect", advice)
        advice = "left by a daemon that was killed; `kvstore serve` replaces it"
        return Finding("socket", Level.NOTE, f"{path}: nobody listens", advice)
    finally:
        probe.close()
    return Finding(
        "socket", Level.OK, f"{path}: somebody listens, mode {stat.S_IMODE(path.stat().st_mode):o}"
    )


MACHINE_CHECKS: tuple[Callable[[Place], Finding], ...] = (
    shared_memory,
    huge_pages,
    memory_limit,
    data_directory,
    free_space,
    file_system,
    direct_io,
    hole_punching,
    clock,
    open_files,
    socket_path,
)


def examine(place: Place) -> list[Finding]:
    """Run every check of the machine; a check that itself fails is a problem, not a crash."""
    findings = []
    for check in MACHINE_CHECKS:
        try:
            findings.append(check(place))
        except OSError as error:
            name = check.__name__.replace("_", " ")
            findings.append(Finding(name, Level.PROBLEM, f"cannot be checked: {error}", "see the message"))
    return findings
