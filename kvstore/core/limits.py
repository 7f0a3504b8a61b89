"""Every bound of the core in one place."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds; reaching one is an explicit outcome and a counter, never a stall.

    `session_` limits are of one client: its share of what all need. What it has reserved, quarantine
    included, is at most `session_reserved_share` of the arena.
    A frame on SSD that nobody touched for `sleep_seconds` gives up its keys; longer than a put may take.
    Nobody waits longer than `load_seconds_max` and `write_seconds_max` for a disk that hangs.
    Units: bytes and counts as named; `ssd_capacity_bytes` 0 means that the tier's own limit is the only one.
    """

    keys_max: int = 65536
    leases_max: int = 65536
    reservations_max: int = 4096
    prefetches_max: int = 1024
    session_leases_max: int = 8192
    session_reservations_max: int = 1024
    session_reserved_share: float = 0.75
    session_loads_max: int = 16384
    session_prefetches_max: int = 256
    namespaces_max: int = 1024
    roots_max: int = 4096
    write_queue_bytes_max: int = 256 * MIB
    write_bytes_behind_reads: int = 8 * MIB
    loads_in_flight_max: int = 8
    load_bytes: int = 4 * MIB
    sweep_bytes: int = 256 * MIB
    load_seconds_max: float = 5.0
    write_seconds_max: float = 30.0
    ssd_capacity_bytes: int = 0
    ledger_entries: int = 1 << 18
    sleep_seconds: float = 600.0
    wake_seconds: float = 0.02
    """Nobody on a scheduler's path waits longer for a header (DESIGN section 3)."""
    remembered_commits_max: int = 4096
    boundary_scan_blocks_max: int = 4096
    bucket_fraction: float = 0.125
