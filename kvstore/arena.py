"""The host arena as a file: its header, its generation table and a mapping of it. Creation is not known here.

File format, version 1 (little-endian; a page is 4,096 bytes):

    page 0                          header: `_HEADER` below, rest zero
    page 1 .. first_page - 1        generation table: u32 for every page of the file
    page first_page .. total_pages  slots; one starts at any page and spans the stride of its part

A slot is addressed by the absolute index of its first page. Page 0 is the header, so slot 0 means "no slot".
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.types import PAGE_BYTES, round_up

MAGIC = b"kvsarena"
VERSION = 1
GENERATION_PAGE = 1
OWNER_BYTES = 32
# magic, version, page bytes, arena id, boot id, total pages, generation page, first page, owner; then the
# xxh3-64 of all that.
_HEADER = struct.Struct(f"<8sIIQQQII{OWNER_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED = 0x10  # on every Linux; the mmap module does not name it
_PAGES_MAX = 1 << 32


class Advice(IntEnum):
    """What the kernel can be told about pages of the mapping; the numbers are Linux's."""

    DONTDUMP = 16
    POPULATE_READ = 22
    """Fault pages into this mapping."""
    POPULATE_WRITE = 23
    """The same, and give the file's pages their memory."""
    COLLAPSE = 25
    """Back the range by huge pages, also where the mount does not offer them, and fault them in."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.mmap.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """What an arena file says about itself. `owner` tells whose leftover it is, should its daemon die."""

    arena_id: int
    boot_id: int
    total_pages: int
    first_page: int
    owner: bytes

    @staticmethod
    def plan(total_bytes: int, *, arena_id: int, boot_id: int, owner: bytes) -> ArenaHeader:
        """Lay out a file of `total_bytes`, rounded down to whole pages.

        Errors: InvalidArgument when nothing is left for slots, or the owner tag is too long.
        """
        total_pages = total_bytes // PAGE_BYTES
        first_page = GENERATION_PAGE + round_up(4 * total_pages, PAGE_BYTES) // PAGE_BYTES
        if not first_page < total_pages < _PAGES_MAX:
            raise InvalidArgument(f"arena: {total_bytes} bytes leave no page for slots, or exceed 16 TiB")
        if len(owner) > OWNER_BYTES:
            raise InvalidArgument(f"arena: an owner tag has at most {OWNER_BYTES} bytes, got {len(owner)}")
        return ArenaHeader(arena_id, boot_id, total_pages, first_page, owner.ljust(OWNER_BYTES, b"\0"))

    def pack(self) -> bytes:
        """Return the header page."""
        fields = _HEADER.pack(
            MAGIC, VERSION, PAGE_BYTES, self.arena_id, self.boot_id,
            self.total_pages, GENERATION_PAGE, self.first_page, self.owner,
        )  # fmt: skip
        return (fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))).ljust(PAGE_BYTES, b"\0")

    @staticmethod
    def unpack(page: bytes, path: str | Path) -> ArenaHeader:
        """Read a header page.

        Errors: TierUnavailable naming the file when it is no arena, is torn, or has another version.
        """
        if len(page) < PAGE_BYTES or page[:8] != MAGIC:
            raise TierUnavailable(f"arena {path}: not an arena file")
        fields = page[: _HEADER.size]
        _, version, page_bytes, arena_id, boot_id, total, _, first, owner = _HEADER.unpack(fields)
        if version != VERSION or page_bytes != PAGE_BYTES:
            raise TierUnavailable(
                f"arena {path}: version {version} with pages of {page_bytes} bytes; "
                f"version {VERSION} with {PAGE_BYTES} expected"
            )
        if _CHECKSUM.unpack_from(page, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(fields):
            raise TierUnavailable(f"arena {path}: the header's checksum is wrong")
        return ArenaHeader(arena_id, boot_id, total, first, owner)


class Arena:
    """A mapped arena file; implements the views of kvstore.tiers.base.HostMemory.

    `bytes` is the whole file as uint8, `generations` u32[total_pages]; read-only unless mapped writable.
    Threads: views may be taken and used from any thread. A view keeps the mapping alive after `close`.
    """

    def __init__(self, view: memoryview, header: ArenaHeader, *, path: Path, writable: bool) -> None:
        self.path = path
        self.header = header
        self.writable = writable
        self.closed = False
        self.first_page = header.first_page
        self.total_pages = header.total_pages
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(view, np.uint8)
        table = self.bytes[GENERATION_PAGE * PAGE_BYTES :][: 4 * header.total_pages]
        self.generations: npt.NDArray[np.uint32] = table.view(np.uint32)

    @staticmethod
    def map(path: str | Path, *, expected_id: int | None = None, writable: bool = False) -> Arena:
        """Map an arena file in full.

        Errors: TierUnavailable when the file is gone, unreadable, cut short, or not the arena expected.
        """
        path = Path(path)
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise TierUnavailable(f"arena {path}: cannot be opened: {error.strerror}") from error
        try:
            return Arena.map_fd(fd, path, expected_id=expected_id, writable=writable)
        finally:
            os.close(fd)

    @staticmethod
    def map_fd(fd: int, path: Path, *, expected_id: int | None = None, writable: bool = False) -> Arena:
        """Map an open arena file; the caller keeps its descriptor.

        Errors: as `map`.
        """
        header = ArenaHeader.unpack(os.pread(fd, PAGE_BYTES, 0), path)
        if expected_id is not None and header.arena_id != expected_id:
            raise TierUnavailable(
                f"arena {path}: stale or foreign file: it has id {header.arena_id:016x}, "
                f"the daemon's has {expected_id:016x}"
            )
        length = header.total_pages * PAGE_BYTES
        if (size := os.fstat(fd).st_size) < length:
            # Mapping beyond the end would kill the process with SIGBUS at the first touch.
            raise TierUnavailable(f"arena {path}: cut short: {size} bytes, its header says {length}")
        try:
            view = _map_aligned(fd, length, writable=writable)
        except OSError as error:
            raise TierUnavailable(f"arena {path}: mapping {length} bytes failed: {error.strerror}") from error
        arena = Arena(view, header, path=path, writable=writable)
        arena.advise(0, header.total_pages, Advice.DONTDUMP)
        return arena

    @property
    def arena_id(self) -> int:
        """The id in the header."""
        return self.header.arena_id

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.total_pages * PAGE_BYTES

    def images(self, slots: npt.NDArray[np.uint32], *, stride_pages: int) -> tuple[memoryview, ...]:
        """Return views of the slots in order, contiguous slots coalesced; writable if the mapping is.

        Errors: InvalidArgument on a slot outside the arena; TierUnavailable after `close`.
        """
        views = []
        for first, start, stop in self.runs(slots, stride_pages=stride_pages):
            begin = first * PAGE_BYTES
            end = begin + (stop - start) * stride_pages * PAGE_BYTES
            views.append(memoryview(self.bytes[begin:end]))  # type: ignore[arg-type]  # numpy's stubs lag
        return tuple(views)

    def runs(self, slots: npt.NDArray[np.uint32], *, stride_pages: int) -> list[tuple[int, int, int]]:
        """Cut `slots` into contiguous runs: (first slot, start, stop) stands for slots[start:stop].

        Errors: as `images`.
        """
        if self.closed:
            raise TierUnavailable(f"arena {self.path}: closed")
        count = len(slots)
        if not count:
            return []
        wide = slots.astype(np.int64)
        low, high = int(wide.min()), int(wide.max()) + stride_pages
        if low < self.first_page or high > self.total_pages:
            raise InvalidArgument(
                f"arena: slots span pages {low} to {high}, allowed: {self.first_page} to {self.total_pages}"
            )
        cuts = (wide[1:] - wide[:-1] != stride_pages).nonzero()[0] + 1
        edges = [0, *cuts.tolist(), count]
        return [(int(wide[a]), a, b) for a, b in itertools.pairwise(edges)]

    def rows(self, first_slot: int, count: int, stride_bytes: int) -> npt.NDArray[np.uint8]:
        """Return `count` contiguous slots as a view.

        Shapes: [count, stride_bytes].
        Errors: InvalidArgument when they reach outside the arena.
        """
        begin, size = first_slot * PAGE_BYTES, count * stride_bytes
        if first_slot < self.first_page or begin + size > len(self.bytes):
            raise InvalidArgument(f"arena: {count} x {stride_bytes} bytes from page {first_slot} lie outside")
        return self.bytes[begin : begin + size].reshape(count, stride_bytes)

    def advise(self, first_page: int, pages: int, advice: Advice) -> int:
        """Tell the kernel about pages of this mapping and return 0, or the error number where it refuses.

        Threads: does not hold the GIL, unlike mmap.madvise; keep steps small, the mapping is locked.
        Errors: InvalidArgument when they lie outside; TierUnavailable after `close`.
        """
        view = self.bytes  # this name keeps the mapping alive while the kernel works on it
        if self.closed:
            raise TierUnavailable(f"arena {self.path}: closed")
        if first_page < 0 or pages < 1 or first_page + pages > self.total_pages:
            raise InvalidArgument(
                f"arena: {pages} pages from page {first_page} lie outside {self.total_pages}"
            )
        address = view.ctypes.data + first_page * PAGE_BYTES
        if _libc.madvise(address, pages * PAGE_BYTES, int(advice)) == 0:
            return 0
        return ctypes.get_errno()

    def close(self) -> None:
        """Let go of the mapping; views in use keep it until they are gone. Idempotent."""
        self.closed = True
        self.bytes = np.empty(0, np.uint8)
        self.generations = np.empty(0, np.uint32)


def _map_aligned(fd: int, length: int, *, writable: bool) -> memoryview:
    """Map a file at a multiple of the huge page size, else none can back it; mmap.mmap takes no address.

    The mapping ends with the last view of it.
    Errors: OSError.
    """
    reserved_bytes = length + HUGE_PAGE_BYTES
    reserved = _mmap(None, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = round_up(reserved, HUGE_PAGE_BYTES)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _mmap(address, length, access, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(reserved, reserved_bytes)
        raise
    end = address + round_up(length, PAGE_BYTES)
    if address > reserved:
        _libc.munmap(reserved, address - reserved)
    _libc.munmap(end, reserved + reserved_bytes - end)
    block = (ctypes.c_uint8 * length).from_address(address)
    weakref.finalize(block, _libc.munmap, address, length).atexit = False
    view = memoryview(block).cast("B")
    return view if writable else view.toreadonly()


def _mmap(address: int | None, length: int, access: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, length, access, flags, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
