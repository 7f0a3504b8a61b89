"""Waiting on the loop for an acknowledgement that a tier's thread gives."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class DurableAnswer(Generic[T]):
    """The answer of a commit or a delete that comes when the disk has done its part, or has refused it.

    Threads: made and awaited on the event loop; `hear` is called from any thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[T] = self._loop.create_future()

    def hear(self, answer: T) -> None:
        """Take the answer."""
        self._loop.call_soon_threadsafe(self._settle, answer)

    def _settle(self, answer: T) -> None:
        if not self._future.done():
            self._future.set_result(answer)

    async def wait(self) -> T:
        """Return the answer once it is there."""
        return await self._future
