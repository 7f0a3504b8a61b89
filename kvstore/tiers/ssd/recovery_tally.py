"""What a start counts while it goes through the segments, for its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.namespace import Namespace
from kvstore.tiers.base import FrameTable, RecoveryReport, UnreadFrame


@dataclass(slots=True)
class Tally:
    """What a recovery counts."""

    segments: int = 0
    frames: int = 0
    blocks: int = 0
    bytes_kept: int = 0
    frames_dropped: int = 0
    bytes_dropped: int = 0
    unknown: list[str] = field(default_factory=list)
    unread: list[UnreadFrame] = field(default_factory=list)
    rebuilt: bool = False

    def keep(self, *, blocks: int, length_bytes: int) -> None:
        """Count a frame that is handed on."""
        self.frames += 1
        self.blocks += blocks
        self.bytes_kept += length_bytes

    def keep_table(self, table: FrameTable) -> None:
        """Count all frames of a table that is handed on."""
        self.frames += len(table.rows)
        self.blocks += int(table.rows["count"].sum())
        self.bytes_kept += int(table.rows["length_bytes"].sum())

    def report(self, namespaces: Iterable[Namespace], *, seconds: float) -> RecoveryReport:
        """Return what was found."""
        return RecoveryReport(
            tuple(namespaces),
            self.frames,
            self.blocks,
            self.bytes_kept,
            self.frames_dropped,
            self.bytes_dropped,
            tuple(self.unknown),
            self.rebuilt,
            seconds,
            self.segments,
            tuple(self.unread),
        )
