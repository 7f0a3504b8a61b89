"""Puts: reservations of several writers under one put_id, and the moment their blocks become visible.

First writer wins: a key is reserved by one put at a time, and a key that is present is a duplicate. A block
becomes visible when the last required part commits, and all parts of it together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore import hashing
from kvstore.api import CommitRequest, Extent, OutcomeRun, PartBlocks, PartDigests, ReserveRequest
from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.frames import Frame, Node, PartSlots
from kvstore.core.index import NO_HASH
from kvstore.core.limits import Limits
from kvstore.core.sleepers import RunsAsleep
from kvstore.errors import InvalidArgument
from kvstore.layout import Part
from kvstore.tiers.base import FrameKind
from kvstore.types import DIGEST_BYTES, HASH_BYTES, BlockHash, PutOutcome, key_at, key_count, split_keys

Mask = npt.NDArray[np.bool_]
Stretch = tuple[int, Node, int]
"""Position in a put's keys, the node found there, how many of its blocks matched."""


class PutPart:
    """What one writer brings of a put: its slots per block, and how far it has committed."""

    __slots__ = ("committed", "data", "mask", "reservation", "wanted")

    def __init__(self, part: Part, wanted: Mask) -> None:
        self.data = PartSlots(part, len(wanted))
        self.wanted = wanted
        self.mask: Mask = wanted.copy()
        self.reservation = 0
        self.committed: int | None = None


class PendingPut:
    """All parts of one put, from the first reserve to publication or expiry."""

    def __init__(
        self,
        state: NamespaceState,
        request: ReserveRequest,
        names: list[bytes],
        *,
        retention_class: str,
        deadline: float,
    ) -> None:
        self.state = state
        self.put_id = request.put_id
        self.parent = request.parent
        self.keys = request.keys
        self.names = names
        self.registered: list[bytes] = []
        self.count = len(names)
        self.retention_class = retention_class
        self.provenance = request.provenance
        self.deadline = deadline
        self.parts: dict[int, PutPart] = {}
        self.absent: Mask = np.zeros(self.count, np.bool_)
        self.in_flight: Mask = np.zeros(self.count, np.bool_)
        self.held: list[tuple[Frame, int]] = []
        self.above: Node | None = None
        """What was present last of its chain."""
        self.published = False
        self.writers = 0

    @property
    def partly_committed(self) -> bool:
        """Say whether some rank has committed while others have not."""
        return any(part.committed is not None for part in self.parts.values())

    @property
    def complete(self) -> bool:
        """Say whether every required part has committed, or, for a put of side parts alone, each of those;
        a side part that comes after publication waits for nobody.
        """
        if self.published:
            return True
        needed = {part.index for part in self.state.required}
        if not needed & self.parts.keys():
            needed = set(self.parts)
        return all(index in self.parts and self.parts[index].committed is not None for index in needed)

    @property
    def visible_blocks(self) -> int:
        """How many leading blocks every committed required part has."""
        required = {part.index for part in self.state.required} & self.parts.keys()
        return min((self.parts[i].committed or 0 for i in required), default=self.count)


@dataclass(slots=True)
class Reservation:
    """One writer's share of a put: its parts, its client, its deadline, the arena pages it holds."""

    number: int
    put: PendingPut
    parts: list[int]
    session: int
    deadline: float
    pages: int


class Published:
    """What came of a commit: outcomes per block, and the frames an SSD acknowledgement waits for, if any."""

    def __init__(self, outcomes: tuple[OutcomeRun, ...], frames: list[Frame]) -> None:
        self.outcomes = outcomes
        self.frames = frames


