"""The socket's name: leftovers, strangers, limits."""

from __future__ import annotations

import grp
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.errors import TierUnavailable
from kvstore.service.listen import prepare_socket
from kvstore.settings import ServerSettings


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short name: the path of a socket has a limit."""
    with TemporaryDirectory(prefix="kvs-") as name:
        yield Path(name)


def settings(path: Path, **more: object) -> ServerSettings:
    return ServerSettings.model_validate({"address": f"unix:{path}", **more})


def test_the_directory_is_made_for_its_owner_alone(short: Path) -> None:
    assert prepare_socket(settings(short / "run" / "a.sock")) == short / "run" / "a.sock"
    assert (short / "run").stat().st_mode & 0o777 == 0o700


def test_a_socket_for_others_can_be_reached_by_them(short: Path) -> None:
    prepare_socket(settings(short / "run" / "a.sock", socket_mode="0666"))
    assert (short / "run").stat().st_mode & 0o777 == 0o755
    prepare_socket(settings(short / "group" / "a.sock", socket_mode="0660"))
    assert (short / "group").stat().st_mode & 0o777 == 0o750


def test_a_group_of_users_can_reach_the_socket(short: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    prepare_socket(settings(short / "run" / "a.sock", socket_group=group, socket_mode="0660"))
    assert (short / "run").stat().st_gid == os.getgid()


def test_a_leftover_goes_and_a_living_one_stays(short: Path) -> None:
    path = short / "a.sock"
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(path))
        daemon.listen()
        with pytest.raises(TierUnavailable, match="a daemon listens there already"):
            prepare_socket(settings(path))
        assert path.exists()
    prepare_socket(settings(path))
    assert not path.exists()


@pytest.mark.parametrize("make", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_alone(make: str, short: Path) -> None:
    path = short / "a.sock"
    if make == "file":
        path.touch()
    elif make == "directory":
        path.mkdir()
    else:
        path.symlink_to("/nowhere")
    with pytest.raises(TierUnavailable, match="something else has this name"):
        prepare_socket(settings(path))


def test_a_long_path_is_named_with_the_limit(short: Path) -> None:
    with pytest.raises(TierUnavailable, match="the system allows 107"):
        prepare_socket(settings(short / ("x" * 100) / "a.sock"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_not_trusted(short: Path) -> None:
    (short / "run").mkdir()
    os.chown(short / "run", 12345, 12345)
    with pytest.raises(TierUnavailable, match="belongs to user 12345"):
        prepare_socket(settings(short / "run" / "a.sock"))


def test_an_unknown_group_is_named(short: Path) -> None:
    with pytest.raises(TierUnavailable, match="no such group"):
        prepare_socket(settings(short / "run" / "a.sock", socket_group="nobody-has-this"))
