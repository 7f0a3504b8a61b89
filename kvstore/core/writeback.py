"""Write-behind: which frames go to SSD next, in what order, and who waits for them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvstore.core.catalog import Catalog
from kvstore.core.census import Census
from kvstore.core.farewells import dismiss_and_bury
from kvstore.core.frames import Frame, Node
from kvstore.core.index import RunIndex
from kvstore.core.limits import Limits
from kvstore.core.plan import Plan
from kvstore.retention import RetentionClass
from kvstore.tiers.base import FrameHeader, FrameWrite, Loss, PartImage, Tier, WriteResult
from kvstore.types import HASH_BYTES, Admission, Fingerprint, MissReason

if TYPE_CHECKING:
    from kvstore.core.puts import PendingPut


class WriteBack:
    """Frames on their way to SSD. Ancestors are queued before descendants, and the tier keeps the order."""

    def __init__(self, catalog: Catalog, limits: Limits, tier: Tier | None, census: Census) -> None:
        self._catalog = catalog
        self._census = census
        self._limits = limits
        self._tier = tier
        self._queue: OrderedDict[Frame, None] = OrderedDict()
        self.in_flight_bytes = 0
        self._in_flight: dict[Frame, None] = {}
        self._has_progress = False
        self._progress_at = 0.0
        self._leaving: dict[int, int] = {}
        self._refused: dict[Frame, None] = {}
        self._losses: list[Loss] = []
        """Of frames that have to wake first."""

    def reaches(self, retention_class: str) -> bool:
        """Say whether there is an SSD for what a class holds."""
        return self._tier is not None and self._catalog.retention.held_by(retention_class).reaches_ssd

    def enqueue(self, node: Node) -> list[Frame]:
        """Queue what of a node and its ancestors is not on SSD yet, ancestors first; returns the frames not
        yet durable. Where one is not admitted, what follows it is not either.
        """
        missing: list[Frame] = []
        is_admitted = True
        if not self.reaches(node.retention_class):
            return missing
        for item in reversed(RunIndex.path(node)):
            for index, piece in enumerate(item.slices):
                frame = piece.frame
                if frame.location is None and not frame.dead and frame not in missing:
                    if not (frame.queued or frame.holds or item.loose) and frame.count != piece.count:
                        frame = self._catalog.carve(item, index)
                    missing.append(frame)
                    is_admitted = is_admitted and self._admits(item, frame)
                    if is_admitted:
                        self._queue_frame(frame, piece.count)
        return missing

    def bases(self, put: PendingPut, sides: Iterable[Node]) -> list[Frame] | None:
        """Queue the blocks that side parts belong to, with their ancestors; returns the frames not yet
        durable, None when a block is absent or stays in host memory: then a side part on SSD is of no use.
        """
        found: list[Frame] = []
        _, stretches = put.state.runs.walk_behind(put.parent, put.keys)
        base = {index: node for at, node, count in stretches for index in range(at, at + count)}
        for side in sides:
            last = put.names.index(side.tail)
            if not base.keys() >= set(range(last + 1 - side.count, last + 1)):
                return None
            node = base[last]
            missing = self.enqueue(node)
            path = {piece.frame for item in RunIndex.path(node) for piece in item.slices}
            if any(frame.location is None and frame not in missing for frame in path):
                return None
            found += missing
        return found

    def _admits(self, node: Node, frame: Frame) -> bool:
        """Say whether a frame may go to SSD by its class: at its put, or once it was used after that. One
        that the ledger saw leave was used before: it is put again.
        """
        if self._catalog.retention.held_by(node.retention_class).admission is Admission.FIRST:
            return True
        left = self._catalog.ledger.reason(frame.keys[:HASH_BYTES], space=frame.fingerprint)
        return frame.uses > 1 or left in (MissReason.EVICTED, MissReason.EXPIRED)

    def _queue_frame(self, frame: Frame, wanted: int) -> None:
        """Queue a frame, unless it is shared with runs that may not come along."""
        if not frame.queued and frame.count == wanted and frame.fully_resident():
            frame.queued = True
            self._queue[frame] = None

    def next(self, *, is_reading: bool) -> list[tuple[Frame, FrameWrite]]:
        """Return the next frames to write, as many as the bounded queue takes, held until `finished`. While
        loads wait for their turn few bytes are under way: what is written behind must not hold up who reads.
        """
        limits = self._limits
        limit = limits.write_bytes_behind_reads if is_reading else limits.write_queue_bytes_max
        ready: list[tuple[Frame, FrameWrite]] = []
        while self._queue:
            frame = next(iter(self._queue))
            size = frame_bytes(frame)
            if self.in_flight_bytes and self.in_flight_bytes + size > limit:
                break
            del self._queue[frame]
            self._make_room(size)
            is_admitted = self._catalog.quotas.admit_write(frame, size)
            size = frame_bytes(frame)
            if not is_admitted or frame.dead or not frame.nodes or not frame.fully_resident():
                self._settle(frame, durable=False)
                continue
            if self._catalog.lost_any(frame):
                # What was deleted must not reach the disk at all; the rest goes once nothing holds the frame.
                self._refused[frame] = None
                self._settle(frame, durable=False)
                continue
            self._catalog.hold(frame, frame.count)
            self.in_flight_bytes += size
            self._catalog.quotas.writing_bytes[frame.retention_class] += size
            self._has_progress |= not self._in_flight  # waiting begins with the first of them
            self._in_flight[frame] = None
            ready.append((frame, self._write(frame)))
        return ready

    def _make_room(self, size: int) -> None:
        """Let segments go until a frame fits; dead bytes count until their segment is gone."""
        capacity = self._limits.ssd_capacity_bytes
        if not capacity or self._tier is None:
            return
        used = max(
            self._catalog.segments.used_bytes, self._tier.usage().used_bytes - sum(self._leaving.values())
        )
        excess = used + self.in_flight_bytes + size - capacity
        if excess <= 0:
            return
        now = self._catalog.retention.now()
        sizes = self._tier.sealed_bytes()
        while excess > 0:
            victim = self._catalog.segments.victim(
                among=sizes, measure=lambda segment: self._census.measure(segment, now)
            )
            if victim is None:
                return
            freed = max(sizes[victim.number], victim.bytes)
            self._catalog.release_segment(victim, MissReason.EVICTED)
            self._leaving[victim.number] = freed
            excess -= freed

    def is_writing(self, frame: Frame) -> bool:
        """Say whether the tier has a frame at hand."""
        return frame in self._in_flight

    def unlinked(self, segments: list[int]) -> None:
        """Segments are gone: the tier's count no longer includes them."""
        for segment in segments:
            self._leaving.pop(segment, None)

    def _write(self, frame: Frame) -> FrameWrite:
        # Of the runs that share a frame the one that expires first speaks for it: better forgotten than kept.
        node = min(frame.nodes, key=self._catalog.retention.end)
        held_by = self._catalog.retention.held_by(node.retention_class)
        assert frame.host is not None
        header = FrameHeader(
            namespace=frame.fingerprint,
            kind=frame.kind,
            parent=frame.parent,
            keys=frame.keys,
            parts=frame.parts,
            retention_class=held_by.name,
            written_at=frame.written_at,
            provenance=frame.provenance,
            touched_at=node.since if node.since != frame.written_at else 0.0,
        )
        images = tuple(
            PartImage(
                part=slots.part,
                images=self._catalog.memory.images(slots.slots, stride_pages=slots.part.stride_pages),
                lengths=slots.lengths.tobytes(),
                digests=slots.digests.tobytes(),
            )
            for slots in frame.host
        )
        return FrameWrite(header, images, bucket_of(held_by, frame.written_at, self._limits.bucket_fraction))

    def finished(self, frame: Frame, size: int, result: WriteResult) -> None:
        """Note where a frame is durable, or that it was refused and stays in host memory alone."""
        self.in_flight_bytes -= size
        self._catalog.quotas.writing_bytes[frame.retention_class] -= size
        self._in_flight.pop(frame, None)
        self._has_progress = True
        location = result.location
        if location is not None and self._catalog.segments.is_released(location.segment):
            # Room was made between the write and this word of it: what was written is gone.
            self._catalog.graves.bury(location, frame.fingerprint)
            location, result = None, WriteResult(None, "its segment was let go")
        if location is not None and (frame.dead or self._catalog.lost_any(frame)):
            # Blocks left while they were being written: what is on disk now must not bring them back.
            self._catalog.graves.bury(location, frame.fingerprint)
            location = None
        elif location is not None:
            self._catalog.segments.place(frame, location)
            if len(frame.nodes) > 1 or frame.nodes[0].since != frame.written_at:
                self._catalog.plan.touched[frame] = None
        else:
            self._catalog.events.add("kvstore_write_refusals_total")
            self._refused[frame] = None
        self._settle(frame, durable=location is not None)
        self._catalog.unhold(frame, frame.count)
        if location is None and result.location is not None and frame.nodes:
            self.enqueue(frame.nodes[0])
        self._catalog.graves.written(frame)

    def leaving(self, namespace: Fingerprint) -> set[Frame]:
        """Return what is being written though some of it has left: it is deleted when its write ends."""
        return {
            frame
            for frame in self._in_flight
            if frame.fingerprint == namespace and (frame.dead or self._catalog.lost_any(frame))
        }

    def _settle(self, frame: Frame, *, durable: bool) -> None:
        frame.queued = False
        frame.tell_waiters(durable=durable)

    def retry(self) -> None:
        """Queue again what was refused a while ago and is still in host memory."""
        refused, self._refused = self._refused, {}
        for frame in refused:
            if not frame.dead and frame.nodes and frame.location is None:
                self.enqueue(frame.nodes[0])
                if frame.holds and frame.nodes and not frame.queued:
                    self._refused[frame] = None

    def expire(self, monotonic: float) -> None:
        """Nobody waits for ever: when no write has come back for too long, those who wait for an
        acknowledgement are told that it is not durable yet; the writes themselves go on.
        """
        if self._has_progress or not self._in_flight:
            self._has_progress, self._progress_at = False, monotonic
        if monotonic - self._progress_at >= self._limits.write_seconds_max:
            for frame in [*self._in_flight, *self._queue]:
                frame.tell_waiters(durable=False)

    def take_losses(self) -> None:
        """What the tier found bad leaves it; what host memory still holds is written again. A frame asleep is
        woken first: its blocks before the bad one stay.
        """
        catalog = self._catalog
        losses = [*self._losses, *(self._tier.losses() if self._tier is not None else ())]
        self._losses = []
        for loss in losses:
            segment = catalog.segments.get(loss.segment)
            if segment is None or self._waits(loss):
                continue
            end = loss.offset + loss.length_bytes
            lost = [f for f in segment.frames if f.location and loss.offset <= f.location.offset < end]
            if not loss.length_bytes:
                lost = list(segment.frames)
                catalog.release_segment(segment, MissReason.CORRUPT)
            for frame in lost:
                if frame.location is not None:
                    catalog.lost_on_ssd(frame, loss.block)
                if frame.nodes and not frame.dead and frame.location is None:
                    self.enqueue(frame.nodes[0])

    def _waits(self, loss: Loss) -> bool:
        """Say whether a loss has to wait for frames to wake; those that cannot leave as a whole."""
        catalog = self._catalog
        asleep = catalog.sleepers.within(loss.segment, loss.offset, loss.length_bytes)
        wanted = catalog.sleepers.wanted(asleep)
        if wanted:
            catalog.plan.wake += wanted
            self._losses.append(loss)
            return True
        dismiss_and_bury(catalog, asleep, MissReason.CORRUPT)
        return False

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for room in the tier's queue."""
        return sum(frame_bytes(frame) for frame in self._queue)

    @property
    def waiting(self) -> bool:
        """Say whether frames wait for room in the tier's queue."""
        return bool(self._queue)

    @property
    def idle(self) -> bool:
        """Say whether nothing waits and nothing is under way."""
        return not self._queue and not self.in_flight_bytes


def frame_bytes(frame: Frame) -> int:
    """Bytes of a frame's records."""
    return frame.count * frame.block_stride_bytes


def bucket_of(held_by: RetentionClass, written_at: float, fraction: float) -> str:
    """Name the segments a frame belongs to: its class and the stretch of time it was written in."""
    if math.isinf(held_by.ttl_seconds):
        return f"{held_by.name}-0"
    return f"{held_by.name}-{int(written_at // max(1.0, held_by.ttl_seconds * fraction))}"


class DurableWait:
    """Counts down the frames an acknowledgement waits for; the verdict goes out once the lock is released."""

    def __init__(self, frames: list[Frame], plan: Plan, done: Callable[[bool], None]) -> None:
        self._left = len(frames)
        self._all_durable = True
        self._plan = plan
        self._done = done
        for frame in frames:
            if frame.queued:
                frame.waiters += (self._settled,)
            else:
                self._settled(durable=False)

    def _settled(self, durable: bool) -> None:
        self._all_durable &= durable
        self._left -= 1
        if not self._left:
            verdict = self._all_durable
            self._plan.calls.append(lambda: self._done(verdict))
