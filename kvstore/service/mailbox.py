"""What another thread has for the loop, taken all at once when the loop comes to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue that calls `wake` only when the last call has been answered by a `take`.

    Threads: one puts at a time, one takes; `wake` is called on the thread that puts.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._items: deque[T] = deque()
        self._is_called = False

    def put(self, item: T) -> None:
        """Leave an item."""
        self._items.append(item)
        if not self._is_called:
            self._is_called = True
            self._wake()

    def take(self) -> list[T]:
        """Return all that is there, oldest first."""
        # The other way round an item that comes in between would wait for the next one.
        self._is_called = False
        items: list[T] = []
        while self._items:
            items.append(self._items.popleft())
        return items
