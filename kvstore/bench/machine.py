"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvstore.machine import Mount

PACKAGES = ("grpcio", "protobuf", "numpy", "xxhash", "lmdb")


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
        "shared_memory": place(shared_memory) | {"huge_pages": str(Mount.of(shared_memory).huge_pages)},
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
    mount = Mount.of(directory)
    return {"mount": mount.point, "file_system": mount.kind, "free_bytes": mount.free_bytes}


def fio_version() -> str | None:
    """Return fio's version, or None where it is not installed."""
    path = shutil.which("fio")
    if path is None:
        return None
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
