"""Where the chunks of a framed put land: reserved slots, filled in block order, digested behind the copy.

`Landing` runs on worker threads, one call at a time; it knows no wire and no event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.api import Extent, OutcomeRun, PartBlocks, PartDigests, ReserveRequest
from kvstore.copying import digest_images
from kvstore.errors import InvalidArgument
from kvstore.layout import Layout, Part
from kvstore.rpc.channel import CHUNK_BYTES_MAX
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import DIGEST_BYTES, PutOutcome, key_count

Images = Callable[[Extent, Part], tuple[memoryview, ...]]


class Place(NamedTuple):
    """Bytes [offset, offset + size) of one block of one part."""

    part: int
    block: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one block of one part, from an offset on."""

    part: int
    block: int
    offset: int
    data: bytes

    @property
    def place(self) -> Place:
        """Where they belong."""
        return Place(self.part, self.block, self.offset, len(self.data))


class Announced:
    """What the header of a put announced: chunks beyond that are refused, also those nobody waits for."""

    def __init__(self, layout: Layout, reserve: ReserveRequest) -> None:
        count = key_count(reserve.keys)
        named = reserve.parts or tuple(PartBlocks(part.index, 0, count) for part in layout.parts)
        self._limits = {
            named_part.part: (layout.parts[named_part.part].bytes_max, named_part) for named_part in named
        }
        self._bytes_max = sum(bytes_max * part.count for bytes_max, part in self._limits.values())
        self._bytes = 0

    def piece(self, request: pb.PutRequest) -> Piece:
        """Return a message's chunk.

        Errors: InvalidArgument when it is none, or not within what was announced.
        """
        if request.WhichOneof("message") != "chunk":
            raise InvalidArgument("put: only chunks follow the header")
        chunk = request.chunk
        piece = Piece(chunk.part, chunk.block, chunk.offset, chunk.data)
        self.admit(piece.place)
        return piece

    def admit(self, place: Place) -> None:
        """Let a chunk come.

        Errors: InvalidArgument when it is not within what was announced.
        """
        if not 1 <= place.size <= CHUNK_BYTES_MAX:
            raise InvalidArgument(f"put: a chunk has 1..{CHUNK_BYTES_MAX} bytes, got {place.size}")
        bytes_max, part = self._limits.get(place.part, (0, PartBlocks(place.part, 0, 0)))
        if not part.first <= place.block < part.first + part.count:
            raise InvalidArgument(
                f"put: part {place.part}: blocks {part.first}..{part.first + part.count} were announced, "
                f"got block {place.block}"
            )
        if place.offset + place.size > bytes_max:
            raise InvalidArgument(
                f"put: part {place.part} has at most {bytes_max} bytes a block, "
                f"got {place.size} at offset {place.offset}"
            )
        self._bytes += place.size
        if self._bytes > self._bytes_max:
            raise InvalidArgument(f"put: {self._bytes_max} bytes were announced, got {self._bytes}")


class Landing:
    """Takes the chunks of one put and says how far what landed is what the writer meant.

    Chunks of blocks that were not reserved (duplicates, throttled ones) are dropped.
    Threads: one at a time.
    """

    def __init__(
        self, layout: Layout, extents: Sequence[Extent], source: Iterable[PartDigests], *, images: Images
    ) -> None:
        self._layout = layout
        said = [_Source(part) for part in layout.parts]
        for told in source:
            if told.part >= len(layout.parts):
                raise InvalidArgument(f"put: digests of part {told.part}, the layout has {len(layout.parts)}")
            said[told.part].add(told)
        self._targets = [_Target(said[extent.part], extent, images) for extent in extents]

    def land(self, piece: Piece) -> None:
        """Copy a chunk to its place and check the block when it is whole.

        Errors: InvalidArgument when it is no piece of its block, or out of order.
        """
        if (room := self.room(piece.place)) is not None:
            np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(piece.data, np.uint8))
            self.filled(piece.place)

    def room(self, place: Place) -> memoryview | None:
        """Return where a chunk is to be put, to be told by `filled` when it is there; None when nobody waits
        for it.

        Errors: InvalidArgument when it is no piece of its block, or out of order.
        """
        if place.part >= len(self._layout.parts):
            raise InvalidArgument(
                f"put: part {place.part} is not in the layout of {len(self._layout.parts)} parts"
            )
        target = self._target_of(place)
        return None if target is None else target.room(place)

    def filled(self, place: Place) -> None:
        """Check a block when it is whole, right behind its last chunk."""
        target = self._target_of(place)
        assert target is not None
        target.filled(place)

    def _target_of(self, place: Place) -> _Target | None:
        return next((target for target in self._targets if target.holds(place)), None)

    def good_blocks(self) -> int:
        """Return the first block that is missing or wrong in some part, or the end of what was reserved."""
        ends = [target.first + target.good for target in self._targets if target.good < target.count]
        return min(ends, default=self.reserved_end())

    def reserved_end(self) -> int:
        """Return the block behind the last reserved one."""
        return max((target.first + target.count for target in self._targets), default=0)

    def landed(self, blocks: int) -> tuple[PartDigests, ...]:
        """Return lengths and digests of what landed below block `blocks`, an entry per extent."""
        entries = (target.landed(blocks - target.first) for target in self._targets)
        return tuple(entry for entry in entries if entry is not None)


