"""The data directory: whose it is (STORE), who uses it (lock), and the namespaces of its frames."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.namespace import Namespace
from kvstore.tiers.fs import FileSystem, aligned_buffer, read_up_to, write_all
from kvstore.tiers.ssd.format import FORMAT_VERSION, ID_BYTES
from kvstore.types import Fingerprint

log = logging.getLogger(__name__)

STORE_NAME = "STORE"
LOCK_NAME = "lock"
INDEX_NAME = "index"
SEGMENTS_NAME = "segments"
NAMESPACES_NAME = "namespaces"
PROBE_NAME = "probe.tmp"
STALE_NAME = "index.stale"
"""While this file is there the index cannot be trusted, and the next start rebuilds it from the segments."""
READING_NAME = "index.reading"
"""Counts the starts that began to read the index and have not come to an end."""
DELETIONS_NAME = "deletions"
"""How many deletions there were: an index that knows of another number still names frames that are gone."""
SCRUB_NAME = "scrub.json"
"""Where the scrub goes on after a restart."""
_DELETIONS = struct.Struct("<QQ")
RETENTION_NAME, RECEIPTS_NAME, DEPARTED_NAME = "retention.json", "receipts.json", "departed"
"""Kept here by the daemon, not by the tier: changes of classes, receipts of purges, and what left when."""
_DAEMONS = (RETENTION_NAME, RECEIPTS_NAME, DEPARTED_NAME)
_SEGMENT_SUFFIX = ".seg"
_TEMPORARY_SUFFIX = ".tmp"
_SMALL_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """Where everything lies below one directory."""

    root: Path

    @property
    def segments(self) -> Path:
        """The folder of segment files."""
        return self.root / SEGMENTS_NAME

    @property
    def namespaces(self) -> Path:
        """The folder of canonical namespaces."""
        return self.root / NAMESPACES_NAME

    @property
    def index(self) -> Path:
        """The folder of the LMDB environment."""
        return self.root / INDEX_NAME

    def segment_path(self, number: int) -> Path:
        """Return the path of a segment file."""
        return self.segments / f"{number:016x}{_SEGMENT_SUFFIX}"

    def namespace_path(self, fingerprint: Fingerprint) -> Path:
        """Return the path of a namespace file."""
        return self.namespaces / f"{fingerprint.hex()}.json"


def segment_number(name: str) -> int | None:
    """Return the number in a segment file's name, or None when it is no such name."""
    stem = name.removesuffix(_SEGMENT_SUFFIX)
    if stem == name or len(stem) != 16 or set(stem) - set("0123456789abcdef"):
        return None
    return int(stem, 16)


def read_small(fs: FileSystem, path: Path) -> bytes:
    """Return the content of a small file.

    Errors: OSError.
    """
    size = fs.stat(path).size_bytes
    if size > _SMALL_FILE_BYTES:
        raise OSError(f"{path} has {size} bytes, at most {_SMALL_FILE_BYTES} expected")
    buffer = aligned_buffer(size)
    handle = fs.open(path, flags=os.O_RDONLY)
    try:
        came = read_up_to(fs, handle, [buffer[:size]], offset=0) if size else 0
    finally:
        fs.close(handle)
    return bytes(buffer[:came])


