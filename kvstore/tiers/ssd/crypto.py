"""Encryption of records: AES-256-GCM, a key per frame and a nonce per record. FORMAT.md argues the nonces.

The package `cryptography` is imported when the first record is encrypted or opened, not before.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.tiers.ssd.crypto_keys import KeyRing, KeyState, TenantKey, find_key
from kvstore.types import DIGEST_BYTES, SEGMENTS_MAX, TRAILER_BYTES

DIGESTS_AT = 96
SERIAL_AT = 224
TAG_AT = 232
TAG_BYTES = 16
CHECKSUM_AT = 248
_DIGESTS_END = DIGESTS_AT + DIGEST_BYTES * SEGMENTS_MAX
_NONCE = struct.Struct("<IQ")
_OFFSET = struct.Struct("<Q")
_SERIAL = struct.Struct("<I")
_INFO = b"kvstore ssd frame v1"


@dataclass(frozen=True, slots=True)
class FramePlace:
    """Where a frame lies, in terms that no other frame ever shares."""

    segment_id: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class FrameSeal:
    """How a frame is encrypted: by which key, under which serial number of its segment."""

    key: TenantKey
    place: FramePlace
    serial: int


class RecordSealer:
    """Encrypts the records of one frame.

    Threads: one.
    """

    def __init__(self, seal: FrameSeal) -> None:
        self._place = seal.place
        self._cipher = _frame_cipher(seal.key.secret, seal.place, seal.serial)

    def seal(self, body: memoryview, trailer: memoryview, into: memoryview, *, part: int, block: int) -> None:
        """Write a whole record into `into`: body and digests encrypted, tag and checksum set.

        Shapes: trailer 256 bytes, complete but for tag and checksum; body all bytes before it.
        """
        size = body.nbytes
        encryptor = self._cipher(_NONCE.pack(part, block), None)
        encryptor.authenticate_additional_data(_bound(trailer, self._place))
        encryptor.update_into(body, into[:size])
        out = into[size:]
        out[:] = trailer
        encryptor.update_into(trailer[DIGESTS_AT:_DIGESTS_END], out[DIGESTS_AT:_DIGESTS_END])
        encryptor.finalize()
        out[TAG_AT : TAG_AT + TAG_BYTES] = encryptor.tag
        out[CHECKSUM_AT:] = xxhash.xxh3_64_intdigest(out[:CHECKSUM_AT]).to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Opened:
    """How many records from the start are decrypted, what stopped the rest, and whether a key did."""

    good: int
    fault: str = ""
    state: KeyState | None = None


class RecordOpener:
    """Decrypts the records of one frame where they lie; `first` is the block of the first one.

    Threads: one.
    """

    def __init__(self, ring: KeyRing | None, place: FramePlace, *, first: int) -> None:
        self._ring, self._place, self._block = ring, place, first
        self._known: tuple[int, int, int] = (0, 0, 0)
        self._cipher: _Cipher | None = None

    def open(
        self, rows: npt.NDArray[np.uint8], trailers: npt.NDArray[np.uint8], named: npt.NDArray[np.void]
    ) -> Opened:
        """Decrypt bodies in place and the digests in `trailers`; plain records stay as they are.

        Shapes: rows u8[n, stride], trailers u8[n, 256], a copy; named: the same bytes as a table.
        """
        first, self._block = self._block, self._block + len(rows)
        if not named["key_id"].any():
            return Opened(len(rows))
        body = rows.shape[1] - TRAILER_BYTES
        for index, (row, trailer) in enumerate(zip(rows, trailers, strict=True)):
            entry = named[index]
            key_id = int(entry["key_id"])
            if not key_id:
                continue
            use = (key_id, int(entry["key_check"]), int(entry["serial"]))
            if use != self._known:
                found = find_key(self._ring, key_id, use[1])
                if isinstance(found, KeyState):
                    return Opened(index, f"encrypted with key {key_id}, which is {found.value}", found)
                self._cipher, self._known = _frame_cipher(found.secret, self._place, use[2]), use
            assert self._cipher is not None
            nonce = _NONCE.pack(int(entry["part"]), first + index)
            if not self._decrypt(self._cipher, nonce, memoryview(row)[:body], memoryview(trailer)):
                return Opened(index, "it does not authenticate")
        return Opened(len(rows))

    def _decrypt(self, cipher: _Cipher, nonce: bytes, body: memoryview, trailer: memoryview) -> bool:
        decryptor = cipher(nonce, bytes(trailer[TAG_AT : TAG_AT + TAG_BYTES]))
        decryptor.authenticate_additional_data(_bound(trailer, self._place))
        decryptor.update_into(body, body)
        digests = trailer[DIGESTS_AT:_DIGESTS_END]
        decryptor.update_into(digests, digests)
        try:
            decryptor.finalize()
        except _library().invalid_tag:
            return False
        return True


_Cipher = Callable[[bytes, bytes | None], Any]
"""Makes an encryptor from a nonce, or a decryptor from a nonce and a tag."""


def _bound(trailer: memoryview, place: FramePlace) -> bytes:
    """Return what the tag covers beside the ciphertext: all that a record says openly, and its place."""
    told = bytes(trailer[:DIGESTS_AT]) + bytes(trailer[SERIAL_AT:TAG_AT])
    return told + place.segment_id + _OFFSET.pack(place.offset)


def _frame_cipher(secret: bytes, place: FramePlace, serial: int) -> _Cipher:
    library = _library()
    derive = library.hkdf(library.sha256(), 32, place.segment_id, _INFO + _SERIAL.pack(serial))
    algorithm = library.aes(derive.derive(secret))

    def cipher(nonce: bytes, tag: bytes | None) -> Any:
        made = library.cipher(algorithm, library.gcm(nonce, tag))
        return made.encryptor() if tag is None else made.decryptor()

    return cipher


@dataclass(frozen=True, slots=True)
class _Library:
    aes: Any
    cipher: Any
    gcm: Any
    hkdf: Any
    sha256: Any
    invalid_tag: type[Exception]


@cache
def _library() -> _Library:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return _Library(algorithms.AES256, Cipher, modes.GCM, HKDF, SHA256, InvalidTag)
