"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvstore.cli.checks import mount_of

PACKAGES = ("grpcio", "protobuf", "numpy", "xxhash", "lmdb")
MOUNTS = Path("/proc/self/mountinfo")


def describe(directory: Path, shared_memory: Path) -> dict[str, Any]:
    """Return processor, memory, kernel, versions, and the two places that hold the bytes."""
    return {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "disk": place(directory),
        "shared_memory": place(shared_memory) | {"huge_pages": has_huge_pages(shared_memory)},
        "fio": fio_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """Return the processor's name as the kernel knows it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def package_version(name: str) -> str | None:
    """Return an installed package's version, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def place(directory: Path) -> dict[str, Any]:
    """Return the file system that holds a directory, and its free bytes."""
    mount = mount_of(directory, MOUNTS)
    usage = os.statvfs(directory)
    return {"mount": mount.point, "file_system": mount.kind, "free_bytes": usage.f_frsize * usage.f_bavail}


def has_huge_pages(shared_memory: Path) -> bool:
    """Return whether memory of this mount comes in huge pages."""
    mount = mount_of(shared_memory, MOUNTS)
    if mount.kind == "hugetlbfs" or {"huge=always", "huge=within_size"} & set(mount.options):
        return True
    switch = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return switch.exists() and any(f"[{mode}]" in switch.read_text() for mode in ("always", "force"))


def fio_version() -> str | None:
    """Return fio's version, or None where it is not installed."""
    path = shutil.which("fio")
    if path is None:
        return None
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
