"""The departed ledger: a fixed table of what left, why and when, so that a miss can say its reason and what
would have helped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.types import HASH_BYTES, MissReason

_REASONS = (
    MissReason.EXPIRED,
    MissReason.EVICTED,
    MissReason.CORRUPT,
    MissReason.DELETED,
    MissReason.THROTTLED,
)
_CODES = {reason: code + 1 for code, reason in enumerate(_REASONS)}
_ROW = np.dtype(
    [("left_at", "<u4"), ("since", "<u4"), ("evicted_before", "<u8"), ("name", "u1"), ("code", "u1")]
)
_PACKED = struct.Struct("<IIQBB")
"""A row as bytes: packed by hand and stored as opaque, which takes half the time of a structured value."""
_OPAQUE = np.dtype(f"V{_ROW.itemsize}")
_NAMES_MAX = 255
_U32_MAX = (1 << 32) - 1


@dataclass(slots=True)
class Departed:
    """How a block left: the class that held it, since when, when it left, and how many bytes of blocks have
    been evicted since it was (0 unless that was why): with so much more room it would still be there.

    Units: wall seconds, whole; bytes.
    """

    reason: MissReason
    retention_class: str
    since: float
    left_at: float
    evicted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LedgerImage:
    """The ledger as it is kept across a restart.

    Shapes: tags u64[n], rows 18 bytes x n, overwritten u8[n], all packed little-endian.
    """

    tags: bytes
    rows: bytes
    overwritten: bytes
    names: tuple[str, ...]
    evicted_bytes: int


class DepartedLedger:
    """Direct-mapped by hash: bounded memory, one vectorised write per departing run.

    A place that was overwritten can no longer tell "never stored" from "left long ago": it answers
    `forgotten`.
    """

    def __init__(self, entries: int) -> None:
        self._tags = np.zeros(entries, np.uint64)
        self._rows: npt.NDArray[np.void] = np.zeros(entries, _ROW)
        self._opaque = self._rows.view(_OPAQUE)
        self._codes = self._rows["code"]
        self._packed = bytearray(_ROW.itemsize)
        self._row = np.frombuffer(self._packed, _OPAQUE)
        self._overwritten = np.zeros(entries, np.bool_)
        self._names = [""]
        self._codes_of_names = {"": 0}
        self._evicted_bytes = 0
        self.notes = 0
        """How often something was noted."""

    def __len__(self) -> int:
        return len(self._tags)

    def note(self, keys: bytes, departed: Departed, *, space: bytes, size_bytes: int) -> None:
        """Record how the blocks of a packed keys field, of so many bytes, left a namespace."""
        tags = np.frombuffer(keys, np.uint64)[:: HASH_BYTES // 8] ^ _salt(space)
        places = self._places(tags)
        code = _CODES[departed.reason]
        self.notes += 1
        self._overwritten[places] |= (self._codes[places] != 0) & (self._tags[places] != tags)
        self._tags[places] = tags
        left_at, since = int(departed.left_at) & _U32_MAX, int(departed.since) & _U32_MAX
        name = self._name(departed.retention_class)
        _PACKED.pack_into(self._packed, 0, left_at, since, self._evicted_bytes, name, code)
        self._opaque[places] = self._row
        if departed.reason is MissReason.EVICTED:
            self._evicted_bytes += size_bytes

    def _places(self, tags: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        return (tags % np.uint64(len(self._tags))).astype(np.int64)

    def _name(self, name: str) -> int:
        code = self._codes_of_names.get(name)
        if code is None:
            if len(self._names) > _NAMES_MAX:
                return 0
            code = self._codes_of_names[name] = len(self._names)
            self._names.append(name)
        return code

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

    def look(self, key: bytes, *, space: bytes) -> Departed | None:
        """Return how this block left a namespace, None when the table does not know; the first 8 bytes of its
        hash are enough.
        """
        tag = np.frombuffer(key[:8], np.uint64)[0] ^ _salt(space)
        place = int(tag % np.uint64(len(self._tags)))
        if not self._codes[place] or self._tags[place] != tag:
            return None
        left_at, since, evicted_before, name, code = self._rows[place].item()
        reason = _REASONS[code - 1]
        evicted = self._evicted_bytes - evicted_before if reason is MissReason.EVICTED else 0
        return Departed(reason, self._names[name], float(since), float(left_at), evicted)

    def leading(
        self, keys: bytes, reason: MissReason, *, space: bytes
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return of the leading blocks that left for one reason since when they were held, and how many bytes
        were evicted from then on.
        """
        tags = np.frombuffer(keys, np.uint64)[:: HASH_BYTES // 8] ^ _salt(space)
        places = self._places(tags)
        known = (self._tags[places] == tags) & (self._codes[places] == _CODES[reason])
        count = len(known) if known.all() else int(np.argmin(known))
        rows = self._rows[places[:count]]
        evicted = self._evicted_bytes - rows["evicted_before"].astype(np.float64)
        return rows["since"].astype(np.float64), evicted

    def forget_all(self) -> None:
        """What is not in the table may have left before: unknown blocks are `forgotten` from now on."""
        self._overwritten[:] = True

    def image(self, start: int, count: int) -> tuple[bytes, bytes, bytes]:
        """Return packed tags, rows and marks of a stretch of the table."""
        part = slice(start, start + count)
        return self._tags[part].tobytes(), self._rows[part].tobytes(), self._overwritten[part].tobytes()

    def whole(self, parts: list[tuple[bytes, bytes, bytes]]) -> LedgerImage:
        """Put stretches together."""
        tags, rows, marks = (b"".join(field) for field in zip(*parts, strict=True))
        return LedgerImage(tags, rows, marks, tuple(self._names), self._evicted_bytes)

    def restore(self, image: LedgerImage) -> bool:
        """Take over what was kept; says whether it fits this table. Before the first note only."""
        entries = len(self)
        sizes = (len(image.tags), len(image.rows), len(image.overwritten))
        if sizes != (8 * entries, _ROW.itemsize * entries, entries) or image.names[:1] != ("",):
            return False
        rows = np.frombuffer(image.rows, _ROW)
        if int(rows["code"].max(initial=0)) > len(_REASONS) or int(rows["name"].max(initial=0)) >= len(
            image.names
        ):
            return False
        self._tags[:] = np.frombuffer(image.tags, np.uint64)
        self._rows[:] = rows
        self._overwritten[:] = np.frombuffer(image.overwritten, np.bool_)
        self._names = list(image.names)
        self._codes_of_names = {name: code for code, name in enumerate(self._names)}
        self._evicted_bytes = image.evicted_bytes
        return True


def _salt(space: bytes) -> np.uint64:
    """Keys of a flat namespace are the client's choice: the same key in another tenant's is another block."""
    return np.uint64(int.from_bytes(space[:8], "little"))
