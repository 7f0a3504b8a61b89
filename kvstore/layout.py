"""How the bytes of one block are arranged: cache groups, parts, segment tables. Bytes stay opaque."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import InvalidArgument
from kvstore.types import PAGE_BYTES, SEGMENTS_MAX, TRAILER_BYTES, GroupKind, round_up

PART_BYTES_MAX = 1 << 30
PARTS_MAX = 256
NUMBER_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A layer range inside a part's record, so that layers can be handed out in order.

    Units: offset and length in bytes; layers [layer_first, layer_first + layer_count).
    """

    layer_first: int
    layer_count: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one lifetime rule; `window_blocks` is the n of trailing_blocks(n), else 0."""

    name: str
    kind: GroupKind = GroupKind.FULL_HISTORY
    window_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What one (group, shard) holds of a block; records may be shorter than bytes_max, never longer."""

    index: int
    group: str
    shard: str
    bytes_max: int
    segments: tuple[Segment, ...]

    @property
    def stride_bytes(self) -> int:
        """Size of a slot and of a record on disk: payload, room for the trailer, whole pages."""
        return round_up(self.bytes_max + TRAILER_BYTES, PAGE_BYTES)

    @property
    def stride_pages(self) -> int:
        """The stride in arena pages."""
        return self.stride_bytes // PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """The byte arrangement of a namespace's blocks. A different layout is refused, never reinterpreted."""

    dtype: str
    groups: tuple[CacheGroup, ...]
    parts: tuple[Part, ...] = field(default=())

    @staticmethod
    def single(*, dtype: str, bytes_max: int, layers: int, segments: int = 1) -> Layout:
        """Build the common layout: one full-history group, one shard, layers cut into equal byte ranges.

        Errors: InvalidArgument when the layers or bytes do not divide by `segments`.
        """
        if not 1 <= segments <= SEGMENTS_MAX or layers % segments or bytes_max % segments:
            raise InvalidArgument(
                f"layout: {layers} layers and {bytes_max} bytes do not cut into {segments} segments"
            )
        size, each = bytes_max // segments, layers // segments
        table = tuple(Segment(i * each, each, i * size, size) for i in range(segments))
        return Layout(dtype, (CacheGroup("kv"),), (Part(0, "kv", "all", bytes_max, table),)).checked()

    def checked(self) -> Layout:
        """Return self after checking every rule of a layout.

        Errors: InvalidArgument naming the part and the rule.
        """
        names = [g.name for g in self.groups]
        if not self.groups or len(set(names)) != len(names):
            raise InvalidArgument(f"layout: group names must be distinct and not empty, got {names}")
        for group in self.groups:
            if (group.kind is GroupKind.TRAILING_BLOCKS) != (group.window_blocks > 0):
                raise InvalidArgument(
                    f"layout: group {group.name!r}, {group.kind}, has window_blocks={group.window_blocks}"
                )
        if not 1 <= len(self.parts) <= PARTS_MAX:
            raise InvalidArgument(f"layout: 1..{PARTS_MAX} parts allowed, got {len(self.parts)}")
        for position, part in enumerate(self.parts):
            self._check_part(part, position)
        if not self.required_parts:
            raise InvalidArgument("layout: no part belongs to a full_history group")
        return self

    def _check_part(self, part: Part, position: int) -> None:
        if part.index != position:
            raise InvalidArgument(f"layout: part {position} carries index {part.index}")
        if not 1 <= part.bytes_max <= PART_BYTES_MAX:
            raise InvalidArgument(
                f"layout: part {position} bytes_max {part.bytes_max} is outside 1..{PART_BYTES_MAX}"
            )
        if self.group_of(part).kind is GroupKind.NEVER_STORE:
            raise InvalidArgument(f"layout: part {position} belongs to never_store group {part.group!r}")
        if not 1 <= len(part.segments) <= SEGMENTS_MAX:
            raise InvalidArgument(
                f"layout: part {position} has {len(part.segments)} segments, 1..{SEGMENTS_MAX} allowed"
            )
        offset = 0
        for segment in part.segments:
            if segment.offset != offset or segment.length < 1:
                raise InvalidArgument(
                    f"layout: part {position} segment at {segment.offset} leaves a gap, expected {offset}"
                )
            offset += segment.length
        if offset != part.bytes_max:
            raise InvalidArgument(
                f"layout: part {position} segments cover {offset} bytes of {part.bytes_max}"
            )

    def group_of(self, part: Part) -> CacheGroup:
        """Return the group a part belongs to.

        Errors: InvalidArgument when the group is not declared.
        """
        for group in self.groups:
            if group.name == part.group:
                return group
        raise InvalidArgument(f"layout: part {part.index} names unknown group {part.group!r}")

    @property
    def required_parts(self) -> tuple[int, ...]:
        """Indexes of the full_history parts: a block is visible only when all of them are there."""
        return tuple(p.index for p in self.parts if self.group_of(p).kind is GroupKind.FULL_HISTORY)

    @property
    def side_parts(self) -> tuple[int, ...]:
        """Indexes of trailing_blocks and checkpoint parts, which only some blocks carry."""
        required = set(self.required_parts)
        return tuple(p.index for p in self.parts if p.index not in required)

    @property
    def block_bytes(self) -> int:
        """Payload bytes of the required parts of one block."""
        return sum(self.parts[i].bytes_max for i in self.required_parts)

    def to_plain(self) -> dict[str, Any]:
        """Return the layout as JSON-ready values, in canonical order."""
        return {
            "dtype": self.dtype,
            "groups": [[g.name, str(g.kind), g.window_blocks] for g in self.groups],
            "parts": [
                [
                    p.group,
                    p.shard,
                    p.bytes_max,
                    [[s.layer_first, s.layer_count, s.offset, s.length] for s in p.segments],
                ]
                for p in self.parts
            ],
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Layout:
        """Rebuild a layout from `to_plain`.

        Errors: InvalidArgument when it breaks a rule.
        """
        groups = tuple(
            CacheGroup(_text(name), GroupKind(kind), _whole(window)) for name, kind, window in plain["groups"]
        )
        parts = tuple(
            Part(
                i,
                _text(group),
                _text(shard),
                _whole(bytes_max),
                tuple(Segment(*map(_whole, segment)) for segment in segments),
            )
            for i, (group, shard, bytes_max, segments) in enumerate(plain["parts"])
        )
        return Layout(_text(plain["dtype"]), groups, parts).checked()


def _whole(value: object) -> int:
    # JSON has 1.0, 1e300 and true as well; none of them counts anything.
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:
        raise InvalidArgument(f"layout: expected a whole number within 0..{NUMBER_MAX}, got {value!r:.80}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise InvalidArgument(f"layout: expected a printable text, got {value!r:.80}")
    return value
