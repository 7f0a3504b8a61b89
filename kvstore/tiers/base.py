"""The tier seam: batch verbs that return futures. No TTL and no policy in a tier, no I/O in a policy.

The unit that crosses the seam is a *frame*: a run of blocks as written together, with the same parts for
every block. `main` frames hold the required parts of a run; `side` frames hold trailing or checkpoint parts
of some blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.layout import Part
from kvstore.namespace import Namespace
from kvstore.types import HASH_BYTES, BlockHash, Fingerprint, MissReason

SLICES_MAX = 8
BLOCKS_MAX = (1 << 32) - 1


class FrameKind(IntEnum):
    """Numbers are part of the disk format."""

    MAIN = 1
    SIDE = 2


@dataclass(frozen=True, slots=True)
class FrameLocation:
    """Where a frame lies: the file, and its place there in whole pages, header included."""

    segment: int
    offset: int
    header_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says about itself, wherever it lies.

    `parent` is the hash before the first key (32 zero bytes in side frames and flat namespaces). `provenance`
    is 0 for exact bytes, else the replay horizon H of approx(H). `touched_at` is the last touch before it was
    written here, 0 when there was none since `written_at`. Units: wall time in seconds.
    """

    namespace: Fingerprint
    kind: FrameKind
    parent: BlockHash
    keys: bytes
    parts: tuple[Part, ...]
    retention_class: str
    written_at: float
    provenance: int = 0
    touched_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PartImage:
    """The slot images of one part of a frame, in block order.

    `images` are writable views of whole slots (stride_bytes each), contiguous slots coalesced; the tier
    writes its trailers into their padding. The caller keeps them still until the future resolves.
    Shapes: lengths u32[n]; digests 16 bytes x segments x n, packed.
    """

    part: Part
    images: tuple[memoryview, ...]
    lengths: bytes
    digests: bytes


@dataclass(frozen=True, slots=True)
class FrameWrite:
    """One frame to append. `bucket` groups frames that die together; its meaning is the policy's."""

    header: FrameHeader
    parts: tuple[PartImage, ...]
    bucket: str


@dataclass(frozen=True, slots=True)
class WriteResult:
    """`location` is durable (behind fdatasync) when set; else `refusal` says why nothing was kept."""

    location: FrameLocation | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class FrameRead:
    """Read records [first, first + n) of one part of a frame into the caller's slot images.

    `block_count` and `parts` are the frame's own, `parts[part_position]` is the part to read, `keys` the n
    packed hashes expected in the records' trailers. `into` are writable views of whole slots that cover n x
    stride_bytes, in order. Record i of part p lies at offset + header_bytes + block_count * sum(strides of
    the parts before p) + i * stride.
    """

    location: FrameLocation
    block_count: int
    parts: tuple[Part, ...]
    part_position: int
    first: int
    keys: bytes
    into: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The first `good` records are intact (key, part, digest); `reason` says what stopped the rest.

    Shapes: lengths u32[good]; digests 16 x segments x good, packed.
    """

    good: int
    lengths: bytes
    digests: bytes
    reason: MissReason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SliceTouch:
    """Blocks [first, first + count) of a frame are held by a class since a wall time."""

    first: int
    count: int
    retention_class: str
    touched_at: float

    @staticmethod
    def whole(retention_class: str, touched_at: float) -> SliceTouch:
        """Return a touch of a frame from its first block to its last, however many there are."""
        return SliceTouch(0, BLOCKS_MAX, retention_class, touched_at)


@dataclass(frozen=True, slots=True)
class TouchNote:
    """Who holds which blocks of a frame: with it a sliding TTL survives a restart.

    At most SLICES_MAX slices, in order. May be lost, never wrong. Blocks in no slice live by the header.
    """

    location: FrameLocation
    slices: tuple[SliceTouch, ...]


@dataclass(frozen=True, slots=True)
class RecoveredFrame:
    """A frame found at start: its header, its place and its last known touches, cut to its blocks."""

    header: FrameHeader
    location: FrameLocation
    touches: tuple[SliceTouch, ...]


@dataclass(frozen=True, slots=True)
class FrameShape:
    """What very many frames have in common; the fields are those of a header."""

    namespace: Fingerprint
    kind: FrameKind
    parts: tuple[Part, ...]
    retention_class: str
    provenance: int

    @property
    def block_stride_bytes(self) -> int:
        """Arena and disk bytes of one block, all its parts."""
        return sum(part.stride_bytes for part in self.parts)


FRAME_ROW = np.dtype(
    [
        ("offset", "<u8"),
        ("head", "<u8"),
        ("tail", "<u8"),
        ("parent", "<u8"),
        ("written_at", "<f8"),
        ("length_bytes", "<u4"),
        ("header_bytes", "<u4"),
        ("count", "<u4"),
        ("shape", "<u4"),
    ]
)
"""A frame without its keys: its place, the first 8 bytes of its first and last key and of the hash before
them (little-endian), how many blocks it has, and the number of its shape.
"""


def marks_of(keys: bytes) -> npt.NDArray[np.uint32]:
    """Return bytes 8..12 of packed hashes, little-endian. Shapes: u32[n]."""
    marks: npt.NDArray[np.uint32] = np.frombuffer(keys, "<u4")[2 :: HASH_BYTES // 4]
    return marks


@dataclass(frozen=True, slots=True)
class FrameTable:
    """All frames of a segment, without their keys: `Tier.headers` reads those of single frames.

    `touches` are the last known ones by row, cut to the frame's blocks; `marks`, of all blocks of all rows,
    tell which frames may hold a block. Shapes: rows FRAME_ROW[n], in write order; marks u32[blocks].
    """

    segment: int
    shapes: tuple[FrameShape, ...]
    rows: npt.NDArray[np.void]
    marks: npt.NDArray[np.uint32]
    touches: Mapping[int, tuple[SliceTouch, ...]]


@dataclass(frozen=True, slots=True)
class UnreadFrame:
    """A frame that a start leaves alone: its key or its layout is not at hand, and may be at the next one."""

    location: FrameLocation
    namespace: Fingerprint
    parent: BlockHash
    keys: bytes
    retention_class: str


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery found; printed at start and kept for `status`."""

    namespaces: tuple[Namespace, ...]
    frames: int
    blocks: int
    bytes_kept: int
    frames_dropped: int
    bytes_dropped: int
    unknown_files: tuple[str, ...]
    rebuilt: bool
    seconds: float
    segments: int = 0
    unread: tuple[UnreadFrame, ...] = ()


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Bytes as the file system counts them."""

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    segments: int
    written_bytes: int
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment, for eviction, `inspect` and `verify`."""

    segment: int
    path: str
    bucket: str
    bytes: int
    frames: int
    sealed: bool
    created_at: float