class _Source:
    """What the writer said of one part: length and digests of a block, if it said anything."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._lengths: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}

    def add(self, told: PartDigests) -> None:
        each = DIGEST_BYTES * len(self.part.segments)
        lengths = np.frombuffer(told.lengths, "<u4")
        count = len(lengths) or len(told.digests) // each
        if len(told.digests) % each or (told.digests and len(told.digests) != count * each):
            raise InvalidArgument(
                f"put: {len(told.digests)} bytes of digests for {count} blocks of {each} each"
            )
        if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= self.part.bytes_max:
            got = f"{int(lengths.min())}..{int(lengths.max())}"
            raise InvalidArgument(f"put: lengths are within 1..{self.part.bytes_max}, got {got}")
        self._lengths.update(zip(range(told.first, told.first + len(lengths)), lengths.tolist(), strict=True))
        for index in range(count if told.digests else 0):
            self._digests[told.first + index] = told.digests[index * each : (index + 1) * each]

    def length(self, block: int) -> int:
        return self._lengths.get(block, self.part.bytes_max)

    def digests(self, block: int) -> bytes | None:
        return self._digests.get(block)


class _Target:
    """One reserved extent: its slots as rows, how far they are filled, and what landed in them."""

    def __init__(self, source: _Source, extent: Extent, images: Images) -> None:
        self._source = source
        self.part = part = source.part
        self.first, self.count = extent.first, extent.count
        self.good = 0
        self._filled = 0
        self._broken = False
        self._digests: list[bytes] = []
        self._rows: list[npt.NDArray[np.uint8]] = []
        for view in images(extent, part):
            self._rows += list(np.frombuffer(view, np.uint8).reshape(-1, part.stride_bytes))

    def holds(self, place: Place) -> bool:
        return place.part == self.part.index and self.first <= place.block < self.first + self.count

    def room(self, place: Place) -> memoryview | None:
        if self._broken:
            return None
        length = self._source.length(place.block)
        at = self.first + self.good
        if place.block != at or place.offset != self._filled or place.offset + place.size > length:
            raise InvalidArgument(
                f"put: part {place.part}: expected block {at} offset {self._filled} of {length} bytes, "
                f"got block {place.block} offset {place.offset} with {place.size} bytes"
            )
        return memoryview(self._rows[self.good])[place.offset : place.offset + place.size]  # type: ignore[arg-type]

    def filled(self, place: Place) -> None:
        self._filled += place.size
        length = self._source.length(place.block)
        if self._filled == length:
            self._finish(self._rows[self.good], length)

    def _finish(self, row: npt.NDArray[np.uint8], length: int) -> None:
        image = memoryview(row)  # type: ignore[arg-type]  # numpy's stubs lag behind the buffer protocol
        found = digest_images(self.part, [image], np.array([length], np.uint32))
        told = self._source.digests(self.first + self.good)
        if told is not None and told != found:
            self._broken = True
            return
        self._digests.append(found)
        self.good += 1
        self._filled = 0

    def landed(self, blocks: int) -> PartDigests | None:
        count = min(blocks, self.good)
        if count <= 0:
            return None
        lengths = [self._source.length(self.first + index) for index in range(count)]
        packed = np.array(lengths, "<u4").tobytes()
        return PartDigests(self.part.index, self.first, packed, b"".join(self._digests[:count]))


def merged(
    reserved: Iterable[OutcomeRun], committed: Iterable[OutcomeRun], *, good: int
) -> tuple[OutcomeRun, ...]:
    """Return the outcome of every block of a put: the commit's word, REFUSED if damaged or cut off."""
    both = enumerate(zip(_each(reserved), _each(committed), strict=True))
    final = (
        PutOutcome.REFUSED if asked is PutOutcome.RESERVED and block >= good else said
        for block, (asked, said) in both
    )
    return tuple(OutcomeRun(outcome, sum(1 for _ in group)) for outcome, group in itertools.groupby(final))


def _each(runs: Iterable[OutcomeRun]) -> Iterator[PutOutcome]:
    return itertools.chain.from_iterable(itertools.repeat(run.outcome, run.count) for run in runs)
