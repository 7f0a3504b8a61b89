"""The daemon's arena: sized, allocated in full or refused, touched in the background, never left behind."""

from __future__ import annotations

import grp
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.arena import Advice, Arena, ArenaHeader
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.machine import Machine, Mount
from kvstore.tiers import host
from kvstore.tiers.host import HostArena, default_arena_bytes, remove_leftovers
from kvstore.types import PAGE_BYTES

MIB, GIB = 1 << 20, 1 << 30
SIZE = 4 * MIB
ROOMY = Machine(64 * GIB, 64 * GIB, "MemTotal")


def create(directory: Path, *, arena_id: int = 1, owner: bytes = b"mine", size: int = SIZE) -> HostArena:
    return HostArena.create(
        directory, total_bytes=size, arena_id=arena_id, boot_id=5, owner=owner, machine=ROOMY
    )


def machine(*, limit: int, room: int) -> Machine:
    return Machine(limit, room, "control group box")


def mount(*, free: int) -> Mount:
    return Mount("/dev/shm", "tmpfs", ("rw",), 64 * GIB, free)


@pytest.mark.parametrize(
    ("limit", "room", "free", "expected"),
    [
        (16 * GIB, 16 * GIB, 64 * GIB, 4 * GIB),
        (16 * GIB, 16 * GIB, 1 * GIB, int(0.8 * GIB)),
        (16 * GIB, 2 * GIB, 64 * GIB, int(1.6 * GIB)),
        (256 * MIB, 256 * MIB, 64 * GIB, 64 * MIB),
    ],
)
def test_the_default_size(limit: int, room: int, free: int, expected: int) -> None:
    size = default_arena_bytes(machine(limit=limit, room=room), mount(free=free))
    assert 0 <= expected - size < 2 * MIB, "rounded down to huge pages"


@pytest.mark.parametrize(("limit", "free"), [(255 * MIB, 64 * GIB), (16 * GIB, 64 * MIB)])
def test_a_machine_too_small_is_told_what_to_do(limit: int, free: int) -> None:
    with pytest.raises(InvalidArgument) as refused:
        default_arena_bytes(machine(limit=limit, room=limit), mount(free=free))
    for text in ("/dev/shm", "remount,size=", "--shm-size", "control group box", "smaller arena"):
        assert text in str(refused.value)


def test_a_fresh_file_that_clients_can_map(tmp_path: Path) -> None:
    arena = create(tmp_path, arena_id=0xABC)
    assert arena.path == tmp_path / f"kvstore-{os.getuid()}-0000000000000abc.arena"
    stat = arena.path.stat()
    assert (stat.st_size, stat.st_mode & 0o777) == (SIZE, 0o600)
    assert stat.st_blocks * 512 >= SIZE, "allocated in full: a sparse arena is SIGBUS in the engine"
    client = Arena.map(arena.path, expected_id=0xABC)
    assert (client.first_page, client.total_pages) == (arena.first_page, arena.total_pages)
    assert client.header.boot_id == 5
    slots = np.array([arena.first_page, arena.first_page + 3], np.uint32)
    (image,) = arena.images(slots, stride_pages=3)
    assert len(image) == 6 * PAGE_BYTES
    image[0] = 9
    arena.generations[slots[1]] = 4
    assert client.bytes[arena.first_page * PAGE_BYTES] == 9
    assert client.generations[slots[1]] == 4
    arena.close()
    arena.close()
    assert not arena.path.exists()
    assert client.bytes[arena.first_page * PAGE_BYTES] == 9, "never truncated: who has it mapped keeps it"


def test_mode_and_group(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    arena = HostArena.create(
        tmp_path, total_bytes=SIZE, arena_id=2, boot_id=1, mode=0o660, group=group, machine=ROOMY
    )
    stat = arena.path.stat()
    assert (stat.st_mode & 0o777, stat.st_gid) == (0o660, os.getgid())
    arena.close()
    with pytest.raises(InvalidArgument, match="no group 'none-such'"):
        HostArena.create(tmp_path, total_bytes=SIZE, arena_id=3, boot_id=1, group="none-such", machine=ROOMY)
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"1\.00 GiB asked for.*smaller arena"):
        HostArena.create(
            tmp_path, total_bytes=GIB, arena_id=1, boot_id=1, machine=machine(limit=GIB, room=100 * MIB)
        )
    assert list(tmp_path.iterdir()) == []


def test_a_failed_allocation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierUnavailable, match=r"No space left on device; .*remount,size="):
        create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="cannot be created"):
        create(tmp_path / "gone")


