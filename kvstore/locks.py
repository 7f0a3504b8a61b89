"""Locks that the kernel drops when their holder dies: a byte per session, a file per data directory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import weakref
from pathlib import Path

from kvstore.errors import InvalidArgument, TierUnavailable

DIRECTORY_LOCK_NAME = "daemon.lock"
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


def _byte(kind: int, session: int) -> bytes:
    if not 0 < session < 1 << 32:
        raise InvalidArgument(f"client lock: session {session} is outside 1..2^32-1")
    return _FLOCK.pack(kind, os.SEEK_SET, session, 1, 0)


def _is_held(fd: int, session: int) -> bool:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _byte(fcntl.F_WRLCK, session))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


class ClientLock:
    """A client's proof of life: it holds byte `session` of the daemon's lock file until it dies or releases.

    An open-file-description lock: SIGKILL drops it, SIGSTOP does not. A forked child lets go of its copy
    at once, so that it cannot keep its parent's lock.
    Threads: any.
    """

    def __init__(self, fd: int, session: int) -> None:
        self.session = session
        self._fd: int | None = fd
        _held.add(self)

    @staticmethod
    def hold(path: str | Path, session: int) -> ClientLock:
        """Take the lock.

        Errors: TierUnavailable when the file is gone or another process holds this session's byte.
        """
        request = _byte(fcntl.F_WRLCK, session)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TierUnavailable(f"client lock {path}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            os.close(fd)
            raise TierUnavailable(f"client lock {path}: session {session}: {error.strerror}") from error
        return ClientLock(fd, session)

    def release(self) -> None:
        """Let go; idempotent. Closing is enough and, unlike unlocking, harmless in a forked child."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


_held: weakref.WeakSet[ClientLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)


class ClientLocks:
    """The daemon's side: makes the lock file and asks who is alive.

    Threads: any.
    """

    def __init__(self, path: str | Path, *, mode: int = 0o600, group: str | None = None) -> None:
        """Create the file anew: sessions of an earlier daemon hold bytes of the old one.

        Errors: TierUnavailable when it cannot be created.
        """
        self.path = Path(path)
        self._fd: int | None = None
        try:
            self.path.unlink(missing_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            os.fchmod(self._fd, mode)  # whatever the umask took
            if group is not None:
                shutil.chown(self.path, group=group)
        except (OSError, LookupError) as error:
            self.close()
            raise TierUnavailable(f"client lock file {path}: {error}") from error

    def is_held(self, session: int) -> bool:
        """Return whether the client of this session still holds its byte; False after `close`."""
        return self._fd is not None and _is_held(self._fd, session)

    def close(self) -> None:
        """Remove the file unless another daemon has put its own there; idempotent."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            if os.path.samestat(os.fstat(fd), self.path.stat()):
                self.path.unlink()
        except FileNotFoundError:
            pass
        finally:
            os.close(fd)


def is_held(path: str | Path, session: int) -> bool:
    """Return whether a process holds this session's byte, for tools; a file that is gone holds nothing."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return _is_held(fd, session)
    finally:
        os.close(fd)


class DirectoryLock:
    """One daemon per data directory, by flock on a file in it that carries the holder's pid."""

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        self._fd: int | None = fd

    @staticmethod
    def acquire(directory: str | Path) -> DirectoryLock:
        """Take the directory.

        Errors: TierUnavailable naming the process that holds it, or why the lock file cannot be made.
        """
        path = Path(directory) / DIRECTORY_LOCK_NAME
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierUnavailable(f"data directory {directory}: no {path.name}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except OSError as error:
            pid = os.pread(fd, 32, 0).decode(errors="replace")
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise TierUnavailable(f"data directory {directory}: no lock: {error.strerror}") from error
            raise TierUnavailable(
                f"data directory {directory}: in use by the daemon with pid {pid or 'unknown'}; "
                "stop it, or choose another directory"
            ) from error
        return DirectoryLock(fd, path)

    def release(self) -> None:
        """Let go; idempotent. The file stays: without it two daemons could lock two files of one name."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
