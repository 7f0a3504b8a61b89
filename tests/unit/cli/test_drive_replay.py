"""What `kvstore drive` sends first, and how it ends when it is told to."""

from __future__ import annotations

import os
import signal

import pytest

from kvstore.cli.drive_replay import NOTHING, interrupts, needed
from kvstore.trace.blocks import TraceRequest


class Finalizer:
    """A signal arrives while it is finalized: what is raised there reaches nobody."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass  # the interpreter looks at signals here


def test_an_interrupt_is_not_lost_in_a_finalizer() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts() as told:
            assert not told.is_set()
            Finalizer()
            assert told.is_set()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)  # the second one means it
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def request(*runs: tuple[int, int]) -> TraceRequest:
    """A request of these blocks."""
    return TraceRequest(0, 1, 0, tuple(runs))


def test_a_turn_waits_for_who_wrote_what_it_continues() -> None:
    requests = [
        request((1, 10)),
        request((100, 10)),
        request((1, 10), (20, 5)),
        request((1, 10), (20, 5), (30, 1)),
        request((1, 4)),
        request((1, 4), (50, 3)),
        request((100, 10), (200, 1)),
        request(),
    ]
    assert needed(requests) == [NOTHING, NOTHING, 0, 2, 0, 0, 1, NOTHING]