class PutChecks:
    """What a reserve or commit must satisfy before anything is decided."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def names(self, request: ReserveRequest) -> list[bytes]:
        """Return the keys of a reserve request one by one.

        Errors: InvalidArgument.
        """
        count = key_count(request.keys)
        if not 1 <= count <= self._limits.keys_max:
            raise InvalidArgument(f"reserve: 1..{self._limits.keys_max} blocks allowed, got {count}")
        return split_keys(request.keys)

    def reserve(self, state: NamespaceState, request: ReserveRequest, names: list[bytes]) -> list[PartBlocks]:
        """Check a reserve request, whose keys are `names`, and return the parts it brings.

        Errors: InvalidArgument.
        """
        count = len(names)
        if len(request.parent) != HASH_BYTES and not state.flat:
            raise InvalidArgument(f"reserve: parent must have {HASH_BYTES} bytes, got {len(request.parent)}")
        if not state.flat and request.keys.find(request.parent) % HASH_BYTES == 0:
            raise InvalidArgument("reserve: the parent is one of the blocks that are to follow it")
        if len(set(names)) != count:
            raise InvalidArgument(f"reserve: the same hash occurs twice among {count} keys")
        if len(request.put_id) > 64:
            raise InvalidArgument(f"reserve: put_id may have 64 bytes, got {len(request.put_id)}")
        self._tokens(state, request, count)
        return self._parts(state, request, count)

    def _tokens(self, state: NamespaceState, request: ReserveRequest, count: int) -> None:
        if not request.token_ids:
            return
        size = state.namespace.block_tokens
        if len(request.token_ids) != 4 * size * count:
            raise InvalidArgument(
                f"reserve: {count} blocks of {size} tokens "
                f"need {size * count} token ids, got {len(request.token_ids) // 4}"
            )
        tokens = np.frombuffer(request.token_ids, np.dtype("<u4")).astype(np.int64)
        expected = hashing.block_hashes(BlockHash(request.parent), tokens, block_tokens=size)
        for index in range(count):
            if key_at(expected, index) != key_at(request.keys, index):
                want, got = key_at(expected, index).hex()[:16], key_at(request.keys, index).hex()[:16]
                raise InvalidArgument(
                    f"reserve: hash {index} does not follow its parent: {want}... expected, {got}... given"
                )

    @staticmethod
    def _parts(state: NamespaceState, request: ReserveRequest, count: int) -> list[PartBlocks]:
        layout = state.namespace.layout
        parts = list(request.parts) or [PartBlocks(part.index, 0, count) for part in state.required]
        required = {part.index for part in state.required}
        for piece in parts:
            if not 0 <= piece.part < len(layout.parts):
                raise InvalidArgument(
                    f"reserve: part {piece.part} is outside 0..{len(layout.parts) - 1} of this layout"
                )
            if piece.first < 0 or piece.count < 1 or piece.first + piece.count > count:
                end = piece.first + piece.count
                raise InvalidArgument(
                    f"reserve: part {piece.part} covers blocks {piece.first}..{end} of a put of {count}"
                )
            if piece.part in required and (piece.first, piece.count) != (0, count):
                raise InvalidArgument(
                    f"reserve: required part {piece.part} must cover all {count} blocks of the put"
                )
            if state.flat and piece.part not in required:
                raise InvalidArgument("reserve: side parts have no place in a flat namespace")
        if len({piece.part for piece in parts}) != len(parts):
            raise InvalidArgument("reserve: the same part is named twice")
        return parts

    @staticmethod
    def joins(put: PendingPut, request: ReserveRequest, pieces: list[PartBlocks]) -> None:
        """Check that a second rank's reserve speaks of the same put.

        Errors: InvalidArgument with both sides.
        """
        if put.keys != request.keys or put.parent != request.parent:
            raise InvalidArgument(
                f"reserve: put_id {request.put_id.hex()} joins {put.count} blocks "
                f"from {put.keys[:8].hex()}..., "
                f"this request brings {key_count(request.keys)} from {request.keys[:8].hex()}..."
            )
        if put.provenance != request.provenance:
            raise InvalidArgument(
                f"reserve: put_id {request.put_id.hex()} brings blocks of provenance {put.provenance}, "
                f"this request brings {request.provenance}"
            )
        taken = sorted(set(put.parts) & {piece.part for piece in pieces})
        if taken:
            raise InvalidArgument(
                f"reserve: put_id {request.put_id.hex()} already has part {taken[0]} from another writer"
            )

    def commit(self, reservation: Reservation, request: CommitRequest) -> None:
        """Take over lengths and digests after checking that they cover what is committed.

        Errors: InvalidArgument.
        """
        put = reservation.put
        if not 0 <= request.blocks <= put.count:
            raise InvalidArgument(f"commit: {request.blocks} blocks of a put of {put.count}")
        covered = {index: np.zeros(put.count, np.bool_) for index in reservation.parts}
        for piece in request.parts:
            if piece.part not in covered:
                raise InvalidArgument(
                    f"commit: part {piece.part} is not part of reservation {request.reservation:#x}"
                )
            self._digests(put.parts[piece.part], piece, covered[piece.part])
        for index, mask in covered.items():
            missing = put.parts[index].mask[: request.blocks] & ~mask[: request.blocks]
            if missing.any():
                raise InvalidArgument(
                    f"commit: part {index} has no digest for block {int(np.argmax(missing))}"
                )

    @staticmethod
    def _digests(part: PutPart, piece: PartDigests, covered: Mask) -> None:
        shape = part.data.part
        width = DIGEST_BYTES * len(shape.segments)
        count = len(piece.digests) // width
        if len(piece.digests) % width or piece.first < 0 or piece.first + count > len(covered):
            raise InvalidArgument(
                f"commit: part {piece.part} from block {piece.first} "
                f"brings {len(piece.digests)} digest bytes, {width} a block"
            )
        lengths = (
            np.frombuffer(piece.lengths, np.dtype("<u4"))
            if piece.lengths
            else np.full(count, shape.bytes_max, np.uint32)
        )
        if len(lengths) != count or not count or lengths.min() < 1 or lengths.max() > shape.bytes_max:
            raise InvalidArgument(f"commit: part {piece.part} needs {count} lengths in 1..{shape.bytes_max}")
        span = slice(piece.first, piece.first + count)
        part.data.lengths[span] = lengths
        part.data.digests[span] = np.frombuffer(piece.digests, np.uint8).reshape(count, width)
        covered[span] = True


def runs_of(mask: Mask) -> list[tuple[int, int]]:
    """Return the stretches of a mask that are set."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def reserved_extents(part: PutPart) -> Iterator[Extent]:
    """Yield the contiguous stretches of blocks that a writer has slots for."""
    for first, end in runs_of(part.mask):
        data = part.data
        lengths = np.full(end - first, data.part.bytes_max, np.uint32)
        yield Extent(
            data.part.index, first, data.slots[first:end].copy(), data.generations[first:end].copy(), lengths
        )