def test_leftovers_of_the_same_owner_go(tmp_path: Path) -> None:
    text = (
        "import os, sys; from kvstore.machine import Machine; from kvstore.tiers.host import HostArena\n"
        f"HostArena.create(sys.argv[1], total_bytes={SIZE}, arena_id=int(sys.argv[2]), boot_id=1,"
        " owner=sys.argv[3].encode(), machine=Machine(1 << 40, 1 << 40, ''))\n"
        "os._exit(0)"
    )
    for number, owner in enumerate(("mine", "theirs"), 10):
        subprocess.run([sys.executable, "-c", text, str(tmp_path), str(number), owner], check=True)
    living = create(tmp_path, arena_id=20)
    (tmp_path / f"kvstore-{os.getuid()}-00000000000000ff.arena").write_bytes(b"what is this")
    names = sorted(int(path.name[-22:-6], 16) for path in tmp_path.iterdir())
    assert names == [11, 20, 255], "the dead one of this owner is gone"
    assert remove_leftovers(tmp_path, b"mine") == [], "a living daemon's stays"
    assert [path.name[-7] for path in remove_leftovers(tmp_path, b"theirs")] == ["b"]
    living.close()


@pytest.mark.parametrize("refused", [(), (Advice.COLLAPSE,), (Advice.COLLAPSE, Advice.POPULATE_WRITE)])
def test_prefault_touches_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[Advice, ...]
) -> None:
    advise = Arena.advise

    def some(self: Arena, first: int, pages: int, advice: Advice) -> int:
        return 22 if advice in refused else advise(self, first, pages, advice)

    monkeypatch.setattr(Arena, "advise", some)
    monkeypatch.setattr(host, "PREFAULT_STEP_BYTES", 2 * MIB)
    arena = create(tmp_path)
    marked = arena.arena.rows(arena.first_page, 1, PAGE_BYTES)
    marked[0] = 7
    assert arena.touched_pages() == 0
    failures: list[BaseException] = []
    arena.start_prefault(failures.append)
    assert arena.wait_prefault(60)
    assert arena.touched_pages() == arena.total_pages - arena.first_page
    assert (marked == 7).all(), "what is lent already keeps its bytes"
    assert failures == []
    facts = arena.facts()
    assert (facts.path, facts.total_bytes) == (str(arena.path), SIZE)
    assert facts.touched_bytes == arena.touched_pages() * PAGE_BYTES
    assert not refused or facts.huge_bytes == 0
    arena.close()


def test_prefault_runs_in_its_own_named_thread_and_stops_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, proceed = threading.Event(), threading.Event()
    names: list[str] = []

    def slow(self: Arena, first: int, pages: int, advice: Advice) -> int:
        if advice is not Advice.DONTDUMP:
            names.append(threading.current_thread().name)
            started.set()
            proceed.wait(30)
        return 0

    monkeypatch.setattr(Arena, "advise", slow)
    monkeypatch.setattr(host, "PREFAULT_STEP_BYTES", 2 * MIB)
    arena = create(tmp_path, size=8 * MIB)
    arena.start_prefault()
    assert started.wait(30)
    closer = threading.Thread(target=arena.close)
    closer.start()
    arena._stop.wait(30)
    proceed.set()
    closer.join(30)
    assert names == ["kvstore-prefault"], "the step in progress was the last"
    assert not arena.path.exists()


def test_a_prefault_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Arena, first: int, pages: int, advice: Advice) -> int:
        if advice is Advice.COLLAPSE:
            raise TierUnavailable("broken")
        return 0

    monkeypatch.setattr(Arena, "advise", broken)
    arena = create(tmp_path)
    failures: list[BaseException] = []
    arena.start_prefault(failures.append)
    assert not arena.wait_prefault(60)
    assert [str(failure) for failure in failures] == ["broken"]
    assert arena.touched_pages() == 0
    arena.close()


def test_the_generation_table_is_no_slot_memory(tmp_path: Path) -> None:
    header = ArenaHeader.plan(100 * GIB, arena_id=1, boot_id=1, owner=b"")
    assert header.first_page == 1 + header.total_pages // 1024
    arena = create(tmp_path)
    arena._touched_end = max(arena.first_page, 1)
    assert arena.touched_pages() == 0
    arena.close()


def test_advice_names_what_would_help() -> None:
    def advice(kind: str, *options: str) -> str:
        return host._advice(Mount("/m", kind, options, 1, 1))

    assert "tmpfs" in advice("ext4")
    assert "huge=always /m" in advice("tmpfs", "rw")
    assert advice("tmpfs", "huge=always") == ""
