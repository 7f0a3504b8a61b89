"""Fair shares: what one session may hold of what all need, so that one client's flood starves nobody else."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.api import NO_SESSION
from kvstore.errors import Overloaded

T = TypeVar("T")


class Share:
    """Counts what each session holds against one limit; tools without a session are not counted."""

    def __init__(self, what: str, *, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._held: dict[int, int] = {}

    def check(self, session: int) -> None:
        """Let a session take more.

        Errors: Overloaded when it holds its share already.
        """
        if self.room(session) <= 0:
            raise Overloaded(
                f"session {session}: the limit is {self._limit} {self._what} of one client, "
                f"{self._held[session]} are held"
            )

    def room(self, session: int) -> int:
        """Return how much more a session may take."""
        return sys.maxsize if session == NO_SESSION else self._limit - self._held.get(session, 0)

    def leading(self, session: int, amounts: npt.NDArray[np.int64]) -> int:
        """Return how many of the amounts, from the first on, a session may take."""
        return int(np.searchsorted(np.cumsum(amounts), self.room(session), side="right"))

    def take(self, session: int, amount: int = 1) -> None:
        """Count what a session takes."""
        if session != NO_SESSION and amount:
            self._held[session] = self._held.get(session, 0) + amount

    def give(self, session: int, amount: int = 1) -> None:
        """Count what is given back."""
        left = self._held.get(session, 0) - amount
        if left > 0:
            self._held[session] = left
        else:
            self._held.pop(session, None)

    def __len__(self) -> int:
        return len(self._held)


class FairQueue(Generic[T]):
    """A queue per session, served in turn: who queues much waits behind himself alone.

    Items are hashable and wait once. Every operation but iteration takes constant time, also a removal from
    the middle: the end of a flood must not hold everybody up.
    """

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[T, None]] = {}
        self._turns: deque[int] = deque()
        self._count = 0

    def append(self, item: T, *, session: int) -> None:
        """Queue an item behind those of its session."""
        queue = self._queues.get(session)
        if queue is None:
            queue = self._queues[session] = OrderedDict()
            self._turns.append(session)
        self._count += item not in queue
        queue[item] = None

    def popleft(self) -> T:
        """Return the oldest item of the session whose turn it is."""
        session = self._turns.popleft()
        queue = self._queues[session]
        item, _ = queue.popitem(last=False)
        self._count -= 1
        if queue:
            self._turns.append(session)
        else:
            del self._queues[session]
        return item

    def remove(self, item: T, *, session: int) -> None:
        """Take an item out of its session's queue.

        Errors: KeyError when it is not there.
        """
        queue = self._queues[session]
        del queue[item]
        self._count -= 1
        if not queue:
            del self._queues[session]
            self._turns.remove(session)

    def queued(self, session: int) -> int:
        """Return how many items of a session wait."""
        return len(self._queues.get(session, ()))

    def __iter__(self) -> Iterator[T]:
        for queue in list(self._queues.values()):
            yield from list(queue)

    def __len__(self) -> int:
        return self._count