def outcome_runs(count: int, *layers: tuple[PutOutcome, Mask]) -> tuple[OutcomeRun, ...]:
    """Run-length code one outcome per block: duplicates, painted over by each layer in turn."""
    codes = np.zeros(count, np.int64)
    for code, (_, mask) in enumerate(layers, start=1):
        codes[mask] = code
    names = [PutOutcome.DUPLICATE, *(outcome for outcome, _ in layers)]
    edges = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), count]
    return tuple(OutcomeRun(names[int(codes[a])], b - a) for a, b in itertools.pairwise(edges))


def reserved_outcomes(put: PendingPut, fresh: list[PutPart]) -> tuple[OutcomeRun, ...]:
    """Return what a writer hears of the blocks it wants to bring."""
    wanted = np.zeros(put.count, np.bool_)
    granted = np.zeros(put.count, np.bool_)
    for part in fresh:
        wanted |= part.wanted
        granted |= part.mask
    return outcome_runs(
        put.count,
        (PutOutcome.IN_FLIGHT, put.in_flight),
        (PutOutcome.THROTTLED, wanted),
        (PutOutcome.RESERVED, granted),
    )


def frame_of(
    put: PendingPut, parts: tuple[int, ...], first: int, end: int, *, kind: FrameKind, written_at: float
) -> Frame:
    """Make the frame of blocks [first, end) of a put from the slots its writers filled."""
    parent = put.parent if first == 0 else key_at(put.keys, first - 1)
    frame = Frame(
        fingerprint=put.state.fingerprint,
        kind=kind,
        parent=NO_HASH if put.state.flat or kind is FrameKind.SIDE else BlockHash(parent),
        keys=put.keys[first * HASH_BYTES : end * HASH_BYTES],
        parts=tuple(put.parts[i].data.part for i in parts),
        retention_class=put.retention_class,
        written_at=written_at,
        provenance=put.provenance,
    )
    frame.host = tuple(put.parts[i].data.cut(first, end) for i in parts)
    return frame


def insert_loose(put: PendingPut, frame: Frame, part: int, *, now: float) -> Node:
    """File a frame of a put that hangs in no chain."""
    return put.state.loose.insert(frame, part=part, retention_class=put.retention_class, since=now)


