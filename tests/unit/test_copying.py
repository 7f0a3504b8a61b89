"""Copies between arena and buffers: every shape arrives, every wrong byte and every lost lease is caught."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore import copying, rows
from kvstore.arena import Arena
from kvstore.copying import Buffer, CopiedOut, copy_in, copy_out, digest_images
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.layout import Part, Segment
from kvstore.types import DIGEST_BYTES, PAGE_BYTES, MissReason
from tests.support.arenas import ARENA_ID, open_arena

Bytes = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
PAGES = 240


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    found = open_arena(tmp_path_factory.mktemp("arena") / "a", pages=PAGES)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _steps_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small blocks of these tests be split as large ones are."""
    monkeypatch.setattr(copying, "SPLIT_BYTES_MIN", 1)
    monkeypatch.setattr(copying, "STRETCH_BYTES", 5 * PAGE_BYTES)
    monkeypatch.setattr(copying, "LAYERED_BYTES", 3 * PAGE_BYTES)
    monkeypatch.setattr(rows, "NEAR_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(rows, "THIN_BYTES", 1)


def part_of(widths: list[int]) -> Part:
    """A part with segments of these widths."""
    offsets = np.cumsum([0, *widths]).tolist()
    segments = tuple(Segment(i, 1, offsets[i], width) for i, width in enumerate(widths))
    return Part(0, "kv", "all", offsets[-1], segments)


def slots_in(arena: Arena, part: Part, places: list[int]) -> U32:
    """Slots number `places` of an arena that holds slots of one part only."""
    return np.array([arena.first_page + place * part.stride_pages for place in places], np.uint32)


@dataclass
class Stored:
    """Blocks that lie in an arena, and all that a reader is told of them."""

    arena: Arena
    part: Part
    slots: U32
    lengths: U32
    payload: Bytes
    digests: bytes

    @staticmethod
    def put(arena: Arena, part: Part, slots: U32, lengths: U32 | None = None, *, seed: int = 0) -> Stored:
        payload = np.random.default_rng(seed).integers(0, 256, (len(slots), part.bytes_max), np.uint8)
        full = np.full(len(slots), part.bytes_max, np.uint32) if lengths is None else lengths
        copied = copy_in(arena, part, slots=slots, source=payload, lengths=lengths)
        assert copied.lengths == full.astype("<u4").tobytes()
        return Stored(arena, part, slots, full, payload, copied.digests)

    def read(
        self, into: Buffer, *, verify: bool = True, threads: int = 2, generations: U32 | None = None
    ) -> CopiedOut:
        now = np.zeros(0, np.uint32) if self.arena.closed else self.arena.generations[self.slots]
        return copy_out(
            self.arena, self.part, slots=self.slots, lengths=self.lengths, digests=self.digests, into=into,
            generations=now if generations is None else generations, verify=verify, threads=threads,
        )  # fmt: skip

    def buffer(self) -> Bytes:
        return np.zeros((len(self.slots), self.part.bytes_max), np.uint8)

    def expected(self) -> Bytes:
        """What a zeroed buffer must hold afterwards: the records, and zeros behind their ends."""
        inside = np.arange(self.part.bytes_max) < self.lengths[:, None]
        return np.where(inside, self.payload, 0).astype(np.uint8)


def plain_digests(part: Part, payload: Bytes, lengths: U32) -> bytes:
    found = []
    for row, length in zip(payload, lengths.tolist(), strict=True):
        record = row[:length].tobytes()
        found += [xxhash.xxh3_128_digest(record[s.offset : s.offset + s.length]) for s in part.segments]
    return b"".join(found)


@st.composite
def stored_blocks(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Segment widths, slot places (runs in any order, or scattered) and record lengths."""
    widths = draw(st.lists(st.integers(1, 2500), min_size=1, max_size=8))
    room = PAGES // part_of(widths).stride_pages
    runs = draw(st.lists(st.tuples(st.integers(0, room - 1), st.integers(1, 8)), max_size=6))
    if draw(st.booleans()):
        runs = [(first, 1) for first, _ in runs]
    spread = (place for first, length in runs for place in range(first, min(first + length, room)))
    places = list(dict.fromkeys(spread))  # a place once, in the order drawn
    total = sum(widths)
    record = st.just(total) if draw(st.booleans()) else st.integers(0, total)
    return widths, places, draw(st.lists(record, min_size=len(places), max_size=len(places)))


@given(
    blocks=stored_blocks(),
    shape=st.sampled_from(["rows", "wide", "trailing", "columns", "layered", "finer"]),
    data=st.data(),
)
def test_what_went_in_comes_out(
    arena: Arena, blocks: tuple[list[int], list[int], list[int]], shape: str, data: st.DataObject
) -> None:
    widths, places, records = blocks
    part, lengths = part_of(widths), np.array(records, np.uint32)
    stored = Stored.put(arena, part, slots_in(arena, part, places), lengths, seed=len(places))
    assert stored.digests == plain_digests(part, stored.payload, lengths)

    count = len(places)
    base, into = destination(part, count, shape, data)
    verify, threads = data.draw(st.booleans()), data.draw(st.integers(1, 4))
    assert stored.read(into, verify=verify, threads=threads) == CopiedOut(count)
    found = into if isinstance(into, np.ndarray) else np.concatenate(into, axis=1)
    assert (found == stored.expected()).all()
    assert base.sum() == found.sum(), "nothing beside the rows was written"

    again = copy_in(arena, part, slots=stored.slots, source=into, lengths=lengths, threads=threads)
    assert again.digests == stored.digests
    images = arena.images(stored.slots, stride_pages=part.stride_pages)
    assert digest_images(part, images, lengths) == stored.digests


def destination(part: Part, count: int, shape: str, data: st.DataObject) -> tuple[Bytes, Buffer]:
    """Return memory and a zeroed buffer that lies in it."""
    size = part.bytes_max
    if shape == "wide":
        base = np.zeros((count, size + data.draw(st.integers(1, 70))), np.uint8)
        return base, base[:, :size]
    if shape == "trailing":  # 16 bytes further into a page than the slots: memmove's trap
        pitch = part.stride_bytes + PAGE_BYTES
        memory = np.zeros(count * pitch + PAGE_BYTES, np.uint8)
        begin = (16 - memory.ctypes.data) % PAGE_BYTES
        return memory, memory[begin : begin + count * pitch].reshape(count, pitch)[:, :size]
    if shape == "columns":
        base = np.zeros((count * 2, size * 2), np.uint8)
        return base, base[::2, ::2]
    base = np.zeros((count, size), np.uint8)
    if shape == "rows":
        return base, base
    cuts = {segment.offset for segment in part.segments}
    if shape == "finer":
        cuts |= data.draw(st.sets(st.integers(0, size - 1), max_size=5))
    edges = [*sorted(cuts), size]
    return base, [base[:, a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("places", [[4, 5, 6, 7], [7, 4, 6, 5]])
def test_short_records_write_only_their_own_bytes_into_slots(
    arena: Arena, places: list[int], in_pieces: bool
) -> None:
    part = part_of([300, 200])
    slots, lengths = slots_in(arena, part, places), np.array([500, 301, 0, 7], np.uint32)
    payload = np.full((4, 500), 9, np.uint8)
    source: Buffer = [payload[:, :300], payload[:, 300:]] if in_pieces else payload
    pages = arena.bytes.reshape(-1, PAGE_BYTES)
    pages[slots] = 7
    copy_in(arena, part, slots=slots, source=source, lengths=lengths)
    inside = np.arange(PAGE_BYTES) < lengths[:, None]
    assert (pages[slots] == np.where(inside, 9, 7)).all()


@given(blocks=stored_blocks(), data=st.data())
def test_any_wrong_byte_is_caught(
    arena: Arena, blocks: tuple[list[int], list[int], list[int]], data: st.DataObject
) -> None:
    widths, places, records = blocks
    part, lengths = part_of(widths), np.array(records, np.uint32)
    stored = Stored.put(arena, part, slots_in(arena, part, places), lengths)
    full = np.flatnonzero(lengths).tolist()
    if not full:
        return
    hurt = data.draw(st.lists(st.sampled_from(full), min_size=1, max_size=3, unique=True))
    for block in hurt:
        at = int(stored.slots[block]) * PAGE_BYTES + data.draw(st.integers(0, records[block] - 1))
        arena.bytes[at] ^= data.draw(st.integers(1, 255))
    into: Buffer = stored.buffer()
    if data.draw(st.booleans()):
        into = [np.zeros((len(places), width), np.uint8) for width in widths]
    threads = data.draw(st.integers(1, 4))
    assert stored.read(into, threads=threads) == CopiedOut(min(hurt), MissReason.CORRUPT)
    good = into if isinstance(into, np.ndarray) else np.concatenate(into, axis=1)
    assert (good[: min(hurt)] == stored.expected()[: min(hurt)]).all()


@given(count=st.integers(1, 20), data=st.data())
def test_a_lost_lease_is_caught(arena: Arena, count: int, data: st.DataObject) -> None:
    part = part_of([300, 200])
    stored = Stored.put(arena, part, slots_in(arena, part, list(range(count))))
    then = arena.generations[stored.slots]
    moved = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3))
    for block in moved:
        arena.generations[stored.slots[block]] += 1
    verify = data.draw(st.booleans())
    found = stored.read(stored.buffer(), verify=verify, generations=then)
    assert found == CopiedOut(min(moved), MissReason.EVICTED)


def test_of_two_faults_the_earlier_counts(arena: Arena) -> None:
    part = part_of([300])
    stored = Stored.put(arena, part, slots_in(arena, part, list(range(8))))
    then = arena.generations[stored.slots]
    arena.bytes[int(stored.slots[5]) * PAGE_BYTES] ^= 1
    arena.generations[stored.slots[5]] += 1
    assert stored.read(stored.buffer(), generations=then) == CopiedOut(5, MissReason.EVICTED), (
        "one block, both faults"
    )
    arena.bytes[int(stored.slots[2]) * PAGE_BYTES] ^= 1
    assert stored.read(stored.buffer(), generations=then) == CopiedOut(2, MissReason.CORRUPT)
    assert stored.read(stored.buffer(), generations=then, verify=False) == CopiedOut(5, MissReason.EVICTED)


def test_a_reader_needs_no_write_access(arena: Arena) -> None:
    part = part_of([300, 200])
    stored = Stored.put(arena, part, slots_in(arena, part, [3, 1, 2]))
    reader = Arena.map(arena.path, expected_id=ARENA_ID)
    into = stored.buffer()
    stored.arena = reader
    assert stored.read(into) == CopiedOut(3)
    assert (into == stored.payload).all()
    with pytest.raises(InvalidArgument, match="read-only"):
        copy_in(reader, part, slots=stored.slots, source=into)


def test_large_blocks_through_two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(copying, "SPLIT_BYTES_MIN", 1 << 20)
    part = part_of([28_512] * 4)
    blocks = 2 * copying.SPLIT_BYTES_MIN // part.bytes_max + 1
    arena = open_arena(tmp_path / "a", pages=(blocks + 1) * part.stride_pages)
    stored = Stored.put(arena, part, slots_in(arena, part, list(range(blocks))))
    workers: set[str] = set()
    shares: list[int] = []
    spy, pool = rows.copy_bytes, copying._pool

    def noted(source: Bytes, target: Bytes) -> None:
        workers.add(threading.current_thread().name)
        spy(source, target)

    def asked() -> ThreadPoolExecutor:
        shares.append(1)
        return pool()

    monkeypatch.setattr(rows, "copy_bytes", noted)
    monkeypatch.setattr(copying, "_pool", asked)
    into = stored.buffer()
    assert stored.read(into, threads=1) == CopiedOut(blocks)
    assert workers == {threading.current_thread().name}, "one thread means the caller's"
    assert not shares
    assert stored.read(into, threads=2) == CopiedOut(blocks)
    assert len(shares) == 1, "one more thread is asked for"
    assert (into == stored.payload).all()
    stored.slots, stored.lengths = stored.slots[:-2], stored.lengths[:-2]
    stored.digests = stored.digests[: -2 * DIGEST_BYTES * 4]
    assert stored.read(into, threads=2) == CopiedOut(blocks - 2)
    assert len(shares) == 1, "too little for two"


@pytest.mark.parametrize("verify", [False, True])
def test_wrong_shapes_are_refused(arena: Arena, verify: bool) -> None:
    part = part_of([300, 200])
    stored = Stored.put(arena, part, slots_in(arena, part, [0, 1]))
    wrong: list[Buffer] = [
        np.zeros((1, 500), np.uint8),
        np.zeros((2, 499), np.uint8),
        np.zeros((2, 500), np.float32),
        np.zeros(1000, np.uint8),
        [np.zeros((2, 300), np.uint8)],
        [np.zeros((2, 200), np.uint8), np.zeros((2, 300), np.uint8)],
        [np.zeros((2, 300), np.uint8), np.zeros((1, 200), np.uint8)],
        [],
    ]
    for buffer in wrong:
        with pytest.raises(InvalidArgument, match="buffer of part 0"):
            stored.read(buffer, verify=verify)
    longer = np.zeros((3, 500), np.uint8)
    assert stored.read(longer, verify=verify) == CopiedOut(2)
    assert (longer[:2] == stored.payload).all()
    assert not longer[2].any()
    frozen = stored.buffer()
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgument, match="destination is read-only"):
        stored.read(frozen, verify=verify)


def test_wrong_extents_are_refused(arena: Arena) -> None:
    part = part_of([300, 200])
    stored = Stored.put(arena, part, slots_in(arena, part, [0, 1]))
    good = stored.digests
    stored.digests = good[:-1]
    with pytest.raises(InvalidArgument, match="63 bytes of digests"):
        stored.read(stored.buffer())
    assert stored.read(stored.buffer(), verify=False) == CopiedOut(2), "digests are not looked at"
    stored.digests = good
    with pytest.raises(InvalidArgument, match="1 generations"):
        stored.read(stored.buffer(), generations=arena.generations[:1])
    stored.lengths = np.array([500, 501], np.uint32)
    with pytest.raises(InvalidArgument, match="501"):
        stored.read(stored.buffer())
    stored.lengths = np.array([500], np.uint32)
    with pytest.raises(InvalidArgument, match="1 lengths"):
        stored.read(stored.buffer())
    with pytest.raises(InvalidArgument, match="allowed"):
        copy_in(arena, part, slots=np.array([0, 2], np.uint32), source=stored.payload)
    with pytest.raises(InvalidArgument, match="2 slots"):
        digest_images(part, arena.images(stored.slots, stride_pages=1), np.array([1], np.uint32))


def test_a_closed_arena_is_an_error_not_a_crash(tmp_path: Path) -> None:
    arena = open_arena(tmp_path / "a", pages=8)
    part = part_of([300])
    stored = Stored.put(arena, part, slots_in(arena, part, [0, 1]))
    now = arena.generations[stored.slots]
    arena.close()
    with pytest.raises(TierUnavailable, match="closed"):
        stored.read(stored.buffer(), generations=now)


def test_nothing_is_a_copy_too(arena: Arena) -> None:
    part = part_of([300, 200])
    none = np.zeros(0, np.uint32)
    into = np.zeros((0, 500), np.uint8)
    assert copy_in(arena, part, slots=none, source=into).digests == b""
    for verify in (False, True):
        found = copy_out(
            arena, part, slots=none, lengths=none, digests=b"", generations=none, into=into, verify=verify
        )
        assert found == CopiedOut(0)


def test_a_forked_child_copies_with_threads_of_its_own(arena: Arena) -> None:
    part = part_of([300])
    stored = Stored.put(arena, part, slots_in(arena, part, list(range(8))))
    assert stored.read(stored.buffer()) == CopiedOut(8)  # the parent's pool has threads now
    with copying._executor_lock:  # as another thread might at the moment of the fork
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a deadlock ends the child, not the test run
            signal.alarm(20)
            os._exit(0 if stored.read(stored.buffer()) == CopiedOut(8) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_digest_is_sixteen_bytes_a_segment(arena: Arena) -> None:
    part = part_of([1] * 8)
    assert len(Stored.put(arena, part, slots_in(arena, part, [0, 2])).digests) == 2 * 8 * DIGEST_BYTES
