"""A client's proof of life: a lock that the kernel drops when its holder dies, one byte per session."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import weakref
from pathlib import Path

from kvstore.api import NO_SESSION
from kvstore.errors import InvalidArgument, TierUnavailable

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


def _byte(kind: int, session: int) -> bytes:
    if not 0 < session < 1 << 32:
        raise InvalidArgument(f"client lock: session {session} is outside 1..2^32-1")
    return _FLOCK.pack(kind, os.SEEK_SET, session, 1, 0)


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
        """Return whether a session's client holds its byte; False without a session or after `close`."""
        if self._fd is None or session == NO_SESSION:
            return False
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _byte(fcntl.F_WRLCK, session))
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

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
