"""Memory limits and mounts, read from made-up file trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.machine import HugePages, Machine, Mount, shmem_enabled

GIB = 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n"
V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_MOUNT = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


class Tree:
    """A file tree with just what `Machine.read` looks at."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def group(self, path: str, **files: object) -> None:
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{path}/{name.replace('__', '.')}", text)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    found = Tree(tmp_path)
    found.write("proc/meminfo", MEMINFO)
    return found


def test_a_bare_machine_has_its_memory(tree: Tree) -> None:
    assert Machine.read(tree.root) == Machine(16 * GIB, 8 * GIB, "MemTotal")


def test_version_2_takes_the_tightest_group_on_the_way_up(tree: Tree) -> None:
    tree.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    tree.write("proc/self/cgroup", "0::/pod/box")
    tree.group(
        "pod", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=f"anon 5\ninactive_file {GIB}"
    )
    tree.group("pod/box", memory__max="max", memory__high=6 * GIB, memory__current=GIB)
    found = Machine.read(tree.root)
    assert (found.memory_limit_bytes, found.memory_room_bytes) == (4 * GIB, 2 * GIB)
    assert found.limit_source.endswith("sys/fs/cgroup/pod")


def test_version_2_inside_a_container_sees_its_own_root(tree: Tree) -> None:
    tree.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    tree.write("proc/self/cgroup", "0::/")
    tree.group(".", memory__max=2 * GIB, memory__current=3 * GIB)
    found = Machine.read(tree.root)
    assert (found.memory_limit_bytes, found.memory_room_bytes) == (2 * GIB, 0)


@pytest.mark.parametrize("root", ["/", "/docker/abc", "/unrelated"])
def test_version_1_with_and_without_a_view_of_the_whole_tree(tree: Tree, root: str) -> None:
    tree.write("proc/self/mountinfo", V1_MOUNT.format(root=root) + V2_MOUNT.format(root="/"))
    tree.write("proc/self/cgroup", "4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/")
    inner = "memory/docker/abc" if root == "/" else "memory"
    tree.group("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    tree.group(
        inner,
        memory__limit_in_bytes=3 * GIB,
        memory__usage_in_bytes=2 * GIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB}",
    )
    found = Machine.read(tree.root)
    assert (found.memory_limit_bytes, found.memory_room_bytes) == (3 * GIB, 2 * GIB)


def test_a_limit_above_the_machine_changes_nothing(tree: Tree) -> None:
    tree.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
    tree.write("proc/self/cgroup", "0::/")
    tree.group(".", memory__max=64 * GIB, memory__current=GIB)
    assert Machine.read(tree.root) == Machine(16 * GIB, 8 * GIB, "MemTotal")


def test_this_machine_can_be_read() -> None:
    found = Machine.read()
    assert 0 < found.memory_room_bytes <= found.memory_limit_bytes


def test_the_mount_of_a_path(tmp_path: Path) -> None:
    mount = Mount.of(tmp_path)
    assert tmp_path.is_relative_to(mount.point)
    assert 0 < mount.free_bytes <= mount.total_bytes
    assert Mount.of("/proc").kind == "proc"
    with pytest.raises(FileNotFoundError):
        Mount.of(tmp_path / "gone")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("rw", "huge=within_size"), HugePages.WITHIN_SIZE),
        (("huge=always",), HugePages.ALWAYS),
        (("rw",), HugePages.NEVER),
    ],
)
def test_huge_pages_of_a_mount(options: tuple[str, ...], found: HugePages) -> None:
    assert Mount("/x", "tmpfs", options, 1, 1).huge_pages is found


def test_the_kernels_policy_for_shared_memory(tree: Tree) -> None:
    assert shmem_enabled(tree.root) == ""
    tree.write(
        "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force"
    )
    assert shmem_enabled(tree.root) == "never"
