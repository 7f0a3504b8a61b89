"""What `inspect` and `verify` show, wherever it comes from: a running daemon or a stopped one's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.namespace import Namespace
from kvstore.rpc.enums import TIER
from kvstore.rpc.v1 import admin_pb2, data_pb2
from kvstore.types import key_at, key_count


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """A namespace and what it holds."""

    namespace: Namespace
    blocks: int
    host_bytes: int
    ssd_bytes: int

    @staticmethod
    def from_wire(message: admin_pb2.NamespaceInfo) -> NamespaceView:
        """Return the view of the daemon's answer."""
        namespace = Namespace.from_canonical(message.canonical)
        return NamespaceView(namespace, message.blocks, message.host_bytes, message.ssd_bytes)

    def to_plain(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        return {
            "fingerprint": self.namespace.fingerprint.hex(),
            "identity": self.namespace.identity(),
            "layout": self.namespace.layout.to_plain(),
            "blocks": self.blocks,
            "host_bytes": self.host_bytes,
            "ssd_bytes": self.ssd_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run: consecutive blocks with one state. Units: wall seconds; expires_at is None if not known."""

    parent: bytes
    keys: bytes
    tiers: tuple[str, ...]
    host_blocks: int
    ssd_blocks: int
    retention_class: str
    written_at: float
    touched_at: float
    expires_at: float | None
    bytes: int
    provenance: int
    leased: bool

    @staticmethod
    def from_wire(message: data_pb2.RunInfo) -> RunView:
        """Return the view of the daemon's answer."""
        return RunView(
            parent=message.parent,
            keys=message.keys,
            tiers=tuple(str(TIER.from_wire(tier, "tier")) for tier in message.tiers),
            host_blocks=message.host_blocks,
            ssd_blocks=message.ssd_blocks,
            retention_class=message.retention_class,
            written_at=message.written_at,
            touched_at=message.touched_at,
            expires_at=message.expires_at,
            bytes=message.bytes,
            provenance=message.provenance,
            leased=message.leased,
        )

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return key_count(self.keys)

    def to_plain(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        return {
            "parent": self.parent.hex(),
            "keys": [key_at(self.keys, index).hex() for index in range(self.blocks)],
            "blocks": self.blocks,
            "tiers": list(self.tiers),
            "host_blocks": self.host_blocks,
            "ssd_blocks": self.ssd_blocks,
            "class": self.retention_class,
            "written_at": self.written_at,
            "touched_at": self.touched_at,
            "expires_at": self.expires_at,
            "bytes": self.bytes,
            "provenance": self.provenance,
            "leased": self.leased,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """One file of frames. Units: created_at in wall seconds."""

    segment: int
    path: str
    bucket: str
    bytes: int
    frames: int
    sealed: bool
    created_at: float

    @staticmethod
    def from_wire(message: admin_pb2.SegmentInfo) -> SegmentView:
        """Return the view of the daemon's answer."""
        return SegmentView(
            segment=message.segment,
            path=message.path,
            bucket=message.bucket,
            bytes=message.bytes,
            frames=message.frames,
            sealed=message.sealed,
            created_at=message.created_at,
        )

    def to_plain(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        return {
            "segment": f"{self.segment:016x}",
            "path": self.path,
            "bucket": self.bucket,
            "bytes": self.bytes,
            "frames": self.frames,
            "sealed": self.sealed,
            "created_at": self.created_at,
        }


@dataclass(frozen=True, slots=True)
class FaultView:
    """A block whose bytes are not what its writer wrote."""

    namespace: bytes
    key: bytes
    tier: str
    detail: str

    @staticmethod
    def from_wire(message: admin_pb2.VerifyFault) -> FaultView:
        """Return the view of the daemon's answer."""
        return FaultView(
            message.namespace, message.key, str(TIER.from_wire(message.tier, "tier")), message.detail
        )

    def to_plain(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        return {
            "namespace": self.namespace.hex(),
            "key": self.key.hex(),
            "tier": self.tier,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True)
class VerifyView:
    """How far a verification is; `faults` are those found since the view before, `unreadable` counts blocks
    that cannot be judged, because their key is not at hand.
    """

    blocks_done: int
    blocks_total: int
    bytes_done: int
    faults: tuple[FaultView, ...]
    unreadable: int = 0

    @staticmethod
    def from_wire(message: admin_pb2.VerifyReply) -> VerifyView:
        """Return the view of the daemon's answer."""
        faults = tuple(FaultView.from_wire(fault) for fault in message.faults)
        return VerifyView(message.blocks_done, message.blocks_total, message.bytes_done, faults)
