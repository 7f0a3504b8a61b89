"""Verify: re-read and check every digest, in host memory and on SSD."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.frames import Frame, PartSlots
from kvstore.core.searching import Search
from kvstore.core.sleepers import Sleeper
from kvstore.tiers.base import FrameRead, ReadResult, Tier
from kvstore.types import HASH_BYTES, Fingerprint, MissReason, key_at
from kvstore.types import Tier as TierName

Decision = Callable[[], AbstractContextManager[None]]
CHUNK_BYTES = 1 << 20
READ_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class VerifyFault:
    """One block whose bytes are not what they were."""

    namespace: Fingerprint
    key: bytes
    tier: TierName
    detail: str


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Progress after one stretch of blocks; copies in two tiers count twice."""

    blocks_done: int
    blocks_total: int
    bytes_done: int
    faults: tuple[VerifyFault, ...]


def verify(
    catalog: Catalog,
    ssd: Tier | None,
    decision: Decision,
    states: Collection[NamespaceState],
    *,
    search: Search,
    wake: Callable[[list[Sleeper]], None],
) -> Iterator[VerifyStep]:
    """Check all blocks of some namespaces that are there when it comes by; bad ones are dropped, so that they
    cannot be served. `wake` wakes frames.
    """
    frames: dict[Frame, None] = {}
    total, done, done_bytes = search.blocks_asleep(states), 0, 0
    for nodes in search.awake(states):
        with decision():
            fresh = {
                p.frame: None for node in nodes if node.count for p in node.slices if p.frame not in frames
            }
            total += sum(map(_copies, fresh))
            frames |= fresh
    for frame in chain(frames, _woken(catalog, decision, states, search, wake)):
        for blocks, faults in _check(catalog, ssd, decision, frame):
            done += blocks
            done_bytes += blocks * frame.block_stride_bytes
            yield VerifyStep(done, total, done_bytes, faults)
    yield VerifyStep(done, done, done_bytes, ())


def _woken(
    catalog: Catalog,
    decision: Decision,
    states: Iterable[NamespaceState],
    search: Search,
    wake: Callable[[list[Sleeper]], None],
) -> Iterator[Frame]:
    for some in search.asleep([state.fingerprint for state in states]):
        with decision():
            here = filter(catalog.sleepers.is_here, some)
            places = {catalog.sleepers.location(sleeper) for sleeper in here}
        wake(some)
        with decision():
            segments = filter(None, map(catalog.segments.get, {place.segment for place in places}))
            frames = [frame for segment in segments for frame in segment.frames if frame.location in places]
        yield from frames


def _copies(frame: Frame) -> int:
    return int(frame.resident(0, frame.count).sum()) + (frame.count if frame.location is not None else 0)


def _check(
    catalog: Catalog, ssd: Tier | None, decision: Decision, frame: Frame
) -> Iterator[tuple[int, tuple[VerifyFault, ...]]]:
    with decision():
        if frame.dead:
            return
        end = frame.count
        catalog.hold(frame, end)
    try:
        yield from _check_host(catalog, decision, frame)
        if ssd is not None:
            yield from _check_ssd(catalog, ssd, decision, frame)
    finally:
        with decision():
            catalog.unhold(frame, end)


def _check_host(
    catalog: Catalog, decision: Decision, frame: Frame
) -> Iterator[tuple[int, tuple[VerifyFault, ...]]]:
    mask = frame.resident(0, frame.count)
    faults: list[VerifyFault] = []
    for block in mask.nonzero()[0].tolist():
        host = frame.host
        if host is not None and not all(_intact(catalog, part, block) for part in host):
            faults.append(
                VerifyFault(frame.fingerprint, key_at(frame.keys, block), TierName.HOST, "digest differs")
            )
            with decision():
                catalog.distrust(frame, block)
    if mask.any():
        yield int(mask.sum()), tuple(faults)


def _intact(catalog: Catalog, slots: PartSlots, block: int) -> bool:
    (image,) = catalog.memory.images(slots.slots[block : block + 1], stride_pages=slots.part.stride_pages)
    length = int(slots.lengths[block])
    found = b"".join(
        xxhash.xxh3_128_digest(image[s.offset : min(s.offset + s.length, max(length, s.offset))])
        for s in slots.part.segments
    )
    return bool(found == slots.digests[block].tobytes())


def _check_ssd(
    catalog: Catalog, ssd: Tier, decision: Decision, frame: Frame
) -> Iterator[tuple[int, tuple[VerifyFault, ...]]]:
    location = frame.location
    if location is None:
        return
    step = max(1, CHUNK_BYTES // frame.block_stride_bytes)
    for start in range(0, frame.count, step):
        count = min(step, frame.count - start)
        keys = frame.keys[start * HASH_BYTES : (start + count) * HASH_BYTES]
        good, detail, reason = count, "", MissReason.CORRUPT
        for position, part in enumerate(frame.parts):
            with decision():
                slots = catalog.allocate(count, part)
            into = catalog.memory.images(slots, stride_pages=part.stride_pages)
            read = FrameRead(
                location, frame.count, frame.parts, position, start, keys[: len(slots) * HASH_BYTES], into
            )
            result = _read(catalog, ssd, decision, read, slots)
            if result.good < len(slots) and result.good < good:
                good, reason = result.good, result.reason or MissReason.CORRUPT
                detail = result.detail or str(reason)
        faults: tuple[VerifyFault, ...] = ()
        if good < count:
            faults = (VerifyFault(frame.fingerprint, key_at(frame.keys, start + good), TierName.SSD, detail),)
            # What cannot be read now, for want of a disk or a key, may be read again.
            if reason in (MissReason.CORRUPT, MissReason.DELETED):
                with decision():
                    catalog.drop_block(frame, start + good, reason)
        yield count, faults


def _read(
    catalog: Catalog, ssd: Tier, decision: Decision, read: FrameRead, slots: npt.NDArray[np.uint32]
) -> ReadResult:
    """Read into slots that are given back once the tier is done with them, even if nobody waits by then."""

    def done(_: Future[ReadResult]) -> None:
        with decision():
            catalog.free_slots(slots)

    try:
        (future,) = ssd.read_into([read])
    except BaseException:
        with decision():
            catalog.free_slots(slots)
        raise
    try:
        result = future.result(READ_SECONDS_MAX)
    except TimeoutError:
        future.add_done_callback(done)
        return ReadResult(0, b"", b"", MissReason.TIER_DOWN, f"nothing came in {READ_SECONDS_MAX:.0f} s")
    except BaseException:
        done(future)
        raise
    done(future)
    return result
