"""Copies blocks between the arena and a caller's buffers, and checks or takes their digests on the way.

Each block is digested right after its own copy, while it is in cache: a second pass over memory would cost
more than the copy. The digest of a segment covers what the record holds of it; a segment behind the end of a
short record has the digest of no bytes.
"""

from __future__ import annotations

import functools
import itertools
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
LAYERED_BYTES = 4 << 20
"""Layer-major copies go over this much of the arena at a time, whose later layers are then still near."""

Bytes = npt.NDArray[np.uint8]
Buffer = Bytes | Sequence[Bytes]
"""Blocks of one part: an array [blocks, bytes_max], or one [blocks, length] for each segment, or for each of
some finer layer ranges, in order; every segment must begin with an array. Rows may be strided."""

_Pieces = Iterator[tuple[Bytes, ...]]
_Block = Bytes | tuple[Bytes, ...]
_Cut = tuple[int, int]
_Result = TypeVar("_Result")
# Copies source to destination; releases the GIL. np.copyto ends in memmove, whose `rep movsb` loses 30 % on
# some x86 when both are not aligned alike (numpy's own large arrays start 16 bytes into a page, slots at its
# beginning); the loop of a ufunc does not care.
_copy_bytes = cast("Callable[[Bytes, Bytes], Bytes]", np.positive)
_digest_bytes = cast("Callable[[Bytes], bytes]", xxhash.xxh3_128_digest)


@dataclass(frozen=True, slots=True)
class CopiedOut:
    """The first `good` blocks of the destination are right; `reason` says what is wrong with the next."""

    good: int
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class CopiedIn:
    """What a commit tells of the blocks copied in, packed: lengths u32[n], digests 16 x segments x n."""

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
    present = arena.generations
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
    stale = np.flatnonzero(present[slots[: good + 1]] != generations[: good + 1])
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
    return b"".join(_digest_pieces(block) for block in _trimmed(pieces, cuts, lengths))


