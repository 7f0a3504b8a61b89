"""Where daemon and clients of one user find each other without configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SOCKET_NAME = "kvstore.sock"


def runtime_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of sockets and lock files: $XDG_RUNTIME_DIR/kvstore, else /tmp/kvstore-<uid>."""
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvstore" if base else Path(f"/tmp/kvstore-{os.getuid()}")


def data_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where segments and index live: the XDG state directory, /var/lib for root who set none."""
    if base := environ.get("XDG_STATE_HOME"):
        return Path(base) / "kvstore"
    return Path("/var/lib/kvstore") if os.getuid() == 0 else Path.home() / ".local" / "state" / "kvstore"


def default_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address a client tries first: $KVSTORE_ADDRESS, else the runtime directory's socket."""
    return environ.get("KVSTORE_ADDRESS") or f"unix:{runtime_directory(environ) / SOCKET_NAME}"
