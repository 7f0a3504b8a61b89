"""Block naming: chain roots, chained block hashes and the re-rooting of foreign hashes. Key format version 1.

A hash commits to its whole prefix, to the namespace and to the tenant's secret, so equal keys mean equal
meaning. Nothing here depends on hash seeds, host names or dict order; golden vectors in the tests pin every
byte.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidArgument
from kvstore.types import HASH_BYTES, BlockHash, Fingerprint

KEY_VERSION = 1
Tokens = Sequence[int] | npt.NDArray[np.integer]


def chain_root(fingerprint: Fingerprint, *, tenant_secret: bytes = b"") -> BlockHash:
    """Return the parent of every first block: the namespace mixed with the tenant's secret.

    Without the secret a tenant's keys cannot be guessed, even with the prompt in hand.
    """
    secret = tenant_secret if len(tenant_secret) <= 64 else hashlib.blake2b(tenant_secret).digest()
    return BlockHash(
        hashlib.blake2b(fingerprint, digest_size=HASH_BYTES, key=secret, person=b"kvstore root v1").digest()
    )


def block_hashes(
    parent: BlockHash,
    tokens: Tokens,
    *,
    block_tokens: int,
    extra_keys: Mapping[int, Sequence[bytes]] | None = None,
) -> bytes:
    """Return the packed hashes of all full blocks of `tokens` behind `parent`; a partial last block has none.

    `extra_keys` maps a block's index to what else changes its bytes, such as image digests.
    Shapes: tokens [n] -> 32 x (n // block_tokens) bytes.
    Errors: InvalidArgument on a parent that is no hash or a token outside 0..2^32-1.
    """
    if len(parent) != HASH_BYTES:
        raise InvalidArgument(f"block_hashes: parent has {len(parent)} bytes, {HASH_BYTES} expected")
    packed = _packed_tokens(tokens)
    size = 4 * block_tokens
    names: list[bytes] = []
    current: bytes = parent
    for index in range(len(packed) // size):
        extras = extra_keys.get(index, ()) if extra_keys else ()
        current = _block_hash(current, packed[index * size : (index + 1) * size], extras)
        names.append(current)
    return b"".join(names)


def _packed_tokens(tokens: Tokens) -> bytes:
    array = np.asarray(tokens, dtype=np.int64)
    if array.ndim != 1 or (array.size and (array.min() < 0 or array.max() > 0xFFFFFFFF)):
        raise InvalidArgument(
            f"block_hashes: tokens must be one row of ids in 0..2^32-1, got shape {array.shape}"
        )
    return array.astype("<u4").tobytes()


def _block_hash(parent: bytes, token_bytes: bytes, extras: Sequence[bytes]) -> bytes:
    state = hashlib.blake2b(parent, digest_size=HASH_BYTES, person=b"kvstore blk v1")
    state.update(struct.pack("<II", len(token_bytes) // 4, len(extras)))
    state.update(token_bytes)
    for extra in extras:
        state.update(struct.pack("<I", len(extra)))
        state.update(extra)
    return state.digest()


def tensors_fingerprint(
    tensors: Iterable[tuple[str, str, Sequence[int], memoryview]], *, person: bytes
) -> str:
    """Return a fingerprint of all tensors in the order given: of every byte, of name, dtype and shape.

    Always computed afresh: a file's name and time do not prove what a process has in memory. xxh3-128 reads
    10 GB/s and more; it catches accidents, not a forger, who could as well write to the store directly.
    `person` tells who named the tensors.
    """
    names = hashlib.blake2b(digest_size=HASH_BYTES, person=person)
    for name, dtype, shape, plain in tensors:
        names.update(f"{name}\0{dtype}\0{list(shape)}\0".encode())
        names.update(xxhash.xxh3_128_digest(plain))
    return f"xxh3-{names.hexdigest()}"


def reroot(root: BlockHash, foreign: Sequence[bytes]) -> bytes:
    """Return packed keys for an engine's own collision-safe hashes: one hash each, in order, not verified.

    Errors: InvalidArgument on a foreign hash shorter than 16 bytes, which cannot be collision safe.
    """
    for index, name in enumerate(foreign):
        if len(name) < 16:
            raise InvalidArgument(
                f"reroot: foreign hash {index} has {len(name)} bytes, at least 16 are needed"
            )
    person = b"kvstore fgn v1"
    return b"".join(
        hashlib.blake2b(root + name, digest_size=HASH_BYTES, person=person).digest() for name in foreign
    )
