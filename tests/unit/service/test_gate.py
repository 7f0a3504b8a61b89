"""The gate and the supervised threads: who is let in, and what a failed thread does to that."""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import Overloaded, ShuttingDown, TierUnavailable
from kvstore.events import Events
from kvstore.service.gate import Gate, State
from kvstore.service.threads import Supervisor


def gate(state: State = State.SERVING) -> Gate:
    made = Gate(sessions_max=2, streams_max=1)
    made.move(state)
    return made


def test_nothing_is_admitted_before_the_start() -> None:
    with pytest.raises(ShuttingDown, match="starting"):
        gate(State.STARTING).admit()


def test_draining_lets_only_ending_work_in() -> None:
    draining = gate(State.DRAINING)
    draining.admit_ending()
    with pytest.raises(ShuttingDown, match="draining"):
        draining.admit()


def test_a_failed_daemon_refuses_and_says_why() -> None:
    failed = gate()
    failed.move(State.FAILED, cause="thread tick")
    with pytest.raises(TierUnavailable, match="thread tick failed"):
        failed.admit_ending()
    failed.move(State.SERVING)
    assert str(failed.state) == "failed"
    failed.move(State.DRAINING)
    assert str(failed.state) == "draining"


def test_places_are_counted_and_given_back() -> None:
    busy = gate()
    with busy.place("sessions"), busy.place("sessions"):
        assert busy.sessions == 2
        with pytest.raises(Overloaded, match="2 sessions"), busy.place("sessions"):
            pass
    assert busy.sessions == 0


def test_changes_are_told_once() -> None:
    heard: list[State] = []
    told = Gate(sessions_max=1, streams_max=1)
    told.on_change = heard.append
    told.move(State.SERVING)
    told.move(State.SERVING)
    told.move(State.DRAINING)
    assert heard == [State.SERVING, State.DRAINING]


def test_a_failing_thread_is_counted_and_reported() -> None:
    events, failures = Events(), list[str]()
    supervisor = Supervisor(events, on_failure=failures.append)

    def fail() -> None:
        raise RuntimeError("no")

    supervisor.start("tick", fail)
    assert supervisor.stop(deadline_seconds=10) == []
    assert failures == ["tick"]
    assert events.total("kvstore_thread_failures_total", thread="tick") == 1


def test_a_repeated_task_runs_until_it_is_stopped() -> None:
    ran = threading.Event()
    supervisor = Supervisor(Events(), on_failure=lambda name: None)
    supervisor.every("tick", 0.001, ran.set)
    assert ran.wait(10)
    assert supervisor.stop(deadline_seconds=10) == []
