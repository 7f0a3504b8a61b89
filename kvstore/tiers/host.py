"""The host tier's memory: creates the arena file, sizes it to the machine, touches it before it is lent."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.arena import HUGE_PAGE_BYTES, Advice, Arena, ArenaHeader
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.machine import HugePages, Machine, Mount, shmem_enabled
from kvstore.types import PAGE_BYTES

DEFAULT_DIRECTORY = Path("/dev/shm")
ARENA_BYTES_MIN = 64 << 20
MEMORY_SHARE = 0.25
FREE_SHARE = 0.80
PREFAULT_STEP_BYTES = 16 << 20
PREFAULT_NICE = 10
ALLOCATE_STEP_BYTES = 1 << 30
"""A signal makes fallocate start again: one call over a large arena might never end."""
COLLAPSE_FAILURES_MAX = 4

_log = logging.getLogger(__name__)
_NAME = re.compile(r"kvstore-(\d+)-[0-9a-f]{16}\.arena")
_GIB = 1 << 30


def default_arena_bytes(machine: Machine, mount: Mount) -> int:
    """Return the arena size for a machine: a quarter of its memory limit, at most 80 % of what is free.

    "Free" is what the mount has left and what can still be allocated under the limit.
    Errors: InvalidArgument with the remedy when that is less than 64 MiB.
    """
    free = min(mount.free_bytes, machine.memory_room_bytes)
    size = int(min(machine.memory_limit_bytes * MEMORY_SHARE, free * FREE_SHARE))
    size = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if size < ARENA_BYTES_MIN:
        raise InvalidArgument(_refusal(ARENA_BYTES_MIN, machine, mount))
    return size


def remove_leftovers(directory: Path, owner: bytes) -> list[Path]:
    """Remove arenas of dead daemons with this owner tag and return them; what is held or foreign stays."""
    removed = []
    for path in sorted(directory.glob(f"kvstore-{os.getuid()}-*.arena")):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            header = ArenaHeader.unpack(os.pread(fd, PAGE_BYTES, 0), path)
            if header.owner.rstrip(b"\0") == owner.rstrip(b"\0"):
                path.unlink()
                removed.append(path)
        except (OSError, TierUnavailable):
            continue  # its daemon lives, or it is nothing that we know
        finally:
            os.close(fd)
    return removed


@dataclass(frozen=True, slots=True)
class ArenaFacts:
    """What a log line or `doctor` says of an arena. `huge_pages` is what the mount offers."""

    path: str
    total_bytes: int
    touched_bytes: int
    huge_bytes: int
    mount_point: str
    mount_kind: str
    huge_pages: str
    advice: str


class HostArena:
    """The daemon's own arena: a fresh file, allocated in full, never truncated, removed at close.

    Implements kvstore.tiers.base.HostMemory. A flock on the file tells later daemons that this one lives.
    Threads: any; one thread of its own, `kvstore-prefault`, between `start_prefault` and `close`.
    """

    def __init__(self, arena: Arena, fd: int, mount: Mount) -> None:
        self.arena = arena
        self.path = arena.path
        self.first_page = arena.first_page
        self.total_pages = arena.total_pages
        self.generations: npt.NDArray[np.uint32] = arena.generations
        self.mount = mount
        self._fd: int | None = fd
        self._touched_end = arena.first_page
        self._huge_bytes = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @staticmethod
    def create(
        directory: str | Path = DEFAULT_DIRECTORY,
        *,
        total_bytes: int,
        arena_id: int,
        boot_id: int,
        owner: bytes = b"",
        mode: int = 0o600,
        group: str | None = None,
        machine: Machine | None = None,
    ) -> HostArena:
        """Create and map an arena of `total_bytes`, rounded down to whole huge pages.

        `owner` (at most 32 bytes, say a digest of the data directory's path) marks whose leftover it is.
        Errors: InvalidArgument when the machine or the mount has no room for it; TierUnavailable when the
        directory or the allocation fails. Both say what was asked, what there is, and what to do.
        """
        directory = Path(directory)
        total_bytes = total_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        header = ArenaHeader.plan(total_bytes, arena_id=arena_id, boot_id=boot_id, owner=owner)
        path = directory / f"kvstore-{os.getuid()}-{arena_id:016x}.arena"
        try:
            for leftover in remove_leftovers(directory, owner):
                _log.info("arena of a dead daemon removed path=%s", leftover)
            mount, machine = Mount.of(directory), machine or Machine.read()
            if total_bytes > min(mount.free_bytes, machine.memory_room_bytes):
                raise InvalidArgument(_refusal(total_bytes, machine, mount))
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierUnavailable(f"arena {path}: cannot be created: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, header.pack(), 0)
            _allocate(fd, total_bytes)
            if group is not None:
                shutil.chown(path, group=group)
            os.fchmod(fd, mode)
            return HostArena(Arena.map_fd(fd, path, expected_id=arena_id, writable=True), fd, mount)
        except BaseException as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if isinstance(error, LookupError):
                raise InvalidArgument(f"arena: no group {group!r} on this machine") from error
            if isinstance(error, OSError):
                detail = f"{error.strerror}; {_refusal(total_bytes, machine, mount)}"
                raise TierUnavailable(f"arena {path}: allocation failed: {detail}") from error
            raise

    @property
    def arena_id(self) -> int:
        """The id that clients must find in the header."""
        return self.arena.arena_id

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.arena.size_bytes

    def images(self, slots: npt.NDArray[np.uint32], *, stride_pages: int) -> tuple[memoryview, ...]:
        """Return writable views of the slots in order, contiguous slots coalesced.

        Errors: InvalidArgument on a slot outside the arena.
        """
        return self.arena.images(slots, stride_pages=stride_pages)

    def touched_pages(self) -> int:
        """Return how many pages from first_page on are faulted in; the allocator lends those first."""
        return self._touched_end - self.first_page

    def start_prefault(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        """Touch the arena from its beginning in a background thread; `on_failure` hears of an early end.

        Untouched memory works too, only its first use is about six times slower.
        """
        assert self._thread is None
        self._thread = threading.Thread(
            target=self._prefault, args=(on_failure,), name="kvstore-prefault", daemon=True
        )
        self._thread.start()

    def wait_prefault(self, timeout_seconds: float | None = None) -> bool:
        """Wait until everything is touched, and return whether it is; for benches and tests."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return self._touched_end == self.total_pages

    def facts(self) -> ArenaFacts:
        """Return what to log at start and to show in `doctor`."""
        return ArenaFacts(
            path=str(self.path),
            total_bytes=self.size_bytes,
            touched_bytes=self.touched_pages() * PAGE_BYTES,
            huge_bytes=self._huge_bytes,
            mount_point=self.mount.point,
            mount_kind=self.mount.kind,
            huge_pages=self.mount.huge_pages,
            advice=_advice(self.mount),
        )

    def close(self) -> None:
        """Stop touching, remove the file and let go of it; views in use stay valid. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.arena.close()
        self.generations = self.arena.generations
        os.close(fd)

    def _prefault(self, on_failure: Callable[[BaseException], None] | None) -> None:
        try:
            _yield_to_others(threading.get_native_id())
            failures = 0
            for first, pages in self._steps():
                if self._stop.is_set():
                    return
                is_huge = failures < COLLAPSE_FAILURES_MAX and self._collapse(first, pages)
                failures = 0 if is_huge else failures + 1
                if not is_huge and self.arena.advise(first, pages, Advice.POPULATE_WRITE):
                    self._touch(first, pages)
                self._touched_end = max(self.first_page, first + pages)
            _log.info("arena touched bytes=%d huge_bytes=%d", self.size_bytes, self._huge_bytes)
        except BaseException as error:
            _log.exception("arena prefault ended early; untouched memory is slower at first use")
            if on_failure is not None:
                on_failure(error)

    def _collapse(self, first: int, pages: int) -> bool:
        """Touch pages as huge ones: later copies and disk reads are faster. Needs no mount option."""
        if self.arena.advise(first, pages, Advice.COLLAPSE):
            return False
        self._huge_bytes += pages * PAGE_BYTES
        return True

    def _steps(self) -> Iterator[tuple[int, int]]:
        """Yield (first page, pages) of steps that begin at multiples of the step, as huge pages must."""
        step = PREFAULT_STEP_BYTES // PAGE_BYTES
        for first in range(0, self.total_pages, step):
            yield first, min(step, self.total_pages - first)

    def _touch(self, first: int, pages: int) -> None:
        """Fault pages in where the kernel cannot be asked to, before Linux 5.14.

        A read gives a page of a fallocated file its memory as well as a write would, and spoils nothing.
        """
        view = self.arena.bytes[first * PAGE_BYTES : (first + pages) * PAGE_BYTES : PAGE_BYTES]
        for start in range(0, pages, 256):
            view[start : start + 256].max()


def _yield_to_others(thread: int) -> None:
    """Lower one thread's priority (on Linux it is per thread): whoever computes goes first."""
    now = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(now, PREFAULT_NICE))