class Presence:
    """Which blocks of a put are there already, and which another put is bringing."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def need(self, state: NamespaceState, request: ReserveRequest) -> None:
        """Have the frames woken that hold what a put brings, or what it follows, as far as one ends where the
        next begins. A block inside of a frame asleep is not found: to know which frame has it takes memory
        for each block, or a look at all of them. Such a put waits for the next match, which finds it and
        renews all it follows; until then it lives by its own time, and what sleeps by its own. Engines match
        before they put, so it takes a restart between the two, or ten minutes.

        Errors: RunsAsleep.
        """
        sleepers, runs = self._catalog.sleepers, state.runs
        if state.flat or sleepers.is_empty(state.fingerprint):
            return
        asleep = sleepers.along(state.fingerprint, request.keys)
        path = runs.path(runs.ending_with(request.parent))
        before = path[-1].parent_hash if path else request.parent
        if before not in runs.declared:
            asleep += sleepers.ending_with(state.fingerprint, before)
        if wanted := sleepers.wanted(asleep):
            raise RunsAsleep(wanted, request.keys)

    def look(self, put: PendingPut) -> tuple[Node | None, list[Stretch]]:
        """Fill in the put's absent and in-flight masks; returns the node it follows and the present stretches
        of its chain.
        """
        there, above, found = self.present(put)
        put.absent[:] = ~there
        if not put.state.pending.keys().isdisjoint(put.names):
            for index in np.flatnonzero(put.absent).tolist():
                put.in_flight[index] = put.names[index] in put.state.pending
        return above, found

    @staticmethod
    def present(put: PendingPut) -> tuple[Mask, Node | None, list[Stretch]]:
        """Return which blocks of a put are there now, the node it follows, and where they lie."""
        state = put.state
        there = np.zeros(put.count, np.bool_)
        if state.flat:
            for index in range(put.count):
                there[index] = state.loose.get(put.names[index]) is not None
            return there, None, []
        above, stretches = state.runs.walk_behind(put.parent, put.keys)
        for position, _, matched in stretches:
            there[position : position + matched] = True
        return there, above, stretches

    def wanted(self, put: PendingPut, piece: PartBlocks) -> Mask:
        """Return the blocks of a put that a writer of one part has to bring."""
        required = {part.index for part in put.state.required}
        if piece.part in required:
            return put.absent & ~put.in_flight
        mask = np.zeros(put.count, np.bool_)
        mask[piece.first : piece.first + piece.count] = True
        return mask & ~self.side_blocks(put, piece.part, mask)

    @staticmethod
    def side_blocks(put: PendingPut, part: int, among: Mask) -> Mask:
        """Return those of the blocks that have a side part already."""
        there = np.zeros(put.count, np.bool_)
        for index in np.flatnonzero(among).tolist():
            there[index] = put.state.loose.get(put.names[index], part) is not None
        return there

    @staticmethod
    def side_nodes(put: PendingPut, piece: PartBlocks) -> list[Node]:
        """Return what holds the side parts that are there already of what a writer brings; nothing for
        required parts.
        """
        if piece.part in {part.index for part in put.state.required}:
            return []
        keys = put.names[piece.first : piece.first + piece.count]
        entries = (put.state.loose.get(key, piece.part) for key in keys)
        return list({id(e[0]): e[0].nodes[0] for e in entries if e is not None}.values())


def flat_node(state: NamespaceState, key: bytes) -> Node | None:
    """Return the node of a block of a flat namespace, None when it is absent."""
    entry = state.loose.get(key)
    return entry[0].nodes[0] if entry else None


def write_time(catalog: Catalog, state: NamespaceState, keys: bytes, now: float) -> float:
    """Return the time of writing of new copies of blocks: now, or later than that of an older copy on SSD
    which was written before the clock was set back; a restart takes the later one for the newer.
    """
    if now > catalog.written_until or not catalog.partial:
        return now
    names = set(split_keys(keys))
    copies = (
        frame.written_at
        for frame in catalog.partial
        if frame.written_at >= now
        and frame.fingerprint == state.fingerprint
        and not names.isdisjoint(split_keys(frame.keys))
    )
    latest = max(copies, default=0.0)
    return math.nextafter(latest, math.inf) if latest else now
