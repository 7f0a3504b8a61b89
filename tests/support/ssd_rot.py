"""A small store with one of everything in it, and the judge of what a start makes of it when bytes rot."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.clock import ManualClock
from kvstore.errors import TierUnavailable
from kvstore.events import Events
from kvstore.testing.frames import BuiltFrame, payloads_of, read_of
from kvstore.testing.tier_suite import found_frames, registered, written
from kvstore.tiers.base import FrameLocation, RecoveredFrame
from kvstore.tiers.ssd import SsdTier
from kvstore.types import HASH_BYTES, PAGE_BYTES, MissReason
from tests.support.ssd import open_ssd, recovered_ssd

WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RotStore:
    """A closed store: what must be found, what must never be, and where things lie in its first segment."""

    directory: Path
    frames: dict[bytes, BuiltFrame]
    places: dict[bytes, FrameLocation]
    deleted: bytes
    grave: FrameLocation
    torn: Path

    @staticmethod
    def build(directory: Path) -> RotStore:
        """Write two sealed segments, one of them with a tombstone, and one whose seal is missing."""
        tier = recovered_ssd(directory)
        builder = registered(tier)
        built = [builder.frame(n, bucket=b) for n, b in ((2, "a"), (1, "a"), (3, "a"), (2, "b"), (2, "c"))]
        places = written(tier, built)
        tier.delete([places[1]]).result(WAIT_SECONDS)
        tier.close(deadline_seconds=WAIT_SECONDS)
        torn = directory / "segments" / f"{places[4].segment:016x}.seg"
        with torn.open("r+b") as file:
            file.truncate(torn.stat().st_size - PAGE_BYTES)
        frames = {b.keys: b for i, b in enumerate(built) if i != 1}
        where = {b.keys: p for i, (b, p) in enumerate(zip(built, places, strict=True)) if i != 1}
        return RotStore(directory, frames, where, built[1].keys, places[1], torn)

    def segment(self) -> Path:
        """The first segment: two living frames around a tombstone, and a seal."""
        return self.directory / "segments" / f"{self.grave.segment:016x}.seg"

    def copy(self, target: Path, *, with_index: bool) -> None:
        """Copy the store, with or without its index."""
        shutil.copytree(self.directory, target)
        if not with_index:
            shutil.rmtree(target / "index")

    def classes(self) -> dict[str, tuple[Path, list[int]]]:
        """Return every class of byte positions: a file, relative to the store, and offsets in it."""
        segment = self.segment().relative_to(self.directory)
        first = next(place for place in self.places.values() if place.segment == self.grave.segment)
        built = next(self.frames[keys] for keys, place in self.places.items() if place == first)
        stride = built.write.header.parts[0].stride_bytes
        record = first.offset + first.header_bytes
        header = range(first.offset, first.offset + 256 + 44 * 2 + HASH_BYTES * built.count)
        end = self.segment().stat().st_size - PAGE_BYTES
        (names,) = (self.directory / "namespaces").iterdir()
        return {
            "segment header": (segment, [*range(144), *range(4080, 4096)]),
            "frame header": (segment, [*header, *range(record - 16, record)]),
            "header padding": (segment, [header.stop + 5, record - 40]),
            "payload": (segment, [record + i for i in (0, 1, 4999, 5000, 5001, 5800)]),
            "slack": (segment, [record + stride - 257]),
            "trailer": (segment, [*range(record + stride - 256, record + stride)]),
            "last part": (segment, [*range(self.grave.offset - 4096, self.grave.offset, 61)]),
            "tombstone": (segment, [*range(self.grave.offset, self.grave.offset + 512)]),
            "grave": (segment, [self.grave.offset + 600, self.grave.offset + 5000]),
            "seal": (segment, [*range(end, end + 72), *range(end + 4080, end + 4096)]),
            "unsealed header": (
                self.torn.relative_to(self.directory),
                [*range(PAGE_BYTES, PAGE_BYTES + 300)],
            ),
            "unsealed record": (self.torn.relative_to(self.directory), [*range(8192, 8192 + 8192, 97)]),
            "STORE": (Path("STORE"), [*range((self.directory / "STORE").stat().st_size)]),
            "namespace": (names.relative_to(self.directory), [*range(names.stat().st_size)]),
        }


def flip(path: Path, offset: int, *, bits: int) -> None:
    """Change bits of a byte."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ bits]))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a start made of a store: frames found whole, frames found in part, and if a loss was told."""

    whole: int
    cut: int
    told: bool
    refused: str = ""


def judge(store: RotStore, directory: Path) -> Verdict:
    """Start on a rotten copy and read everything. What is served must be right, what is lost must be told."""
    events = Events()
    try:
        tier = open_ssd(directory, clock=ManualClock(), events=events)
        found = found_frames(tier)
    except TierUnavailable as error:
        return Verdict(0, 0, True, str(error))
    try:
        whole = sum(_is_whole(store, tier, frame) for frame in found)
        report = tier.report()
        in_segments = sum(p.stat().st_blocks * 512 for p in (directory / "segments").iterdir())
        assert tier.usage().used_bytes == in_segments, "accounting"
        told = bool(report.bytes_dropped or report.unknown_files or events.total("kvstore_corrupt_total"))
        assert written(tier, [registered(tier, seed=99).frame(1)])
        return Verdict(whole, len(found) - whole, told)
    finally:
        tier.close(deadline_seconds=WAIT_SECONDS)


def _is_whole(store: RotStore, tier: SsdTier, frame: RecoveredFrame) -> bool:
    """Compare every byte that a frame serves; says whether that is all of it."""
    keys = frame.header.keys
    assert keys != store.deleted, "a deleted frame came back"
    built = store.frames[keys]
    assert frame.header == built.write.header
    assert frame.location == store.places[keys]
    good = []
    for position in range(len(frame.header.parts)):
        read = read_of(built, frame.location, part=position)
        result = tier.read_into([read])[0].result(WAIT_SECONDS)
        payloads = payloads_of(read, result.lengths)[: result.good]
        assert payloads == [b.payload for b in built.blocks[position][: result.good]], "wrong bytes"
        assert (result.good == built.count) == (result.reason is None)
        assert result.reason in (None, MissReason.CORRUPT)
        good.append(result.good)
    return min(good) == built.count


def positions(store: RotStore, *, share: int) -> Iterator[tuple[str, Path, int]]:
    """Yield one in `share` of the positions of each class, the first ones included."""
    for name, (path, offsets) in store.classes().items():
        for offset in offsets[:: share if len(offsets) > share else 1]:
            yield name, path, offset
