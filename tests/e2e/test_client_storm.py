"""Many clients, a daemon that is stopped, killed and restarted under them: nobody is told a lie."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.rpc.v1 import admin_pb2
from kvstore.types import HASH_BYTES
from tests.e2e.served import Home, Served, Wire
from tests.e2e.storm_worker import NAMESPACE

WORKER = Path(__file__).with_name("storm_worker.py")
SECONDS = 20.0
SEED = 1


def worker(home: Home, seed: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), home.address, str(seed), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=WORKER.parents[2])


def disturb(daemon: Served, home: Home, victim: subprocess.Popen[str], kind: str) -> Served:
    """Do one bad thing; return the daemon that runs afterwards."""
    if kind == "stop":
        daemon.send(signal.SIGSTOP)
        time.sleep(1.0)
        daemon.send(signal.SIGCONT)
        return daemon
    if kind == "kill client":
        victim.kill()
        return daemon
    daemon.stop(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
    return Served(home).__enter__()


@pytest.mark.slow
def test_a_storm(home: Home) -> None:
    order = ["stop", "kill", "stop", "term", "kill client", "kill"]
    random.Random(SEED).shuffle(order)
    daemon = Served(home).__enter__()
    try:
        workers = [worker(home, seed, SECONDS) for seed in range(3)]
        victim = worker(home, 8, SECONDS)
        for kind in order:
            time.sleep(SECONDS / 2 / len(order))
            daemon = disturb(daemon, home, victim, kind)
        reports = [json.loads(process.communicate(timeout=4 * SECONDS)[0]) for process in workers]
        victim.communicate(timeout=4 * SECONDS)
        for report in reports:
            assert not [key for key in report if key.startswith(("raised", "late"))], reports
            assert not report.get("lies"), reports
            assert report["put"], reports
            assert report["got"], reports
        gauges = settled(home)
        with Client(home.address) as client:
            client.open(NAMESPACE).match(bytes(HASH_BYTES), deadline_seconds=10.0)
    finally:
        daemon.__exit__(None, None, None)
    assert gauges == dict.fromkeys(gauges, 0.0)


def settled(home: Home) -> dict[str, float]:
    """Return what is still held, when nothing is or after a while."""
    names = ("kvstore_leases", "kvstore_reservations", "kvstore_quarantined_slots", "kvstore_loads_in_flight")
    for _ in range(100):
        with Wire(home.address) as tool:
            gauges = json.loads(tool.admin.Status(admin_pb2.StatusRequest()).document)["gauges"]
        held = {name: float(gauges[name]) for name in names}
        if not any(held.values()):
            break
        time.sleep(0.1)
    return held
