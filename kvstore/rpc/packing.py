"""Checks of what arrives: packed fields, hashes, seconds; an error names field, limit and value got."""

from __future__ import annotations

import math
from collections.abc import Sized

import numpy as np

from kvstore.api import U32Array
from kvstore.errors import InvalidArgument
from kvstore.types import DIGEST_BYTES, HASH_BYTES, SEGMENTS_MAX, BlockHash, Fingerprint

U32_BYTES = 4
PUT_ID_BYTES_MAX = 64
TEXT_CHARACTERS_MAX = 256
REPEATED_MAX = 65536
"""Entries of one repeated field: as many as a request may have keys."""
LEASES_MAX = 4096
"""Leases in one message: each costs a look-up on the event loop."""


def fingerprint_of(value: bytes, field: str) -> Fingerprint:
    """Return a namespace's fingerprint; refuses any length but 32."""
    if len(value) != HASH_BYTES:
        raise InvalidArgument(f"{field}: a fingerprint has {HASH_BYTES} bytes, got {len(value)}")
    return Fingerprint(value)


def hash_of(value: bytes, field: str) -> BlockHash:
    """Return a block hash; refuses any length but 32."""
    if len(value) != HASH_BYTES:
        raise InvalidArgument(f"{field}: a block hash has {HASH_BYTES} bytes, got {len(value)}")
    return BlockHash(value)


def keys_of(value: bytes, field: str) -> bytes:
    """Return packed keys; refuses a length that is no multiple of 32."""
    if len(value) % HASH_BYTES:
        raise InvalidArgument(f"{field}: packed keys have a multiple of {HASH_BYTES} bytes, got {len(value)}")
    return value


def seconds_of(value: float, field: str) -> float:
    """Return a duration; refuses negative ones and what is not finite."""
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgument(f"{field}: seconds must be finite and >= 0, got {value}")
    return value


def text_of(value: str, field: str) -> str:
    """Return a short text (an owner, a class name, a cursor); refuses more than 256 characters."""
    if len(value) > TEXT_CHARACTERS_MAX:
        raise InvalidArgument(f"{field}: at most {TEXT_CHARACTERS_MAX} characters, got {len(value)}")
    return value


def count_of(values: Sized, field: str, *, limit: int = REPEATED_MAX) -> int:
    """Return how many entries a repeated field has; refuses too many before anything loops over them."""
    if len(values) > limit:
        raise InvalidArgument(f"{field}: at most {limit} entries, got {len(values)}")
    return len(values)


def put_id_of(value: bytes, field: str) -> bytes:
    """Return a put id; refuses more than 64 bytes."""
    if len(value) > PUT_ID_BYTES_MAX:
        raise InvalidArgument(f"{field}: at most {PUT_ID_BYTES_MAX} bytes, got {len(value)}")
    return value


def words_of(value: bytes, field: str) -> bytes:
    """Return packed little-endian u32; refuses a length that is no multiple of 4."""
    if len(value) % U32_BYTES:
        raise InvalidArgument(f"{field}: packed u32 have a multiple of {U32_BYTES} bytes, got {len(value)}")
    return value


def u32_to_wire(array: U32Array) -> bytes:
    """Return an array as packed little-endian u32."""
    return array.astype("<u4", copy=False).tobytes()


def u32_from_wire(value: bytes, field: str, *, count: int | None = None) -> U32Array:
    """Return a read-only view of packed u32.

    Errors: InvalidArgument when the length is no multiple of 4, or not `count` numbers.
    """
    if count is not None and len(value) != count * U32_BYTES:
        raise InvalidArgument(f"{field}: {count} packed u32 are {count * U32_BYTES} bytes, got {len(value)}")
    return np.frombuffer(words_of(value, field), dtype="<u4")


def digests_of(value: bytes, field: str, *, blocks: int) -> bytes:
    """Return packed digests of some blocks: empty, or 16 bytes for each of 1..8 segments of each block."""
    each, rest = divmod(len(value), DIGEST_BYTES * blocks) if blocks else (0, len(value))
    if value and (rest or not 1 <= each <= SEGMENTS_MAX):
        unit = f"{DIGEST_BYTES} bytes x 1..{SEGMENTS_MAX} segments"
        raise InvalidArgument(f"{field}: digests of {blocks} blocks are {unit} each, got {len(value)} bytes")
    return value
