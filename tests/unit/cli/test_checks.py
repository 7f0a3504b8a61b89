"""What `doctor` finds on machines that lack something, and what it says to do."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

import pytest

from kvstore.cli import checks
from kvstore.cli.checks import MACHINE_CHECKS, Place, examine
from kvstore.finding import Level
from kvstore.machine import Machine, Mount

GIB = 1 << 30


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(
        data=tmp_path / "data",
        shared_memory=tmp_path,
        address=f"unix:{tmp_path / 'run' / 'kvstore.sock'}",
    )


def mounted(monkeypatch: pytest.MonkeyPatch, kind: str, *options: str, free_bytes: int = GIB) -> None:
    mount = Mount("/point", kind, options, 16 * GIB, free_bytes)
    monkeypatch.setattr(Mount, "of", staticmethod(lambda path: mount))


def test_every_check_answers_here(place: Place) -> None:
    findings = examine(place)
    assert len(findings) == len(MACHINE_CHECKS)
    assert all(finding.advice for finding in findings if finding.level is not Level.OK)


def test_nothing_is_left_behind(place: Place) -> None:
    before = sorted(path.name for path in place.existing_data.iterdir())
    examine(place)
    assert sorted(path.name for path in place.existing_data.iterdir()) == before


@pytest.mark.parametrize(
    ("kind", "level"), [("ext4", Level.OK), ("nfs4", Level.PROBLEM), ("overlay", Level.NOTE)]
)
def test_the_index_wants_a_local_disk(
    kind: str, level: Level, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, kind)
    assert checks.file_system(place).level is level


def test_a_small_dev_shm_is_a_problem(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, "tmpfs", free_bytes=63 << 20)
    finding = checks.shared_memory(place)
    assert finding.level is Level.PROBLEM
    assert "63.0 MiB free of 16.0 GiB" in finding.found
    assert "--shm-size" in finding.advice


def test_an_arena_on_a_disk_is_worth_a_note(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, "ext4")
    assert checks.shared_memory(place).level is Level.NOTE


def test_no_shared_memory_at_all(place: Place) -> None:
    gone = dataclasses.replace(place, shared_memory=Path("/nonexistent"))
    assert checks.shared_memory(gone).level is Level.PROBLEM
    assert any(f.check == "huge pages" for f in examine(gone))


@pytest.mark.parametrize(
    ("option", "policy", "level"),
    [
        ("huge=always", "never", Level.OK),
        ("huge=never", "never", Level.NOTE),
        ("huge=never", "force", Level.OK),
        ("huge=always", "deny", Level.NOTE),
    ],
)
def test_huge_pages(
    option: str, policy: str, level: Level, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, "tmpfs", option)
    monkeypatch.setattr(checks, "shmem_enabled", lambda: policy)
    assert checks.huge_pages(place).level is level


def test_a_tight_container_is_a_problem(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(512 << 20, 100 << 20, "control group /sys/fs/cgroup")
    monkeypatch.setattr(Machine, "read", staticmethod(lambda: machine))
    finding = checks.memory_limit(place)
    assert finding.level is Level.PROBLEM
    assert "100.0 MiB left of 512.0 MiB (control group" in finding.found


def test_a_full_disk_is_a_problem(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tuple(os.statvfs(place.existing_data))
    full = os.statvfs_result((4096, 4096, GIB, 1000, 1000, *real[5:]))
    monkeypatch.setattr("os.statvfs", lambda _: full)
    assert checks.free_space(place).level is Level.PROBLEM


def test_data_from_the_future(place: Place) -> None:
    place.data.mkdir()
    late = place.data / "segment"
    late.write_bytes(b"")
    os.utime(late, (4e9, 4e9))
    finding = checks.clock(place)
    assert finding.level is Level.PROBLEM
    assert "newer" in finding.found


def test_a_clock_of_the_past(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    assert checks.clock(place).level is Level.PROBLEM


def test_a_socket_that_nobody_listens_on(place: Place) -> None:
    path = Path(place.address.removeprefix("unix:"))
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert "nobody listens" in checks.socket_path(place).found
    path.unlink()
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        assert "somebody listens" in checks.socket_path(place).found


def test_a_socket_path_has_a_limit(place: Place) -> None:
    finding = checks.socket_path(dataclasses.replace(place, address="unix:/" + "x" * 120))
    assert finding.level is Level.PROBLEM
    assert "107 fit" in finding.found


def test_a_directory_that_everybody_may_write(place: Place) -> None:
    directory = Path(place.address.removeprefix("unix:")).parent
    directory.mkdir()
    directory.chmod(0o777)
    finding = checks.socket_path(place)
    assert finding.level is Level.PROBLEM
    assert "chmod 700" in finding.advice


def test_an_address_over_tcp(place: Place) -> None:
    assert checks.socket_path(dataclasses.replace(place, address="host:1")).level is Level.NOTE
