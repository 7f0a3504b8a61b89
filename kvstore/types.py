"""The closed sets and small value types that every package shares; knows nothing of I/O or transport."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import numpy as np

HASH_BYTES = 32
"""A block hash is BLAKE2b-256."""
DIGEST_BYTES = 16
"""A payload digest is xxh3-128, one per segment of a block."""
PAGE_BYTES = 4096
"""Unit of slot addresses, of record strides and of direct I/O."""
TRAILER_BYTES = 256
"""Room kept free behind a payload for its record trailer."""
SEGMENTS_MAX = 8
"""A block is cut into at most this many separately digested segments."""
LEASE_SECONDS_MAX = 60.0
RESERVATION_SECONDS = 60.0
PART_WAIT_SECONDS = 10.0
"""So long the parts of a put that are there keep other puts away while further ranks are due."""

BlockHash = NewType("BlockHash", bytes)
"""32 bytes. Many hashes travel packed: one bytes object of 32 x n."""
Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes that name a namespace."""
PageIndex = NewType("PageIndex", int)
"""A slot address: the arena page it starts at. Page 0 is the arena's header, so 0 means "no slot"."""


class Tier(StrEnum):
    """Where bytes lie; in ladder order, fastest first."""

    HBM = "hbm"
    HOST = "host"
    SSD = "ssd"
    SHARED = "shared"


class MissReason(StrEnum):
    """Why a match ended where it did. A miss is a value, never an exception."""

    NEVER_STORED = "never_stored"
    FORGOTTEN = "forgotten"
    EXPIRED = "expired"
    EVICTED = "evicted"
    CORRUPT = "corrupt"
    IDENTITY_MISMATCH = "identity_mismatch"
    PART_MISSING = "part_missing"
    IN_FLIGHT = "in_flight"
    THROTTLED = "throttled"
    TIER_DOWN = "tier_down"
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"
    DELETED = "deleted"
    # The client's own reasons: the daemon never answered.
    DAEMON_GONE = "daemon_gone"
    DEADLINE = "deadline"
    BREAKER_OPEN = "breaker_open"


class PutOutcome(StrEnum):
    """What became of one block of a put."""

    RESERVED = "reserved"
    """Answer to reserve: a slot is yours until the deadline."""
    STORED_HOST = "stored_host"
    """In host memory; promises nothing after a crash."""
    STORED_SSD = "stored_ssd"
    """On SSD behind an fdatasync, with every ancestor: survives kill -9 and power loss."""
    DUPLICATE = "duplicate"
    """Was there already; first writer wins, retention renewed."""
    IN_FLIGHT = "in_flight"
    """Another put holds this block's reservation."""
    PART_PENDING = "part_pending"
    """Committed, invisible until the other required parts of the same put_id commit."""
    THROTTLED = "throttled"
    """No room or queue full; nothing kept. Blocks behind it are cut too."""
    EXPIRED = "expired"
    """The reservation ended before the commit."""
    REFUSED = "refused"
    """Corrupt on arrival (digest mismatch), or the tier is read-only."""


class MatchMode(StrEnum):
    """PROBE: no lease, no touch, no count. LEASE: the real thing. BITMAP: which keys are there, as PROBE."""

    PROBE = "probe"
    LEASE = "lease"
    BITMAP = "bitmap"


class Addressing(StrEnum):
    """CHAIN: keys are a prefix chain. FLAT: a key is a key."""

    CHAIN = "chain"
    FLAT = "flat"


class GroupKind(StrEnum):
    """Lifetime rule of a cache group."""

    FULL_HISTORY = "full_history"
    TRAILING_BLOCKS = "trailing_blocks"
    CHECKPOINT = "checkpoint"
    NEVER_STORE = "never_store"


class TtlMode(StrEnum):
    """SLIDING: renewed by every touch. FIXED: counted from the write."""

    SLIDING = "sliding"
    FIXED = "fixed"


class Admission(StrEnum):
    """When a block goes to SSD. FIRST: once it was put. SECOND: once it was used after that, or put again."""

    FIRST = "first"
    SECOND = "second"


class AckTier(StrEnum):
    """How far a commit waits before it answers."""

    HOST = "host"
    SSD = "ssd"


class ReleaseOutcome(StrEnum):
    """What the reader did with its lease; hits are counted from this, on delivery."""

    USED = "used"
    UNUSED = "unused"
    CORRUPT = "corrupt"
    """The reader's own check failed: the daemon drops the blocks from `used` on."""


def key_count(keys: bytes) -> int:
    """Return how many hashes a packed keys field holds.

    Errors: InvalidArgument when its length is no multiple of 32.
    """
    from kvstore.errors import InvalidArgument

    if len(keys) % HASH_BYTES:
        raise InvalidArgument(f"packed keys: length {len(keys)} is no multiple of {HASH_BYTES}")
    return len(keys) // HASH_BYTES


def key_at(keys: bytes, index: int) -> BlockHash:
    """Return hash number `index` of a packed keys field; negative counts from the end."""
    if index < 0:
        index += len(keys) // HASH_BYTES
    return BlockHash(keys[index * HASH_BYTES : (index + 1) * HASH_BYTES])


def split_keys(keys: bytes) -> list[bytes]:
    """Return the hashes of a packed keys field one by one."""
    # Void items come out as bytes, five times as fast as by slicing.
    found: list[bytes] = np.frombuffer(keys, f"V{HASH_BYTES}").tolist()
    return found


def round_up(value: int, unit: int) -> int:
    """Round `value` up to a multiple of `unit`."""
    return -(-value // unit) * unit
