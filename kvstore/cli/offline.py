"""What a stopped daemon's data directory holds, read from its segments alone; changes nothing.

Expiry is judged by the daemon's classes and latest touches, so nothing here says what has expired.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.cli.views import FaultView, NamespaceView, RunView, SegmentView, VerifyView
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.namespace import Namespace
from kvstore.tiers.base import FrameKind
from kvstore.tiers.fs import OsFileSystem
from kvstore.tiers.ssd.crypto_keys import KeyRing
from kvstore.tiers.ssd.directory import LOCK_NAME, DataDirectory, read_namespaces, segment_number
from kvstore.tiers.ssd.format import FormatError, SegmentHeader, StoredFrame
from kvstore.tiers.ssd.scan import Fault, Found, Piece, Scanner
from kvstore.types import HASH_BYTES, PAGE_BYTES, Tier, key_at, split_keys

KeyIndex = dict[bytes, tuple[StoredFrame, int]]


@dataclass(frozen=True, slots=True)
class _Segment:
    """An open segment file."""

    path: Path
    handle: int
    size_bytes: int
    header: SegmentHeader


class StoppedStore:
    """A data directory that no daemon uses while it is locked.

    Errors: InvalidArgument when it is no data directory, TierUnavailable when a daemon uses it.
    """

    def __init__(self, root: Path, keys: KeyRing | None = None) -> None:
        self._fs = OsFileSystem()
        self._directory = DataDirectory(root)
        self._scanner = Scanner(self._fs, keys)
        if not self._directory.segments.is_dir():
            raise InvalidArgument(
                f"--offline {root}: no data directory: there is no {self._directory.segments}"
            )

    @contextmanager
    def locked(self) -> Iterator[StoppedStore]:
        """Keep daemons away while the body runs."""
        path = self._directory.root / LOCK_NAME
        handle = os.open(path, os.O_RDONLY) if path.exists() else -1
        try:
            if handle >= 0:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield self
        except BlockingIOError as error:
            pid = path.read_text().strip() or "unknown"
            remedy = "stop it, or ask it without --offline"
            raise TierUnavailable(
                f"{self._directory.root} is used by the daemon with pid {pid}: {remedy}"
            ) from error
        finally:
            if handle >= 0:
                os.close(handle)

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that this build can read."""
        if not self._directory.namespaces.is_dir():
            return []
        return [found for _, found in read_namespaces(self._fs, self._directory) if found is not None]

    def segments(self) -> Iterator[_Segment]:
        """Yield the segment files, oldest number first; one that has no readable header is left out."""
        for name in sorted(self._fs.listdir(self._directory.segments)):
            if segment_number(name) is None:
                continue
            path = self._directory.segments / name
            try:
                handle = self._fs.open(path, flags=os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                header = self._scanner.header(handle)
                yield _Segment(path, handle, self._fs.fstat(handle).size_bytes, header)
            except FormatError:
                continue
            finally:
                self._fs.close(handle)

    def unreadable(self) -> list[Path]:
        """Return the files with a segment's name and no readable header."""
        readable = {segment.path for segment in self.segments()}
        names = (
            name for name in self._fs.listdir(self._directory.segments) if segment_number(name) is not None
        )
        return sorted({self._directory.segments / name for name in names} - readable)

    def pieces(self, segment: _Segment) -> Iterator[Piece]:
        """Yield what lies in a segment, in order."""
        return self._scanner.pieces(
            segment.handle,
            segment_id=segment.header.identity,
            start=PAGE_BYTES,
            size_bytes=segment.size_bytes,
        )

    def frames(self) -> Iterator[tuple[_Segment, Piece, StoredFrame]]:
        """Yield every frame that is not deleted."""
        for segment in self.segments():
            for piece in self.pieces(segment):
                if piece.found is Found.FRAME and piece.frame is not None:
                    yield segment, piece, piece.frame

    def faults(self, segment: _Segment, piece: Piece, frame: StoredFrame) -> Iterator[Fault]:
        """Read a frame's records and yield what is wrong with them, or cannot be judged."""
        return self._scanner.faults(segment.handle, frame, offset=piece.offset)


def namespaces(root: Path) -> list[NamespaceView]:
    """Return every namespace and what the segments hold of it."""
    with StoppedStore(root).locked() as store:
        blocks: Counter[bytes] = Counter()
        sizes: Counter[bytes] = Counter()
        for _, _, frame in store.frames():
            sizes[frame.namespace] += frame.length_bytes
            if frame.kind is FrameKind.MAIN:
                blocks[frame.namespace] += frame.block_count
        known = store.namespaces()
        return [NamespaceView(n, blocks[n.fingerprint], 0, sizes[n.fingerprint]) for n in known]


def segments(root: Path) -> list[SegmentView]:
    """Return every segment, whether it is sealed, and how many frames it holds."""
    with StoppedStore(root).locked() as store:
        return [_segment_view(segment, list(store.pieces(segment))) for segment in store.segments()]


def _segment_view(segment: _Segment, pieces: Sequence[Piece]) -> SegmentView:
    kinds = Counter(piece.found for piece in pieces)
    return SegmentView(
        segment=segment.header.number,
        path=str(segment.path),
        bucket=segment.header.bucket,
        bytes=segment.size_bytes,
        frames=kinds[Found.FRAME],
        sealed=kinds[Found.SEAL] > 0,
        created_at=segment.header.created_at,
    )


def blocks(
    root: Path, namespace: Namespace, *, keys: bytes, hash_prefix: bytes, limit: int
) -> tuple[list[RunView], int, str]:
    """Return the runs that hold keys or prefix, how many keys lie there without a hole, why no more."""
    with StoppedStore(root).locked() as store:
        frames = [f for _, _, f in store.frames() if f.namespace == namespace.fingerprint]
    where: KeyIndex = {}
    for frame in frames:
        if frame.kind is FrameKind.MAIN:
            for index in range(frame.block_count):
                where.setdefault(key_at(frame.keys, index), (frame, index))
    if keys:
        wanted = split_keys(keys)
        visible = next((i for i, key in enumerate(wanted) if key not in where), len(wanted))
        found = [where[key] for key in wanted if key in where]
        return _runs(found)[:limit], visible, "" if visible == len(wanted) else "not on SSD"
    fits = [place for key, place in where.items() if key.startswith(hash_prefix)]
    return _runs(fits)[:limit], 0, ""


def _runs(places: Sequence[tuple[StoredFrame, int]]) -> list[RunView]:
    """Join neighbours of one frame."""
    runs: list[tuple[StoredFrame, int, int]] = []
    for frame, index in places:
        if runs and runs[-1][0] is frame and runs[-1][2] == index:
            runs[-1] = (frame, runs[-1][1], index + 1)
        else:
            runs.append((frame, index, index + 1))
    return [_run_view(frame, first, end) for frame, first, end in runs]


def _run_view(frame: StoredFrame, first: int, end: int) -> RunView:
    return RunView(
        parent=key_at(frame.keys, first - 1) if first else frame.parent,
        keys=frame.keys[first * HASH_BYTES : end * HASH_BYTES],
        tiers=(str(Tier.SSD),),
        host_blocks=0,
        ssd_blocks=end - first,
        retention_class=frame.retention_class,
        written_at=frame.written_at,
        touched_at=frame.touched_at or frame.written_at,
        expires_at=None,
        bytes=(end - first) * sum(part.stride_bytes for part in frame.parts),
        provenance=frame.provenance,
        leased=False,
    )


@dataclass(slots=True)
class KeyUse:
    """What is stored under one key; id 0 stands for what is not encrypted. Units: bytes of whole frames."""

    key_id: int
    key_check: int
    segments: int = 0
    frames: int = 0
    bytes: int = 0


def key_uses(root: Path) -> list[KeyUse]:
    """Return what the segments say of the keys in use; a daemon may be at work on them."""
    uses: dict[tuple[int, int], KeyUse] = {}
    store = StoppedStore(root)
    for segment in store.segments():
        seen = set()
        for piece in store.pieces(segment):
            if piece.frame is None:
                continue
            named = (piece.frame.key_id, piece.frame.key_check)
            use = uses.setdefault(named, KeyUse(*named))
            use.segments += named not in seen
            use.frames += 1
            use.bytes += piece.length_bytes
            seen.add(named)
    return [use for _, use in sorted(uses.items())]


def verify(root: Path, fingerprint: bytes, *, keys: KeyRing | None = None) -> Iterator[VerifyView]:
    """Read every record, yield the progress after each frame. Damage between frames has no key."""
    with StoppedStore(root, keys).locked() as store:
        everything = [
            (segment.path, piece)
            for segment in store.segments()
            for piece in store.pieces(segment)
            if piece.found in (Found.FRAME, Found.DAMAGE) and _concerns(piece, fingerprint)
        ]
        total = sum(piece.frame.block_count for _, piece in everything if piece.frame is not None)
        done, read, unreadable = 0, 0, 0
        for path in store.unreadable():
            yield VerifyView(
                0, total, 0, (FaultView(b"", b"", str(Tier.SSD), f"{path.name}: no segment header"),)
            )
        for segment in store.segments():
            for piece in (piece for path, piece in everything if path == segment.path):
                if piece.frame is None:
                    yield VerifyView(done, total, read, (_damage(segment, piece),), unreadable)
                    continue
                found = list(store.faults(segment, piece, piece.frame))
                done, read = done + piece.frame.block_count, read + piece.length_bytes
                unreadable += _unjudged(found)
                faults = tuple(
                    _fault(segment, piece.frame, fault) for fault in found if not fault.is_unreadable
                )
                yield VerifyView(done, total, read, faults, unreadable)


def _concerns(piece: Piece, fingerprint: bytes) -> bool:
    return not fingerprint or (piece.frame is not None and piece.frame.namespace == fingerprint)


def _damage(segment: _Segment, piece: Piece) -> FaultView:
    detail = f"{segment.path.name}, {piece.length_bytes} bytes at {piece.offset}: {piece.detail}"
    return FaultView(b"", b"", str(Tier.SSD), detail)


def _fault(segment: _Segment, frame: StoredFrame, fault: Fault) -> FaultView:
    detail = f"{segment.path.name}, part {fault.part}: {fault.reason}"
    return FaultView(frame.namespace, fault.key, str(Tier.SSD), detail)


def _unjudged(faults: Sequence[Fault]) -> int:
    """Return how many blocks of a frame cannot be judged without their key."""
    blocks: Counter[int] = Counter()
    for fault in faults:
        if fault.is_unreadable:
            blocks[fault.part] += fault.blocks
    return max(blocks.values(), default=0)