@dataclass(frozen=True, slots=True)
class WrittenBytes:
    """What was written for a class on one day; `day` counts from the epoch, in UTC."""

    day: int
    retention_class: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TierHealth:
    """`readable` and `writable` as last seen, why not, and since which wall time (0: not known)."""

    readable: bool
    writable: bool
    detail: str = ""
    since: float = 0.0
    scrub: str = ""


@dataclass(frozen=True, slots=True)
class Loss:
    """Frames in [offset, offset + length) of a segment that turned out bad, from block `block` on.

    With length 0 it is the whole segment.
    """

    segment: int
    offset: int = 0
    length_bytes: int = 0
    block: int = 0


class HostMemory(Protocol):
    """The arena as the ladder sees it: pages to lend, their generations, and views of slots.

    Pages [first_page, total_pages) may be lent out. Shapes: generations u32[total_pages], shared with every
    client that maps the arena.
    """

    first_page: int
    total_pages: int
    generations: npt.NDArray[np.uint32]

    def images(self, slots: npt.NDArray[np.uint32], *, stride_pages: int) -> tuple[memoryview, ...]:
        """Return writable views of the slots in order, contiguous slots coalesced."""
        ...

    def touched_pages(self) -> int:
        """Return how many pages from first_page on are faulted in; the allocator lends those first."""
        ...


class Tier(Protocol):
    """A place for frames. Every verb is thread-safe, and bounded by the tier's own pools and queues.

    Threads: futures resolve on the tier's threads; callbacks must be short and must not call back into
    `close`.
    """

    def register(self, namespace: Namespace) -> None:
        """Make a namespace durable before any frame of it is written; idempotent."""
        ...

    def write(self, frames: Sequence[FrameWrite]) -> list[Future[WriteResult]]:
        """Append frames in order; a future resolves when its frame and all before it are durable."""
        ...

    def read_into(self, reads: Sequence[FrameRead]) -> list[Future[ReadResult]]:
        """Read and verify records into the caller's slots."""
        ...

    def annotate(self, notes: Sequence[TouchNote]) -> None:
        """Remember touches lazily."""
        ...

    def delete(self, frames: Sequence[FrameLocation]) -> Future[int]:
        """Forget frames for good, give bytes back where the file system can; resolves to bytes freed once no
        restart can bring them back, nor what was refused or deleted before: also when `frames` is empty.

        Errors (of the future): TierUnavailable when that cannot be said of all of them; asking again helps.
        """
        ...

    def unlink(self, segments: Sequence[int], *, is_urgent: bool = True) -> Future[int]:
        """Remove whole segments; resolves to bytes freed. What is not urgent may take about a second longer,
        if that costs less; whatever is asked for later and is urgent brings it about.

        Errors (of the future): TierUnavailable when one may return; asking again helps.
        """
        ...

    def recover(self) -> Iterable[RecoveredFrame | FrameTable]:
        """Yield every durable frame once, in write order within a segment: alone, or in a table with all of
        its segment.

        Call once, before any other verb but register.
        """
        ...

    def headers(self, frames: Sequence[FrameLocation]) -> Future[list[RecoveredFrame | None]]:
        """Read what frames say of themselves, as `recover` yields it; None of one that is not there or cannot
        be read.
        """
        ...

    def report(self) -> RecoveryReport:
        """Return what `recover` found, once it is exhausted."""
        ...

    def usage(self) -> TierUsage:
        """Return the present usage."""
        ...

    def segments(self) -> list[SegmentInfo]:
        """Return the present segments."""
        ...

    def sealed_bytes(self) -> dict[int, int]:
        """Return how many bytes each present segment takes that nothing is appended to any more."""
        ...

    def written(self) -> list[WrittenBytes]:
        """Return what was written by day and class, earlier processes included, the oldest day first."""
        ...

    def losses(self) -> list[Loss]:
        """Return what turned out bad since the last call, without being asked for."""
        ...

    def healthy(self) -> TierHealth:
        """Return the present health."""
        ...

    def close(self, *, deadline_seconds: float) -> None:
        """Drain writes until the deadline, seal, sync and let go; idempotent."""
        ...
