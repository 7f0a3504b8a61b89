"""The plain unix socket beside gRPC's, for payload."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from pathlib import Path

from kvstore.rpc.packets import SOCKET_SUFFIX
from kvstore.settings import ServerSettings

_log = logging.getLogger(__name__)
BACKLOG = 128


def bind_plain(path: Path, settings: ServerSettings) -> socket.socket | None:
    """Return a listening socket beside a path, at no moment wider open than `socket_mode` says; None where
    it cannot be bound.
    """
    place = Path(f"{path}{SOCKET_SUFFIX}")
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        place.unlink(missing_ok=True)
        listening.bind(str(place))
        if settings.socket_group:
            shutil.chown(place, group=settings.socket_group)
        place.chmod(settings.socket_mode)
        listening.listen(BACKLOG)
    except (OSError, LookupError) as error:
        listening.close()
        _log.warning("no socket for payload", extra={"path": str(place), "cause": str(error)})
        return None
    finally:
        os.umask(before)
    return listening
