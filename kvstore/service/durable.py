"""Waiting on the loop for an acknowledgement that a tier's thread gives."""

from __future__ import annotations

import asyncio

from kvstore.api import CommitAnswer


class DurableAnswer:
    """The answer of a commit that comes when the write is durable or refused.

    Threads: made and awaited on the event loop; `hear` is called from any thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[CommitAnswer] = self._loop.create_future()

    def hear(self, answer: CommitAnswer) -> None:
        """Take the answer."""
        self._loop.call_soon_threadsafe(self._settle, answer)

    def _settle(self, answer: CommitAnswer) -> None:
        if not self._future.done():
            self._future.set_result(answer)

    async def wait(self) -> CommitAnswer:
        """Return the answer once it is there."""
        return await self._future
