"""Locks against real processes: death frees them, a stopped process keeps them, a forked child does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.locks import ClientLock, ClientLocks

HOLDER = """
import sys
from kvstore.locks import ClientLock
lock = ClientLock.hold(sys.argv[1], int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """Another process that holds a session's byte until it is ended."""

    def __init__(self, path: Path, session: int) -> None:
        command = [sys.executable, "-c", HOLDER, str(path), str(session)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"held\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[ClientLocks]:
    found = ClientLocks(tmp_path / "clients.lock")
    yield found
    found.close()


def client(locks: ClientLocks, session: int) -> Holder:
    return Holder(locks.path, session)


def test_a_killed_client_holds_nothing(locks: ClientLocks) -> None:
    holder = client(locks, 7)
    assert [locks.is_held(session) for session in (6, 7, 8)] == [False, True, False]
    holder.kill()
    assert not locks.is_held(7)


def test_a_stopped_client_is_alive(locks: ClientLocks) -> None:
    holder = client(locks, 7)
    os.kill(holder.process.pid, signal.SIGSTOP)
    os.waitpid(holder.process.pid, os.WUNTRACED)
    assert locks.is_held(7)
    holder.kill()
    assert not locks.is_held(7)


def test_clients_do_not_meet(locks: ClientLocks) -> None:
    first, second = client(locks, 1), client(locks, 2**32 - 1)
    first.kill()
    assert not locks.is_held(1)
    assert locks.is_held(2**32 - 1)
    second.kill()


def test_two_clients_cannot_be_one_session(locks: ClientLocks) -> None:
    holder = client(locks, 7)
    with pytest.raises(TierUnavailable, match="session 7"):
        ClientLock.hold(locks.path, 7)
    holder.kill()
    ClientLock.hold(locks.path, 7).release()


def test_locks_of_one_process_meet_too(locks: ClientLocks) -> None:
    lock = ClientLock.hold(locks.path, 3)
    assert locks.is_held(3)
    with pytest.raises(TierUnavailable, match="session 3"):
        ClientLock.hold(locks.path, 3)
    lock.release()
    lock.release()
    assert not locks.is_held(3)


def test_a_lock_ends_with_its_last_reference(locks: ClientLocks) -> None:
    lock = ClientLock.hold(locks.path, 3)
    del lock
    assert not locks.is_held(3)


def test_a_forked_child_does_not_keep_the_lock(locks: ClientLocks) -> None:
    lock = ClientLock.hold(locks.path, 9)
    awake_read, awake_write = os.pipe()
    end_read, end_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(awake_write, b"x")
        os.close(end_write)
        os.read(end_read, 1)  # until the parent closes its end
        os._exit(0)
    os.close(end_read)
    assert os.read(awake_read, 1) == b"x"
    assert locks.is_held(9), "the child's letting go must not unlock the parent's lock"
    lock.release()
    assert not locks.is_held(9), "the child still lives and must not hold it"
    os.close(end_write)
    os.waitpid(child, 0)
    os.close(awake_read)
    os.close(awake_write)


@pytest.mark.parametrize("session", [0, -1, 2**32])
def test_session_numbers_have_limits(locks: ClientLocks, session: int) -> None:
    with pytest.raises(InvalidArgument, match="session"):
        ClientLock.hold(locks.path, session)
    if session:
        with pytest.raises(InvalidArgument, match="session"):
            locks.is_held(session)


def test_without_a_session_nobody_lives(locks: ClientLocks) -> None:
    assert not locks.is_held(0)
    locks.close()
    assert not locks.is_held(1)


def test_a_new_daemon_makes_a_new_file(locks: ClientLocks) -> None:
    old = ClientLock.hold(locks.path, 1)
    fresh = ClientLocks(locks.path, mode=0o660)
    assert fresh.path.stat().st_mode & 0o777 == 0o660
    assert not fresh.is_held(1)
    assert locks.is_held(1)
    locks.close()
    assert fresh.path.exists(), "the old daemon must not remove the new one's file"
    fresh.close()
    assert not fresh.path.exists()
    old.release()


def test_a_missing_lock_file(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="cannot be opened"):
        ClientLock.hold(tmp_path / "gone", 1)
    with pytest.raises(TierUnavailable, match="client lock file"):
        ClientLocks(tmp_path / "gone" / "clients.lock")