def _allocate(fd: int, total_bytes: int) -> None:
    os.ftruncate(fd, total_bytes)
    for begin in range(0, total_bytes, ALLOCATE_STEP_BYTES):
        os.posix_fallocate(fd, begin, min(ALLOCATE_STEP_BYTES, total_bytes - begin))


def _refusal(wanted_bytes: int, machine: Machine, mount: Mount) -> str:
    room = int(min(mount.free_bytes, machine.memory_room_bytes) * FREE_SHARE)
    return (
        f"arena of {wanted_bytes / _GIB:.2f} GiB asked for; mount {mount.point} ({mount.kind}) has "
        f"{mount.free_bytes / _GIB:.2f} of {mount.total_bytes / _GIB:.2f} GiB free; memory: "
        f"{machine.memory_room_bytes / _GIB:.2f} of {machine.memory_limit_bytes / _GIB:.2f} GiB left "
        f"(limit: {machine.limit_source}). Choose a smaller arena (up to {room / _GIB:.2f} GiB), or enlarge "
        f"the mount: `mount -o remount,size=SIZE {mount.point}`, in a container `--shm-size=SIZE`"
    )


def _advice(mount: Mount) -> str:
    """Say what would make the arena faster; empty when nothing would."""
    if not mount.is_memory:
        return f"{mount.point} is {mount.kind}: every page is also written to disk; use a tmpfs"
    policy = shmem_enabled()
    if policy == "deny":
        return "the kernel denies huge pages: write `advise` to transparent_hugepage/shmem_enabled"
    if mount.huge_pages in (HugePages.ALWAYS, HugePages.WITHIN_SIZE) or policy == "force":
        return ""
    return f"huge pages are made in the background; with `remount,huge=always {mount.point}` at once"