@dataclass(frozen=True, slots=True)
class _Copy:
    """One checked request: the caller's `arrays`, `cuts` their places in a record; lengths None: all full."""

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
        longest = int(lengths.max(initial=0))
        if len(lengths) != len(slots) or longest > part.bytes_max:
            raise InvalidArgument(
                f"copy of part {part.index}: {len(slots)} slots, {len(lengths)} lengths of at most {longest} "
                f"bytes; the part's limit is {part.bytes_max}"
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
            wait([f for f in futures if not f.cancel()])  # none may write to the caller's buffer later
            raise
        for future, stretch in zip(futures, stretches[1:], strict=True):
            # One that no thread has begun is done here instead of waiting behind others.
            results.append(work(*stretch) if future.cancel() else future.result())
        return list(zip(edges[1:], results, strict=True))

    def plain(self, start: int, stop: int) -> None:
        """Copy blocks [start, stop), one call per run of contiguous slots."""
        runs = self.arena.runs(self.slots[start:stop], stride_pages=self.part.stride_pages)
        if self.lengths is not None or 2 * len(runs) > stop - start:
            copy = self._copy()
            for source, target, _ in self._steps(start, stop):
                copy(source, target)
            return
        step = max(1, LAYERED_BYTES // self.part.stride_bytes) if len(self.arrays) > 1 else max(1, self.count)
        for first, begin, end in runs:
            for low in range(begin, end, step):
                slot = first + (low - begin) * self.part.stride_pages
                self._plain_run(slot, start + low, start + min(low + step, end))

    def _plain_run(self, first_slot: int, start: int, stop: int) -> None:
        begin, count, stride = first_slot * PAGE_BYTES, stop - start, self.part.stride_bytes
        slots = self.memory[begin : begin + count * stride].reshape(count, stride)
        for array, (offset, length) in zip(self.arrays, self.cuts, strict=True):
            mine, theirs = array[start:stop], slots[:, offset : offset + length]
            _copy_bytes(*((mine, theirs) if self.inward else (theirs, mine)))

    def checked(self, digests: bytes, start: int, stop: int) -> int:
        """Copy blocks [start, stop), check each, and return the index of the first wrong one, else `stop`."""
        copy, digest, size = self._copy(), self._digest(), self.digest_bytes
        wanted = struct.iter_unpack(f"{size}s", digests[start * size : stop * size])
        index = start
        for (source, target, digested), (want,) in zip(self._steps(start, stop), wanted, strict=True):
            copy(source, target)
            if digest(digested) != want:
                return index
            index += 1
        return stop

    def digesting(self, start: int, stop: int) -> bytes:
        """Copy blocks [start, stop) and return the digests of the caller's side."""
        copy, digest = self._copy(), self._digest()
        found: list[bytes] = []
        for source, target, digested in self._steps(start, stop):
            copy(source, target)
            found.append(digest(digested))
        return b"".join(found)

    @property
    def _is_whole(self) -> bool:
        """Whether every block is copied in one piece; then no tuples are made, worth 5 % of a hit."""
        return self.lengths is None and len(self.cuts) == 1

    def _steps(self, start: int, stop: int) -> Iterator[tuple[_Block, _Block, _Block]]:
        """Yield (source, target, the caller's side cut for digesting) of each block."""
        mine, theirs = self._mine(start, stop, self.cuts), self._theirs(start, stop)
        cuts = _segment_cuts(self.part) if len(self.cuts) == 1 else self.cuts
        digested = self._mine(start, stop, cuts)
        source, target = (mine, theirs) if self.inward else (theirs, mine)
        return zip(source, target, digested, strict=True)

    def _mine(self, start: int, stop: int, cuts: tuple[_Cut, ...]) -> Iterable[_Block]:
        if self._is_whole and len(cuts) == 1:
            return self.arrays[0][start:stop]
        if len(self.arrays) == 1:
            pieces = _columns(self.arrays[0][start:stop], cuts)
        else:
            pieces = zip(*(array[start:stop] for array in self.arrays), strict=True)
        return pieces if self.lengths is None else _trimmed(pieces, cuts, self.lengths[start:stop])

    def _theirs(self, start: int, stop: int) -> Iterable[_Block]:
        memory, cuts = self.memory, self.cuts
        begins = (self.slots[start:stop].astype(np.int64) * PAGE_BYTES).tolist()
        if self._is_whole:
            size = self.part.bytes_max
            return [memory[begin : begin + size] for begin in begins]
        pieces = (tuple([memory[begin + o : begin + o + size] for o, size in cuts]) for begin in begins)
        return pieces if self.lengths is None else _trimmed(pieces, cuts, self.lengths[start:stop])

    def _copy(self) -> Callable[[_Block, _Block], object]:
        return cast("Callable[[_Block, _Block], object]", _copy_bytes if self._is_whole else _copy_pieces)

    def _digest(self) -> Callable[[_Block], bytes]:
        segments = _segment_cuts(self.part)
        is_strided = any(array.strides[1] != 1 for array in self.arrays if array.shape[1] > 1)
        if self._is_whole and len(segments) == 1:
            return cast("Callable[[_Block], bytes]", _digest_strided if is_strided else _digest_bytes)
        if not is_strided and len(self.cuts) in (1, len(segments)):
            return cast("Callable[[_Block], bytes]", _digest_pieces)
        cuts = segments if len(self.cuts) == 1 else self.cuts
        return cast(
            "Callable[[_Block], bytes]", functools.partial(_digest_groups, groups=_groups(cuts, segments))
        )


def _copy_pieces(source: tuple[Bytes, ...], target: tuple[Bytes, ...]) -> None:
    for out_of, into in zip(source, target, strict=True):
        _copy_bytes(out_of, into)


def _digest_pieces(pieces: tuple[Bytes, ...]) -> bytes:
    return b"".join(map(_digest_bytes, pieces))


def _digest_strided(piece: Bytes) -> bytes:
    return _digest_bytes(np.ascontiguousarray(piece))


def _digest_groups(pieces: tuple[Bytes, ...], groups: Sequence[slice]) -> bytes:
    """Digest segments that come in several pieces, or in strided ones."""
    found = []
    for group in groups:
        state = xxhash.xxh3_128()
        for piece in pieces[group]:
            state.update(np.ascontiguousarray(piece).data)
        found.append(state.digest())
    return b"".join(found)


def _groups(cuts: Sequence[_Cut], segments: Sequence[_Cut]) -> list[slice]:
    """Return which of the cuts make up each segment."""
    offsets = [offset for offset, _ in cuts]
    edges = [offsets.index(offset) for offset, _ in segments] + [len(cuts)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def _segment_cuts(part: Part) -> tuple[_Cut, ...]:
    return tuple((segment.offset, segment.length) for segment in part.segments)


def _columns(rows: Bytes, cuts: Sequence[_Cut]) -> _Pieces:
    return zip(*(rows[:, offset : offset + length] for offset, length in cuts), strict=True)


def _trimmed(pieces: _Pieces, cuts: Sequence[_Cut], lengths: U32Array) -> _Pieces:
    """Cut the pieces of each block at the end of its record."""
    offsets = [offset for offset, _ in cuts]
    for block, length in zip(pieces, lengths.tolist(), strict=True):
        yield tuple([piece[: max(0, length - offset)] for piece, offset in zip(block, offsets, strict=True)])


def _arrays_of(
    part: Part, buffer: Buffer, *, count: int, writing: bool
) -> tuple[tuple[Bytes, ...], tuple[_Cut, ...]]:
    """Return the caller's arrays and where each lies in a record.

    Errors: InvalidArgument naming the shape that was expected.
    """
    arrays = (buffer,) if isinstance(buffer, np.ndarray) else tuple(buffer)
    for array in arrays:
        if array.dtype != np.uint8 or array.ndim != 2 or len(array) != count:
            raise InvalidArgument(
                f"buffer of part {part.index}: {array.dtype} {array.shape}, expected uint8 [{count}, bytes]"
            )
        if writing and not array.flags.writeable:
            raise InvalidArgument(f"buffer of part {part.index}: the destination is read-only")
    widths = [array.shape[1] for array in arrays]
    offsets = [0, *itertools.accumulate(widths)]
    segments = _segment_cuts(part)
    is_whole = widths == [part.bytes_max]
    if offsets[-1] != part.bytes_max or not (is_whole or {offset for offset, _ in segments} <= set(offsets)):
        raise InvalidArgument(
            f"buffer of part {part.index}: arrays are {widths} bytes wide, expected one of {part.bytes_max}, "
            f"or one per segment (or finer): {[length for _, length in segments]}"
        )
    return arrays, tuple(zip(offsets[:-1], widths, strict=True))


_executor: ThreadPoolExecutor | None = None
_executor_lock = threading.Lock()


def _pool() -> ThreadPoolExecutor:
    global _executor
    with _executor_lock:
        if _executor is None:
            workers = min(8, len(os.sched_getaffinity(0)))
            _executor = ThreadPoolExecutor(workers, thread_name_prefix="kvstore-copy")
        return _executor


def _forget_pool_in_child() -> None:
    """A forked child inherits the pool without its threads, and perhaps with its locks held."""
    global _executor, _executor_lock
    _executor, _executor_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool_in_child)