def write_durable(fs: FileSystem, path: Path, *, content: bytes) -> None:
    """Create or replace a small file so that after a crash it is there whole or not at all.

    Errors: OSError.
    """
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    handle = fs.open(temporary, flags=os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(fs, handle, [memoryview(content)], offset=0)
        fs.fdatasync(handle)
    finally:
        fs.close(handle)
    fs.rename(temporary, path)
    fs.fsync_directory(path.parent)


def distrust_index(fs: FileSystem, directory: DataDirectory) -> None:
    """Have the next start rebuild the index: it is damaged, or its rows still name frames that are deleted.

    Errors: OSError.
    """
    write_durable(fs, directory.root / STALE_NAME, content=b"rebuild\n")


def read_deletions(fs: FileSystem, directory: DataDirectory) -> int | None:
    """Return how many deletions there were; None when that cannot be told."""
    try:
        number, checksum = _DELETIONS.unpack(read_small(fs, directory.root / DELETIONS_NAME))
    except FileNotFoundError:
        return 0
    except (OSError, struct.error):
        return None
    return int(number) if checksum == xxhash.xxh3_64_intdigest(number.to_bytes(8, "little")) else None


def write_deletions(fs: FileSystem, directory: DataDirectory, *, count: int) -> None:
    """Make the number of deletions durable; in place, because it is written with every one of them.

    Errors: OSError.
    """
    path = directory.root / DELETIONS_NAME
    is_new = not _is_file(fs, path)
    handle = fs.open(path, flags=os.O_WRONLY | os.O_CREAT)
    try:
        content = _DELETIONS.pack(count, xxhash.xxh3_64_intdigest(count.to_bytes(8, "little")))
        write_all(fs, handle, [memoryview(content)], offset=0)
        fs.fdatasync(handle)
    finally:
        fs.close(handle)
    if is_new:
        fs.fsync_directory(directory.root)


def _is_file(fs: FileSystem, path: Path) -> bool:
    try:
        fs.stat(path)
    except FileNotFoundError:
        return False
    return True


def prepare(fs: FileSystem, directory: DataDirectory) -> None:
    """Make the folders and make their names durable.

    Errors: TierUnavailable when the directory cannot be written.
    """
    try:
        for folder in (directory.root, directory.segments, directory.namespaces):
            fs.mkdir(folder)
        fs.fsync_directory(directory.root)
    except OSError as error:
        raise TierUnavailable(f"data directory {directory.root} cannot be written: {error}") from error
    # The root and what it lies in may have been made just now; those directories may be somebody else's.
    for parent in directory.root.parents:
        with suppress(OSError):
            fs.fsync_directory(parent)


def read_store_id(fs: FileSystem, directory: DataDirectory) -> bytes | None:
    """Return the store's id, or None when the directory has none yet.

    Errors: TierUnavailable when STORE is there but of another version, or cannot be read; it is left alone.
    """
    path = directory.root / STORE_NAME
    try:
        document = json.loads(read_small(fs, path))
        version, identity = int(document["format"]), bytes.fromhex(document["store"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TierUnavailable(
            f"{path} cannot be read: {error}; move it away to have it rebuilt from the segments"
        ) from error
    if version != FORMAT_VERSION or len(identity) != ID_BYTES:
        raise TierUnavailable(
            f"{path}: format {version} is unknown, this build knows {FORMAT_VERSION}; left alone"
        )
    return identity


def write_store_id(fs: FileSystem, directory: DataDirectory, *, identity: bytes, created_at: float) -> None:
    """Write STORE.

    Errors: TierUnavailable when the directory cannot be written.
    """
    document = {"format": FORMAT_VERSION, "store": identity.hex(), "created_at": created_at}
    try:
        content = json.dumps(document, sort_keys=True).encode() + b"\n"
        write_durable(fs, directory.root / STORE_NAME, content=content)
    except OSError as error:
        raise TierUnavailable(f"{directory.root / STORE_NAME} cannot be written: {error}") from error


def write_namespace(fs: FileSystem, directory: DataDirectory, *, namespace: Namespace) -> None:
    """Make a namespace durable.

    Errors: OSError.
    """
    write_durable(fs, directory.namespace_path(namespace.fingerprint), content=namespace.canonical())


def read_namespaces(fs: FileSystem, directory: DataDirectory) -> Iterator[tuple[str, Namespace | None]]:
    """Yield (name, namespace) for each file; None for what this build cannot read, which is left alone."""
    for name in fs.listdir(directory.namespaces):
        if name.endswith(_TEMPORARY_SUFFIX):
            continue
        try:
            namespace = Namespace.from_canonical(read_small(fs, directory.namespaces / name))
        except (OSError, InvalidArgument) as error:
            log.warning("namespace file left alone name=%s error=%s", name, error)
            yield name, None
            continue
        yield name, namespace if name == directory.namespace_path(namespace.fingerprint).name else None


def unknown_names(fs: FileSystem, directory: DataDirectory) -> list[str]:
    """Return what lies in the root or among the segments and has no name of ours; it is left alone."""
    ours = {
        STORE_NAME,
        LOCK_NAME,
        INDEX_NAME,
        SEGMENTS_NAME,
        NAMESPACES_NAME,
        PROBE_NAME,
        STALE_NAME,
        READING_NAME,
        SCRUB_NAME,
        DELETIONS_NAME,
    }
    replaced = (STORE_NAME, STALE_NAME, READING_NAME, SCRUB_NAME, *_DAEMONS)
    ours |= {*_DAEMONS, *(name + _TEMPORARY_SUFFIX for name in replaced), INDEX_NAME + ".broken"}
    found = [name for name in fs.listdir(directory.root) if name not in ours]
    names = fs.listdir(directory.segments)
    return found + [f"{SEGMENTS_NAME}/{name}" for name in names if segment_number(name) is None]


class DirectoryLock:
    """One daemon per data directory: an flock that the kernel lets go when its holder dies.

    The file holds the pid of its holder, for the message to whoever comes second.
    """

    def __init__(self, root: Path) -> None:
        """Take the lock.

        Errors: TierUnavailable naming the holder's pid, or why the file cannot be opened.
        """
        path = root / LOCK_NAME
        try:
            root.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise TierUnavailable(f"data directory {root} cannot be locked: {error}") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._handle)
            raise TierUnavailable(f"data directory {root} is used by the daemon with pid {holder}") from error
        # The kernel holds the lock; the pid is for people, and a full disk may have no room for it.
        with suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the lock go; idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
