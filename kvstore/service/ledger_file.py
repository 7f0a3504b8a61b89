"""The departed ledger across restarts: a file that may be lost or late, never wrong.

Written every few minutes and at the end. After a crash, what left since the last writing is missing, and
after every end what lay in host memory alone: unknown blocks are `forgotten` then, not `never_stored`.
"""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path

import xxhash

from kvstore.core.ladder import Ladder
from kvstore.core.ledger import LedgerImage
from kvstore.tiers.fs import FileSystem
from kvstore.tiers.ssd.directory import DEPARTED_NAME, read_small, write_durable
from kvstore.types import DIGEST_BYTES

_log = logging.getLogger(__name__)
VERSION = 1
COMPRESSION = 1
TABLE_BYTES_MAX = 64 << 20


class LedgerFile:
    """The ledger of one ladder in one data directory. Errors are logged: hits do not depend on it.

    Threads: any but the event loop, one at a time.
    """

    def __init__(self, ladder: Ladder, *, fs: FileSystem, root: Path) -> None:
        self._ladder = ladder
        self._fs = fs
        self._path = root / DEPARTED_NAME
        self._saved = -1

    def load(self, *, is_new_store: bool) -> None:
        """Take over what was kept, before the first verb; then mark the file as of a run that goes on."""
        try:
            content = read_small(self._fs, self._path)
            image, is_complete = decode(content)
            if not self._ladder.restore_ledger(image):
                raise ValueError("it is of another size")
        except FileNotFoundError:
            is_complete = is_new_store
        except (OSError, ValueError, KeyError, TypeError, zlib.error) as error:
            _log.warning("departed ledger starts empty", extra={"path": self._path, "cause": str(error)})
            is_complete = False
        if not is_complete:
            self._ladder.forget_unknown()
        self._save(is_complete=False)

    def save(self) -> None:
        """Write what has left until now, if anything has since the last time."""
        if self._ladder.departures != self._saved:
            self._save(is_complete=False)

    def close(self) -> None:
        """Write everything; nothing leaves after this but what lies in host memory alone."""
        self._save(is_complete=not self._ladder.has_unwritten())

    def _save(self, *, is_complete: bool) -> None:
        departures = self._ladder.departures
        content = encode(self._ladder.ledger_image(), is_complete=is_complete)
        try:
            write_durable(self._fs, self._path, content=content)
        except OSError as error:
            _log.warning("departed ledger not written", extra={"path": self._path, "cause": str(error)})
            return
        self._saved = departures


def encode(image: LedgerImage, *, is_complete: bool) -> bytes:
    """Return the file: a digest of all that follows, one line of JSON, the tables, compressed."""
    header = {
        "version": VERSION,
        "is_complete": is_complete,
        "entries": len(image.overwritten),
        "names": image.names,
        "evicted_bytes": image.evicted_bytes,
    }
    # Most of a young table is zeros.
    tables = zlib.compress(image.tags + image.rows + image.overwritten, COMPRESSION)
    body = json.dumps(header).encode() + b"\n" + tables
    return xxhash.xxh3_128_digest(body) + body


def decode(content: bytes) -> tuple[LedgerImage, bool]:
    """Return what a file says, and whether nothing is missing in it.

    Errors: ValueError, KeyError, TypeError, zlib.error on what is damaged or of another version.
    """
    body = content[DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != content[:DIGEST_BYTES]:
        raise ValueError("it is damaged")
    line, _, packed = body.partition(b"\n")
    header = json.loads(line)
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']} is unknown, this build knows {VERSION}")
    entries = int(header["entries"])
    tables = zlib.decompressobj().decompress(packed, TABLE_BYTES_MAX)
    ends = 8 * entries, len(tables) - entries
    image = LedgerImage(
        tables[: ends[0]],
        tables[ends[0] : ends[1]],
        tables[ends[1] :],
        tuple(str(name) for name in header["names"]),
        int(header["evicted_bytes"]),
    )
    return image, bool(header["is_complete"])
