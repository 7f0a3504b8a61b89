"""Verbs that need frames asleep: the event loop goes on while their headers are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kvstore.core.ladder import Ladder
from kvstore.core.sleepers import RunsAsleep

T = TypeVar("T")


async def when_awake(ladder: Ladder, verb: Callable[[], T]) -> T:
    """Do a verb on the loop; where it needs frames that sleep, have them woken and do it again: until then it
    has changed nothing, except that a caller's rate counts it twice.
    """
    while True:
        try:
            return verb()
        except RunsAsleep as asleep:
            await _wake(ladder, asleep)


async def _wake(ladder: Ladder, asleep: RunsAsleep) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def done() -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(over.set)

    ladder.alarm.wake(asleep.sleepers, asleep.keys, done)
    try:
        async with asyncio.timeout(ladder.alarm.patience):
            await over.wait()
    except TimeoutError:
        ladder.alarm.give_up(asleep)
