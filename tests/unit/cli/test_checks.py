"""What `doctor` finds on machines that lack something, and what it says to do."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

import pytest

from kvstore.cli import checks
from kvstore.cli.checks import MACHINE_CHECKS, Level, Place, cgroup_limit, examine, mount_of

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=16g
31 22 0:26 / /huge rw,relatime - tmpfs tmpfs rw,huge=always
32 22 0:27 / /net\\040work rw,relatime - nfs4 server:/x rw,vers=4.2
33 22 0:28 / /layer rw,relatime - overlay overlay rw
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    return Place(
        data=tmp_path / "data",
        shared_memory=tmp_path,
        address=f"unix:{tmp_path / 'run' / 'kvstore.sock'}",
        mounts=mounts,
        cgroup=tmp_path / "cgroup",
    )


def test_every_check_answers_here(place: Place) -> None:
    findings = examine(place)
    assert len(findings) == len(MACHINE_CHECKS)
    assert all(finding.advice for finding in findings if finding.level is not Level.OK)


def test_nothing_is_left_behind(place: Place) -> None:
    before = sorted(path.name for path in place.existing_data.iterdir())
    examine(place)
    assert sorted(path.name for path in place.existing_data.iterdir()) == before


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "ext4"), ("/dev/shm/x", "tmpfs"), ("/net work/a", "nfs4"), ("/devices", "ext4")],
)
def test_the_mount_of_a_path(path: str, kind: str, place: Place) -> None:
    assert mount_of(Path(path), place.mounts).kind == kind


@pytest.mark.parametrize(
    ("data", "level"),
    [("/var", Level.OK), ("/net work/kv", Level.PROBLEM), ("/layer/kv", Level.NOTE)],
)
def test_the_index_wants_a_local_disk(
    data: str, level: Level, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "existing_data", property(lambda self: self.data))
    finding = checks.file_system(dataclasses.replace(place, data=Path(data)))
    assert finding.level is level


def test_a_small_dev_shm_is_a_problem(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(place.shared_memory)
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, *tuple(real)[5:]))
    monkeypatch.setattr("os.statvfs", lambda _: small)
    finding = checks.shared_memory(place)
    assert finding.level is Level.PROBLEM
    assert "64.0 MiB free" in finding.found
    assert "--shm-size" in finding.advice


def test_no_shared_memory_at_all(place: Place) -> None:
    gone = dataclasses.replace(place, shared_memory=Path("/nonexistent"))
    assert checks.shared_memory(gone).level is Level.PROBLEM
    assert any(f.check == "huge pages" for f in examine(gone))


def test_huge_pages(place: Place) -> None:
    huge = dataclasses.replace(place, shared_memory=Path("/huge"))
    assert checks.huge_pages(huge).level is Level.OK


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "max\n", None),
        ("memory.max", "536870912\n", 536870912),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("memory/memory.limit_in_bytes", "1073741824\n", 1073741824),
    ],
)
def test_container_limits(name: str, text: str, limit: int | None, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    assert cgroup_limit(tmp_path) == limit


def test_a_tight_container_is_a_problem(place: Place) -> None:
    place.cgroup.mkdir()
    (place.cgroup / "memory.max").write_text(str(300 << 20))
    finding = checks.memory_limit(place)
    assert finding.level is Level.PROBLEM
    assert "300.0 MiB" in finding.found


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
