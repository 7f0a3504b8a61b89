"""Copies blocks between the arena and a caller's buffers, and checks or takes their digests on the way.

Blocks are digested right after their own copy, while they are in cache: a second pass over memory would cost
more than the copy. Yet many are copied in one call: threads that meet at the interpreter after every block
wait for each other longer than a copy takes.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import numpy as np

from kvstore.api import U32Array
from kvstore.arena import Arena
from kvstore.errors import InvalidArgument
from kvstore.layout import Part
from kvstore.rows import (
    Block,
    Buffer,
    Bytes,
    Rows,
    copier,
    copy_bytes,
    copy_pieces,
    digests_of,
    near_blocks,
    new_stage,
    trimmed,
)
from kvstore.types import DIGEST_BYTES, PAGE_BYTES, MissReason

__all__ = ["Buffer", "Bytes", "CopiedIn", "CopiedOut", "copy_in", "copy_out", "digest_images"]

COPY_THREADS = 2
SPLIT_BYTES_MIN = 4 << 20
"""A thread is not worth waking for less than this: in a virtual machine half of it is copied meanwhile."""
STRETCH_BYTES = 32 << 20
"""What a thread copies before it looks for more: every turn is one more meeting at the interpreter, where a
thread that has to be woken waits as long as it copies a mebibyte."""
LAYERED_BYTES = 12 << 20
"""Layer-major copies go over this much of the arena at a time, whose later layers are then still near."""

_Result = TypeVar("_Result")
_T = TypeVar("_T")


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
    Shapes: slots, lengths, generations u32[n]; digests 16 x segments x n; into >= n rows.
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

    Shapes: slots and lengths u32[n] (default: every record is bytes_max long); source >= n rows.
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
    edges = itertools.pairwise(itertools.accumulate(map(len, rows), initial=0))
    shares = zip(rows, edges, strict=True)
    return b"".join(
        digest for block, (start, stop) in shares for digest in digests_of(part, block, lengths[start:stop])
    )


@dataclass(frozen=True, slots=True)
class _Copy:
    """One checked request: blocks in slots of the arena's `memory`, and their rows in the caller's."""

    memory: Bytes
    arena: Arena
    part: Part
    slots: U32Array
    rows: Rows
    inward: bool

    @staticmethod
    def plan(
        arena: Arena, part: Part, *, slots: U32Array, lengths: U32Array, buffer: Buffer, inward: bool
    ) -> _Copy:
        memory = arena.bytes  # one name for the whole copy: closing the arena meanwhile then hurts nobody
        arena.runs(slots, stride_pages=part.stride_pages)
        if len(lengths) != len(slots):
            raise InvalidArgument(f"copy of part {part.index}: {len(slots)} slots, {len(lengths)} lengths")
        rows = Rows.of(part, buffer, lengths=lengths, writing=not inward)
        return _Copy(memory, arena, part, slots, rows, inward)

    @property
    def count(self) -> int:
        return len(self.slots)

    @property
    def digest_bytes(self) -> int:
        return DIGEST_BYTES * len(self.part.segments)

    def spread(self, work: Callable[[int, int], _Result], *, threads: int) -> list[tuple[int, _Result]]:
        """Return (stop, work(start, stop)) of consecutive stretches, done by several threads.

        Each takes the next stretch when it is done with one: a thread that starts late, or has to share its
        core, then holds nobody up.
        """
        size = self.count * self.part.bytes_max
        shares = max(1, min(threads, size // SPLIT_BYTES_MIN, self.count))
        if shares == 1:
            return [(self.count, work(0, self.count))]
        pieces = min(self.count, max(shares, size // STRETCH_BYTES))
        edges = [self.count * piece // pieces for piece in range(pieces + 1)]
        stretches = iter(list(itertools.pairwise(edges)))
        found: dict[int, _Result] = {}

        def labour() -> None:
            for start, stop in stretches:
                found[stop] = work(start, stop)

        helpers = [_pool().submit(labour) for _ in range(shares - 1)]
        try:
            labour()
        finally:
            for _ in stretches:  # after a failure nobody takes another one
                pass
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)  # none may write to the caller's buffer later
        for helper in begun:
            helper.result()
        return sorted(found.items(), key=operator.itemgetter(0))

    def plain(self, start: int, stop: int) -> None:
        """Copy blocks [start, stop), one call per run of contiguous slots."""
        is_layered = len(self.rows.arrays) > 1
        step = max(1, LAYERED_BYTES // self.part.stride_bytes) if is_layered else self.count
        through_stage = is_layered and self.rows.lengths is None and not self._coalesces(start, stop)
        for _ in self._staged(start, stop) if through_stage else self._copied_stretches(start, stop, step):
            pass

    def _copied_stretches(self, start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
        """Copy blocks [start, stop), at most `step` at a time; yield the begin and end of what was copied."""
        if self.rows.lengths is None and self._coalesces(start, stop):
            for first, begin, end in self._runs(start, stop):
                yield from self._copied_run(first, start + begin, start + end, step)
            return
        copies = map(self._copy(), *self._directed(self.rows.blocks(start, stop), self._theirs(start, stop)))
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            for _ in itertools.islice(copies, end - begin):
                pass
            yield begin, end

    def _coalesces(self, start: int, stop: int) -> bool:
        """Say whether slots of blocks [start, stop) mostly lie beside each other."""
        return 2 * len(self._runs(start, stop)) <= stop - start

    def checked(self, digests: bytes, start: int, stop: int) -> int:
        """Copy blocks [start, stop), check each, and return the index of the first wrong one, else `stop`."""
        size, index = self.digest_bytes, start
        for found in self._copied(start, stop):
            wanted = digests[index * size : index * size + len(found)]
            if found != wanted:
                wrong = next(at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
                return index + wrong // size
            index += len(found) // size
        return stop

    def digesting(self, start: int, stop: int) -> bytes:
        """Copy blocks [start, stop) and return the digests of the caller's side."""
        return b"".join(self._copied(start, stop))

    def _copied(self, start: int, stop: int) -> Iterator[bytes]:
        """Copy a few blocks at a time and yield their packed digests, taken while they are in cache: of the
        caller's own, or of the stage that stands between its pieces and the slot.
        """
        rows = self.rows
        if rows.are_records:
            digests, segments = rows.digests(start, stop), len(self.part.segments)
            for begin, end in self._copied_stretches(start, stop, near_blocks(self.part)):
                yield b"".join(itertools.islice(digests, (end - begin) * segments))
            return
        for begin, end, stage in self._staged(start, stop):
            yield b"".join(rows.staged(begin, end, stage).digests(0, end - begin))

    def _staged(self, start: int, stop: int) -> Iterator[tuple[int, int, Bytes]]:
        """Copy blocks [start, stop) over a stage; yield begin and end of what was copied, and the stage."""
        rows, stage = self.rows, new_stage(self.part, stop - start)
        between = self._staging(stage, start, stop)
        for begin in range(start, stop, len(stage)):
            end = min(begin + len(stage), stop)
            if self.inward:
                rows.gather(begin, end, stage)
            between(begin, end)
            if not self.inward:
                rows.scatter(begin, end, stage)
            yield begin, end, stage

    def _staging(self, stage: Bytes, start: int, stop: int) -> Callable[[int, int], object]:
        """Return what copies blocks [begin, end) of [start, stop) between a stage and their slots."""
        runs = self._runs(start, stop)
        if self.rows.lengths is None and len(runs) == 1:
            slots = self._slot_rows(runs[0][0], stop - start)[:, : self.part.bytes_max]

            def straight(begin: int, end: int) -> None:
                copy_bytes(*self._directed(stage[: end - begin], slots[begin - start : end - start]))

            return straight

        def around(begin: int, end: int) -> None:
            staged = self.rows.staged(begin, end, stage)
            replace(self, slots=self.slots[begin:end], rows=staged).plain(0, end - begin)

        return around

    def _runs(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        return self.arena.runs(self.slots[start:stop], stride_pages=self.part.stride_pages)

    def _copied_run(self, first_slot: int, start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
        """Copy blocks [start, stop), whose slots are contiguous from `first_slot` on; yield as above."""
        count = stop - start
        slots = self._slot_rows(first_slot, count)
        pairs = [
            self._directed(array[start:stop], slots[:, offset : offset + length])
            for array, (offset, length) in zip(self.rows.arrays, self.rows.cuts, strict=True)
        ]
        moves = [(copier(source, target), source, target) for source, target in pairs]
        for low in range(0, count, step):
            high = min(low + step, count)
            for copy, source, target in moves:
                copy(source[low:high], target[low:high])
            yield start + low, start + high

    def _slot_rows(self, first_slot: int, count: int) -> Bytes:
        """Return contiguous slots as rows. Shapes: [count, stride_bytes]."""
        begin, stride = first_slot * PAGE_BYTES, self.part.stride_bytes
        return self.memory[begin : begin + count * stride].reshape(count, stride)

    def _directed(self, mine: _T, theirs: _T) -> tuple[_T, _T]:
        """Return (source, target)."""
        return (mine, theirs) if self.inward else (theirs, mine)

    def _theirs(self, start: int, stop: int) -> Iterable[Block]:
        memory, cuts, lengths = self.memory, self.rows.cuts, self.rows.lengths
        begins = (self.slots[start:stop].astype(np.int64) * PAGE_BYTES).tolist()
        if self.rows.are_whole:
            size = self.part.bytes_max
            return [memory[begin : begin + size] for begin in begins]
        pieces = (tuple([memory[begin + o : begin + o + size] for o, size in cuts]) for begin in begins)
        return pieces if lengths is None else trimmed(pieces, cuts, lengths[start:stop])

    def _copy(self) -> Callable[[Block, Block], object]:
        pages = self.memory.reshape(-1, PAGE_BYTES)
        copy = copier(*self._directed(self.rows.arrays[0], pages))
        if self.rows.are_whole:
            return cast("Callable[[Block, Block], object]", copy)
        return cast("Callable[[Block, Block], object]", functools.partial(copy_pieces, copy))


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
