"""Clients that die, stop, wake up late, hoard: they hold nothing afterwards, and others never notice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Client, OpenNamespace, Transport
from kvstore.types import MissReason
from tests.e2e.served import Home
from tests.torture.daemon import Tormented
from tests.torture.nursery import OWN_PROMPT
from tests.torture.workload import (
    BLOCK_BYTES,
    BLOCKS,
    KEPT,
    SHARED_BLOCKS,
    blocks_of,
    prompt_keys,
    store,
    wrong_blocks,
)

NURSERY = Path(__file__).with_name("nursery.py")
SECONDS = 20.0
ASKED = ("hello", "open", "match", "touch", "prefetch", "list", "reserve", "commit", "delete")
STEPS = [
    *(f"mapped {verb} {when}" for verb in ASKED for when in ("sent", "answered")),
    *(f"mapped {step}" for step in ("fetch begun", "fetch half", "fill begun", "fill half", "abort sent")),
    *(f"mapped {step}" for step in ("release said", "renew sent", "renew answered", "cancel sent")),
    *(f"framed {step}" for step in ("match answered", "framed fetch begun", "framed fetch half")),
    *(f"framed framed put {step}" for step in ("begun", "header", "half", "all")),
]


class Nursery:
    """The process that bears the victims."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(NURSERY), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=NURSERY.parents[2],
            start_new_session=True,
        )

    def bear(self, order: str) -> int:
        """Order a child and return its process id once it has stopped at its step."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        pid, said = self.hear()
        assert said == "at " + order.partition(" ")[2], said
        wait_for_state(pid, "T")
        return pid

    def hear(self) -> tuple[int, str]:
        """Return who spoke and what."""
        assert self._process.stdout is not None
        pid, _, said = self._process.stdout.readline().strip().partition(" ")
        return int(pid), said

    def close(self) -> None:
        """End it and all that it bore."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def wait_for_state(pid: int, state: str) -> None:
    """Wait until the kernel says that a process is in a state."""
    end = time.monotonic() + SECONDS
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < end, f"process {pid} never was in state {state}"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Tormented]:
    home = Home()
    running = Tormented(home, encrypted=False)
    yield running
    running.end(signal.SIGTERM)
    home.remove()
    assert not running.faults


@pytest.fixture(scope="module")
def nursery(daemon: Tormented) -> Iterator[Nursery]:
    made = Nursery(daemon.home.address)
    yield made
    made.close()


@pytest.fixture
def other(daemon: Tormented) -> Iterator[OpenNamespace]:
    """A client that behaves."""
    with Client(daemon.home.address, transport=Transport.MAPPED) as client:
        namespace = client.open(KEPT)
        assert store(namespace, prompt_keys(namespace, 0)) == BLOCKS
        yield namespace


def assert_served(namespace: OpenNamespace, number: int = 0) -> None:
    """Check that a client gets all blocks of a prompt, and the right ones."""
    keys, into = prompt_keys(namespace, number), np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    got = namespace.get(keys, into, deadline_seconds=SECONDS)
    assert (got.blocks, got.reason) == (BLOCKS, None)
    assert not wrong_blocks(keys, into, BLOCKS)


def test_a_client_killed_at_any_step_holds_nothing(
    daemon: Tormented, nursery: Nursery, other: OpenNamespace
) -> None:
    for order in STEPS:
        victim = nursery.bear(order)
        assert_served(other)
        os.kill(victim, signal.SIGKILL)
        assert not daemon.held(), order
        assert_served(other)
        # What the victim was bringing can be brought by another at once.
        assert store(other, prompt_keys(other, OWN_PROMPT)) == BLOCKS, order
        assert_served(other, OWN_PROMPT)
        assert other.delete(None) >= BLOCKS
        assert store(other, prompt_keys(other, 0)) == BLOCKS


def overwrite_arena(namespace: OpenNamespace) -> None:
    """Put so much into host memory alone that every free slot changes hands."""
    for number in range(1000, 1000 + 2 * 2048 // (BLOCKS - 4)):
        keys = prompt_keys(namespace, number)
        namespace.put(
            namespace.root, keys, blocks_of(keys), retention_class="handoff", deadline_seconds=SECONDS
        )


@pytest.mark.parametrize("role", ["reader", "careless"])
@pytest.mark.parametrize("step", ["fetch begun", "fetch half"])
def test_a_reader_that_wakes_after_its_lease_never_gets_wrong_bytes(
    daemon: Tormented, nursery: Nursery, other: OpenNamespace, role: str, step: str
) -> None:
    late = nursery.bear(f"{role} {step}")
    assert not daemon.held()
    overwrite_arena(other)
    os.kill(late, signal.SIGCONT)
    pid, said = nursery.hear()
    assert pid == late
    found = re.fullmatch(r"done (\d+) blocks, (\d+) wrong, (\w+)", said)
    assert found, said
    assert int(found[1]) <= SHARED_BLOCKS, "those that others put as well have stayed"
    assert (found[2], found[3]) == ("0", MissReason.EVICTED.value)
    assert_served(other)


def wait_for_quarantine(daemon: Tormented) -> None:
    """Wait until the daemon has noticed that a writer's session is over, but not the writer."""
    end = time.monotonic() + SECONDS
    while not (gauges := daemon.status()["gauges"])["kvstore_quarantined_slots"]:
        assert time.monotonic() < end
    assert gauges["kvstore_reservations"] == 0


def test_a_late_writer_harms_nobody(daemon: Tormented, nursery: Nursery, other: OpenNamespace) -> None:
    late = nursery.bear("writer session over")
    wait_for_quarantine(daemon)
    overwrite_arena(other)
    os.kill(late, signal.SIGCONT)
    assert nursery.hear() == (late, "done over")
    assert not daemon.held(), "the writer's connection is over, and its lock with it"
    for number in (0, *range(1150, 1204)):
        keys, into = prompt_keys(other, number), np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        got = other.get(keys, into, deadline_seconds=SECONDS)
        assert got.reason is not MissReason.CORRUPT
        assert not wrong_blocks(keys, into, got.blocks)


def test_a_writer_killed_after_it_wrote_late_leaves_nothing(
    daemon: Tormented, nursery: Nursery, other: OpenNamespace
) -> None:
    late = nursery.bear("writer written late")
    wait_for_quarantine(daemon)
    os.kill(late, signal.SIGKILL)
    assert not daemon.held()
    assert_served(other)


@pytest.mark.slow
def test_who_never_releases_has_its_share_and_no_more(
    daemon: Tormented, nursery: Nursery, other: OpenNamespace
) -> None:
    hoarder = nursery.bear("hoarder hoarded")
    assert daemon.status()["gauges"]["kvstore_leases"] == 8192
    assert_served(other)
    os.kill(hoarder, signal.SIGCONT)
    assert nursery.hear() == (hoarder, "done 8192 leases, throttled")
    assert not daemon.held()
    assert_served(other)
