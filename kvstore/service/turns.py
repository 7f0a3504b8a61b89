"""Turns: sessions of one client process are served one request at a time, and others in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from kvstore.errors import Overloaded

CLIENT_SESSIONS_MAX = 256
ALONE: AbstractAsyncContextManager[None] = nullcontext()
"""The turn of a client that has one session."""


class Turn:
    """The turn of one client; its sessions share it.

    Threads: the event loop.
    """

    def __init__(self, client: str) -> None:
        self.client = client
        self.sessions = 0
        self._quick = asyncio.Lock()
        self._long = asyncio.Lock()

    def quick(self) -> AbstractAsyncContextManager[None]:
        """Wait for the turn; after it everybody else has one before this client has the next."""
        return self._among_others() if self.sessions > 1 else ALONE

    @asynccontextmanager
    async def _among_others(self) -> AsyncIterator[None]:
        async with self._quick:
            yield
            await asyncio.sleep(0)

    @asynccontextmanager
    async def long(self) -> AsyncIterator[None]:
        """Wait until no other long verb of this client is on a worker thread."""
        async with self._long:
            yield


class Turns:
    """The clients that are connected, by the name they gave: the library's has the process in it.

    Threads: the event loop.
    """

    def __init__(self, *, sessions_max: int = CLIENT_SESSIONS_MAX) -> None:
        self._max = sessions_max
        self._turns: dict[str, Turn] = {}

    def join(self, client: str) -> Turn:
        """A session of a client begins.

        Errors: Overloaded when the client has as many as it may.
        """
        turn = self._turns.get(client) or Turn(client)
        if turn.sessions >= self._max:
            raise Overloaded(
                f"sessions: the limit is {self._max} of one client, {client} has {turn.sessions}",
                retry_after_ms=1000,
            )
        self._turns[client] = turn
        turn.sessions += 1
        return turn

    def leave(self, turn: Turn) -> None:
        """A session ended."""
        turn.sessions -= 1
        if not turn.sessions:
            del self._turns[turn.client]

    def __len__(self) -> int:
        return len(self._turns)
