"""Copies blocks between the arena and a caller's buffers, and checks or takes their digests on the way.

Each block is digested right after its own copy, while it is in cache: a second pass over memory would cost
more than the copy. The digest of a segment covers what the record holds of it; a segment behind the end of a
short record has the digest of no bytes.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.api import U32Array
from kvstore.arena import Arena
from kvstore.errors import InvalidArgument
from kvstore.layout import Part
from kvstore.types import DIGEST_BYTES, PAGE_BYTES, MissReason

COPY_THREADS = 2
SPLIT_BYTES_MIN = 1 << 20
"""A thread is not worth waking for less than this."""

Bytes = npt.NDArray[np.uint8]
Buffer = Bytes | Sequence[Bytes]
"""Blocks of one part: [blocks, bytes_max], or an array [blocks, segment.length] for each segment."""

_Pieces = Iterator[tuple[Bytes, ...]]
_Cut = tuple[int, int]
_Result = TypeVar("_Result")
_contiguous_digest = cast("Callable[[Bytes], bytes]", xxhash.xxh3_128_digest)


@dataclass(frozen=True, slots=True)
class CopiedOut:
    """The first `good` blocks of the destination are right; `reason` says what is wrong with the next."""

    good: int
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class CopiedIn:
    """What a commit tells of the blocks copied in: packed u32[n] lengths, 16 x segments x n bytes of digests."""

    lengths: bytes
    digests: bytes


def copy_out(
    arena: Arena,
    part: Part,
    *,
    slots: U32Array,
    lengths: U32Array,
    digests: bytes,
    generations: U32Array,
    into: Buffer,
    verify: bool = True,
    threads: int = COPY_THREADS,
) -> CopiedOut:
    """Copy blocks out of their slots; a block counts if its digest is right and its slot kept its generation.

    Of a record shorter than bytes_max only its own bytes are written. CORRUPT: not what the writer digested.
    EVICTED: the lease was lost and the slot given to somebody else. Rows from `good` on hold no promise.
    Shapes: slots, lengths, generations u32[n]; digests 16 x segments x n; into n rows.
    Errors: InvalidArgument on a buffer or an extent of the wrong shape; TierUnavailable on a closed arena.
    """
    copy = _Copy.plan(arena, part, slots=slots, lengths=lengths, buffer=into, inward=False)
    if len(generations) != copy.count or (verify and len(digests) != copy.count * copy.digest_bytes):
        raise InvalidArgument(
            f"copy out of part {part.index}: {copy.count} slots, but {len(generations)} generations "
            f"and {len(digests)} bytes of digests ({copy.digest_bytes} a block)"
        )

    def work(start: int, stop: int) -> int:
        if verify:
            return copy.checked(digests, start, stop)
        copy.plain(start, stop)
        return stop

    good, reason = 0, None
    for stop, reached in copy.spread(work, threads=threads):
        good = reached
        if reached < stop:
            reason = MissReason.CORRUPT
            break
    # Also of the block that failed: a slot with a new owner explains the wrong digest.
    stale = np.flatnonzero(arena.generations[slots[: good + 1]] != generations[: good + 1])
    if len(stale):
        return CopiedOut(int(stale[0]), MissReason.EVICTED)
    return CopiedOut(good, reason)


def copy_in(
    arena: Arena,
    part: Part,
    *,
    slots: U32Array,
    source: Buffer,
    lengths: U32Array | None = None,
    threads: int = COPY_THREADS,
) -> CopiedIn:
    """Copy blocks into their slots and digest the source: what was meant, not what landed.

    Shapes: slots and lengths u32[n] (default: every record is bytes_max long); source n rows.
    Errors: InvalidArgument on a wrong shape or a read-only mapping; TierUnavailable on a closed arena.
    """
    if not arena.writable:
        raise InvalidArgument(f"copy into part {part.index}: arena {arena.path} is mapped read-only")
    if lengths is None:
        lengths = np.full(len(slots), part.bytes_max, np.uint32)
    copy = _Copy.plan(arena, part, slots=slots, lengths=lengths, buffer=source, inward=True)
    digests = b"".join(found for _, found in copy.spread(copy.digesting, threads=threads))
    return CopiedIn(np.asarray(lengths, "<u4").tobytes(), digests)


def digest_images(part: Part, images: Sequence[memoryview], lengths: U32Array) -> bytes:
    """Return the packed digests of records where they lie, given views of whole slots.

    Errors: InvalidArgument when images and lengths are of different counts.
    """
    rows = [np.frombuffer(image, np.uint8).reshape(-1, part.stride_bytes) for image in images]
    if (count := sum(map(len, rows))) != len(lengths):
        raise InvalidArgument(f"digest of part {part.index}: images of {count} slots, {len(lengths)} lengths")
    cuts = _segment_cuts(part)
    pieces = itertools.chain.from_iterable(_columns(block, cuts) for block in rows)
    trimmed = _trimmed(pieces, cuts, lengths)
    return b"".join(_contiguous_digest(piece) for block in trimmed for piece in block)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One checked request. `arrays` are the caller's, `cuts` their places in a record; lengths None: all full."""

    memory: Bytes
    arena: Arena
    part: Part
    slots: U32Array
    lengths: U32Array | None
    arrays: tuple[Bytes, ...]
    cuts: tuple[_Cut, ...]
    inward: bool

    @staticmethod
    def plan(
        arena: Arena, part: Part, *, slots: U32Array, lengths: U32Array, buffer: Buffer, inward: bool
    ) -> _Copy:
        memory = arena.bytes  # one name for the whole copy: closing the arena meanwhile then hurts nobody
        arena.runs(slots, stride_pages=part.stride_pages)
        arrays, cuts = _arrays_of(part, buffer, count=len(slots), writing=not inward)
        if len(lengths) != len(slots) or (len(slots) and int(lengths.max()) > part.bytes_max):
            raise InvalidArgument(
                f"copy of part {part.index}: {len(slots)} slots, {len(lengths)} lengths of at most "
                f"{int(lengths.max(initial=0))} bytes; the part's limit is {part.bytes_max}"
            )
        is_full = bool((lengths == part.bytes_max).all())
        return _Copy(memory, arena, part, slots, None if is_full else lengths, arrays, cuts, inward)

    @property
    def count(self) -> int:
        return len(self.slots)

    @property
    def digest_bytes(self) -> int:
        return DIGEST_BYTES * len(self.part.segments)

    def spread(self, work: Callable[[int, int], _Result], *, threads: int) -> list[tuple[int, _Result]]:
        """Return (stop, work(start, stop)) of consecutive stretches, each done by its own thread."""
        shares = max(1, min(threads, self.count * self.part.bytes_max // SPLIT_BYTES_MIN, self.count))
        edges = [self.count * share // shares for share in range(shares + 1)]
        stretches = list(itertools.pairwise(edges))
        futures = [_pool().submit(work, *stretch) for stretch in stretches[1:]]
        try:
            results = [work(*stretches[0])]
        except BaseException:
            wait(
                future for future in futures if not future.cancel()
            )  # none may write to the caller's buffer later
            raise
        for future, stretch in zip(futures, stretches[1:], strict=True):
            # One that no thread has begun is done here instead of waiting behind others.
            results.append(work(*stretch) if future.cancel() else future.result())
        return list(zip(edges[1:], results, strict=True))

    def plain(self, start: int, stop: int) -> None:
        """Copy blocks [start, stop), one call per run of contiguous slots."""
        runs = self._runs(start, stop)
        if self.lengths is not None or 2 * len(runs) > stop - start:
            for target, source in self._moves(start, stop):
                for into, out_of in zip(target, source, strict=True):
                    np.copyto(into, out_of)
            return
        for first, begin, end in runs:
            slots = self._rows(first, end - begin)
            for array, (offset, length) in zip(self.arrays, self.cuts, strict=True):
                mine, theirs = array[start + begin : start + end], slots[:, offset : offset + length]
                np.copyto(*((theirs, mine) if self.inward else (mine, theirs)))

    def checked(self, digests: bytes, start: int, stop: int) -> int:
        """Copy blocks [start, stop) and check each; return the index of the first that is wrong, else `stop`."""
        digest, copyto = self._digest(), np.copyto
        wanted = struct.iter_unpack(f"{self.digest_bytes}s", self._digests_of(digests, start, stop))
        index = start
        for (target, source), pieces, (want,) in zip(
            self._moves(start, stop), self._digested(start, stop), wanted, strict=True
        ):
            for into, out_of in zip(target, source, strict=True):
                copyto(into, out_of)
            if b"".join(map(digest, pieces)) != want:
                return index
            index += 1
        return stop

    def digesting(self, start: int, stop: int) -> bytes:
        """Copy blocks [start, stop) and return the digests of the caller's side."""
        digest, copyto = self._digest(), np.copyto
        found: list[bytes] = []
        for (target, source), pieces in zip(
            self._moves(start, stop), self._digested(start, stop), strict=True
        ):
            for into, out_of in zip(target, source, strict=True):
                copyto(into, out_of)
            found.extend(map(digest, pieces))
        return b"".join(found)

    def _digests_of(self, digests: bytes, start: int, stop: int) -> bytes:
        return digests[start * self.digest_bytes : stop * self.digest_bytes]

    def _moves(self, start: int, stop: int) -> Iterator[tuple[tuple[Bytes, ...], tuple[Bytes, ...]]]:
        """Yield (target pieces, source pieces) of each block."""
        mine = self._trimmed(self._array_pieces(start, stop, self.cuts), self.cuts, start, stop)
        theirs = self._trimmed(self._slot_pieces(start, stop), self.cuts, start, stop)
        return zip(theirs, mine, strict=True) if self.inward else zip(mine, theirs, strict=True)

    def _digested(self, start: int, stop: int) -> _Pieces:
        """Yield the caller's side of each block, one piece per segment."""
        cuts = _segment_cuts(self.part)
        return self._trimmed(self._array_pieces(start, stop, cuts), cuts, start, stop)

    def _array_pieces(self, start: int, stop: int, cuts: tuple[_Cut, ...]) -> _Pieces:
        if len(self.arrays) == 1:
            return _columns(self.arrays[0][start:stop], cuts)
        return zip(*(array[start:stop] for array in self.arrays), strict=True)

    def _slot_pieces(self, start: int, stop: int) -> _Pieces:
        runs = self._runs(start, stop)
        if 2 * len(runs) > stop - start:
            return self._scattered(start, stop)
        return itertools.chain.from_iterable(
            _columns(self._rows(first, end - begin), self.cuts) for first, begin, end in runs
        )

    def _scattered(self, start: int, stop: int) -> _Pieces:
        memory, cuts = self.memory, self.cuts
        for page in self.slots[start:stop].tolist():
            base = page * PAGE_BYTES
            yield tuple([memory[base + offset : base + offset + length] for offset, length in cuts])

    def _runs(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        return self.arena.runs(self.slots[start:stop], stride_pages=self.part.stride_pages)

    def _rows(self, first_slot: int, count: int) -> Bytes:
        begin, stride = first_slot * PAGE_BYTES, self.part.stride_bytes
        return self.memory[begin : begin + count * stride].reshape(count, stride)

    def _trimmed(self, pieces: _Pieces, cuts: tuple[_Cut, ...], start: int, stop: int) -> _Pieces:
        return pieces if self.lengths is None else _trimmed(pieces, cuts, self.lengths[start:stop])

    def _digest(self) -> Callable[[Bytes], bytes]:
        is_contiguous = all(array.strides[1] == 1 or array.shape[1] == 1 for array in self.arrays)
        return _contiguous_digest if is_contiguous else _strided_digest


def _strided_digest(piece: Bytes) -> bytes:
    return _contiguous_digest(np.ascontiguousarray(piece))


def _segment_cuts(part: Part) -> tuple[_Cut, ...]:
    return tuple((segment.offset, segment.length) for segment in part.segments)


def _columns(rows: Bytes, cuts: Sequence[_Cut]) -> _Pieces:
    return zip(*(rows[:, offset : offset + length] for offset, length in cuts), strict=True)


def _trimmed(pieces: _Pieces, cuts: Sequence[_Cut], lengths: U32Array) -> _Pieces:
    offsets = [offset for offset, _ in cuts]
    for block, length in zip(pieces, lengths.tolist(), strict=True):
        yield tuple([piece[: max(0, length - offset)] for piece, offset in zip(block, offsets, strict=True)])


def _arrays_of(
    part: Part, buffer: Buffer, *, count: int, writing: bool
) -> tuple[tuple[Bytes, ...], tuple[_Cut, ...]]:
    """Return the caller's arrays and where each lies in a record.

    Errors: InvalidArgument naming the shape that was expected.
    """
    if isinstance(buffer, np.ndarray):
        arrays: tuple[Bytes, ...] = (buffer,)
        cuts: tuple[_Cut, ...] = ((0, part.bytes_max),)
    else:
        arrays, cuts = tuple(buffer), _segment_cuts(part)
    if len(arrays) != len(cuts):
        raise InvalidArgument(
            f"buffer of part {part.index}: {len(arrays)} arrays for {len(cuts)} segments; "
            f"give one per segment, or one array [blocks, {part.bytes_max}]"
        )
    for array, (_, length) in zip(arrays, cuts, strict=True):
        if array.dtype != np.uint8 or array.shape != (count, length):
            raise InvalidArgument(
                f"buffer of part {part.index}: {array.dtype} {array.shape}, expected uint8 {(count, length)}"
            )
        if writing and not array.flags.writeable:
            raise InvalidArgument(f"buffer of part {part.index}: the destination is read-only")
    return arrays, cuts


_executor: ThreadPoolExecutor | None = None
_executor_lock = threading.Lock()


def _pool() -> ThreadPoolExecutor:
    global _executor
    with _executor_lock:
        if _executor is None:
            workers = max(1, min(8, os.cpu_count() or 1))
            _executor = ThreadPoolExecutor(workers, thread_name_prefix="kvstore-copy")
        return _executor


def _forget_pool_in_child() -> None:
    """A forked child inherits the pool without its threads, and would wait for them for ever."""
    global _executor, _executor_lock
    _executor, _executor_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool_in_child)
