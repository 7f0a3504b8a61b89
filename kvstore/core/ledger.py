"""The departed ledger: a fixed table of what left and why, so that a miss can say its reason."""

from __future__ import annotations

import numpy as np

from kvstore.types import HASH_BYTES, MissReason

_REASONS = (
    MissReason.EXPIRED,
    MissReason.EVICTED,
    MissReason.CORRUPT,
    MissReason.DELETED,
    MissReason.THROTTLED,
)
_CODES = {reason: code + 1 for code, reason in enumerate(_REASONS)}


class DepartedLedger:
    """Direct-mapped by hash: bounded memory, one vectorised write per departing run.

    A place that was overwritten can no longer tell "never stored" from "left long ago": it answers
    `forgotten`.
    """

    def __init__(self, entries: int) -> None:
        self._tags = np.zeros(entries, np.uint64)
        self._codes = np.zeros(entries, np.uint8)
        self._overwritten = np.zeros(entries, np.bool_)

    def note(self, keys: bytes, reason: MissReason, *, space: bytes) -> None:
        """Record that the blocks of a packed keys field left a namespace."""
        tags = np.frombuffer(keys, np.uint64)[:: HASH_BYTES // 8] ^ _salt(space)
        places = (tags % np.uint64(len(self._tags))).astype(np.int64)
        self._overwritten[places] |= (self._codes[places] != 0) & (self._tags[places] != tags)
        self._tags[places] = tags
        self._codes[places] = _CODES[reason]

    def reason(self, key: bytes, *, space: bytes) -> MissReason:
        """Return why this block is absent from a namespace, as far as the table remembers."""
        tag = np.frombuffer(key[:8], np.uint64)[0] ^ _salt(space)
        place = int(tag % np.uint64(len(self._tags)))
        if self._codes[place] and self._tags[place] == tag:
            return _REASONS[int(self._codes[place]) - 1]
        return (
            MissReason.FORGOTTEN
            if self._overwritten[place] or self._codes[place]
            else MissReason.NEVER_STORED
        )


def _salt(space: bytes) -> np.uint64:
    """Keys of a flat namespace are the client's choice: the same key in another tenant's is another block."""
    return np.uint64(int.from_bytes(space[:8], "little"))
