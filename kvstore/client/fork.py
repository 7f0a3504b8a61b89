"""What a fork means to a client: the child must touch nothing of its parent's, least of all the channel.

gRPC itself must be prepared before it is imported: with GRPC_ENABLE_FORK_SUPPORT a child can open channels
of its own. Importing kvstore.client sets it unless the environment says otherwise or gRPC is already
loaded; without it the verbs of a child whose parent has used gRPC are misses, never a hang. A fork takes
about a second while gRPC sessions live, and a child that neither execs nor exits keeps its parent's sockets
open, so that the parent's leases may outlive it until their deadlines. Sessions on a plain socket are spared
both.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Protocol

ENABLE = "GRPC_ENABLE_FORK_SUPPORT"

if "grpc" not in sys.modules:
    os.environ.setdefault(ENABLE, "1")


class Forkable(Protocol):
    """Something that starts afresh in a forked child."""

    def after_fork(self) -> None:
        """Forget everything the parent owns, without closing it."""
        ...


_alive: weakref.WeakSet[Forkable] = weakref.WeakSet()
# The parent's channels and locks must not be finalised in the child: that would talk on the parent's sockets.
_parents_own: list[object] = []


def watch(client: Forkable) -> None:
    """Call `after_fork` in every child forked while the client lives."""
    _alive.add(client)


def keep(thing: object) -> None:
    """Keep something of the parent's alive for as long as this child lives."""
    _parents_own.append(thing)


def _in_child() -> None:
    for client in list(_alive):
        client.after_fork()


os.register_at_fork(after_in_child=_in_child)
