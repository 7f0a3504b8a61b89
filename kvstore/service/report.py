"""What the daemon says of itself at start and in `status`, in words and as JSON-ready values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore.tiers.base import RecoveryReport

NAMES_MAX = 3
"""So many unknown files are named; `status --json` has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Facts of one start, printed line by line and kept for `status`."""

    version: str
    pid: int
    boot_id: int
    address: str
    tcp_address: str
    byte_port: int
    metrics_address: str
    arena: str
    ssd: str
    recovery: RecoveryReport | None
    notes: tuple[str, ...] = field(default=())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the start screen behind the first, `ready` last."""
        yield f"  socket     {self.address}"
        if self.tcp_address:
            yield f"  tcp        {self.tcp_address}"
            yield f"  payload    {f'port {self.byte_port}' if self.byte_port else 'in gRPC: no byte port'}"
        yield f"  host       {self.arena}"
        yield f"  ssd        {self.ssd}"
        if self.recovery is not None:
            yield f"  recovered  {recovery_text(self.recovery)}"
        yield f"  metrics    {self.metrics_address or 'off'}"
        yield f"  boot       {self.boot_id:016x}"
        for note in self.notes:
            yield f"  note       {note}"
        yield "ready"

    def plain(self) -> dict[str, Any]:
        """Return the facts as JSON-ready values."""
        document = asdict(self)
        recovery = document.pop("recovery")
        if recovery is not None:
            assert self.recovery is not None
            recovery["namespaces"] = [n.model for n in self.recovery.namespaces]
            recovery["text"] = recovery_text(self.recovery)
        return {**document, "boot_id": f"{self.boot_id:016x}", "recovery": recovery}


def recovery_text(report: RecoveryReport) -> str:
    """Return one line that says what was found and what was lost."""
    text = f"{report.blocks:,} blocks in {report.frames:,} runs, {bytes_text(report.bytes_kept)}"
    found = report.frames + report.frames_dropped
    text += f" kept of {found:,} runs found in {report.segments:,} segments"
    text += f", {len(report.namespaces)} namespaces, in {report.seconds:.2f} s"
    if report.rebuilt:
        text += ", index rebuilt from the segments"
    if report.frames_dropped:
        text += (
            f"; dropped {report.frames_dropped:,} torn or damaged runs, {bytes_text(report.bytes_dropped)}"
        )
    elif report.bytes_dropped:
        text += f"; cut off {bytes_text(report.bytes_dropped)} that were being written"
    if report.unknown_files:
        names = ", ".join(report.unknown_files[:NAMES_MAX]) + (
            "..." if len(report.unknown_files) > NAMES_MAX else ""
        )
        text += f"; left alone {len(report.unknown_files)} unknown files: {names}"
    return text


def bytes_text(size: float) -> str:
    """Return bytes with a binary unit and one decimal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
