"""News of a lease leaves in the order of the decisions, whichever thread carries it."""

from __future__ import annotations

import threading

from kvstore.clock import ManualClock
from kvstore.core.wiring import Wiring
from kvstore.events import Events
from tests.support.memory import PrivateMemory


def test_a_later_decision_does_not_overtake_an_earlier_one() -> None:
    wiring = Wiring(
        host=PrivateMemory(64), ssd=None, clock=ManualClock(), events=Events(), new_number=lambda: 1
    )
    order: list[str] = []
    is_sending, may_go_on = threading.Event(), threading.Event()

    def extents() -> None:
        is_sending.set()
        assert may_go_on.wait(10)
        order.append("extents")

    def decide(call: object) -> None:
        assert callable(call)
        with wiring._decision():
            wiring._plan.calls.append(call)

    slow = threading.Thread(target=decide, args=(extents,))
    slow.start()
    assert is_sending.wait(10)
    decide(lambda: order.append("done"))
    assert order == []
    may_go_on.set()
    slow.join(10)
    assert order == ["extents", "done"]


def test_a_listener_that_fails_harms_nobody() -> None:
    events = Events()
    memory, clock = PrivateMemory(64), ManualClock()
    wiring = Wiring(host=memory, ssd=None, clock=clock, events=events, new_number=lambda: 1)
    heard: list[str] = []
    with wiring._decision():
        wiring._plan.calls += [lambda: heard.append(str(1 // 0)), lambda: heard.append("second")]
    assert heard == ["second"]
    assert events.total("kvstore_listener_failures_total") == 1


def test_a_listener_may_ask_again() -> None:
    wiring = Wiring(
        host=PrivateMemory(64), ssd=None, clock=ManualClock(), events=Events(), new_number=lambda: 1
    )
    order: list[str] = []

    def again() -> None:
        with wiring._decision():
            wiring._plan.calls.append(lambda: order.append("second"))
        order.append("first")

    with wiring._decision():
        wiring._plan.calls.append(again)
    assert order == ["first", "second"]
