"""Clients and a daemon of different age get along under load, also when the daemon is replaced meanwhile."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest

from kvstore.client import Client, ClientLimits, OpenNamespace, Transport
from kvstore.errors import DeadlineExceeded, Overloaded, ShuttingDown, TierUnavailable
from kvstore.types import HASH_BYTES, AckTier
from tests.e2e.pipe import Change, Pipe, later, older
from tests.e2e.served import Home, Served
from tests.torture.workload import BLOCK_BYTES, BLOCKS, KEPT, LOOSE, blocks_of, prompt_keys, wrong_blocks

LIMITS = ClientLimits(breaker_seconds=0.1, breaker_seconds_max=0.2, reconnect_seconds_max=0.2)
ABSENT = (TierUnavailable, ShuttingDown, DeadlineExceeded, Overloaded)
PROMPTS = 6
SECONDS = 20.0
PATIENCE_SECONDS = 100.0
HITS = 4 * BLOCKS


class Load(threading.Thread):
    """One client at work: what it reads is checked, and what it may not raise is noted."""

    def __init__(self, address: str, *, seed: int, transport: Transport) -> None:
        super().__init__()
        self._client = Client(address, transport=transport, limits=LIMITS)
        self._dice = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.hits_wanted = 1 << 30

    def run(self) -> None:
        """Do random verbs until there were some hits, with the old daemon and with the new one."""
        with self._client as client:
            kept, loose = client.open(KEPT), client.open(LOOSE)
            end = time.monotonic() + PATIENCE_SECONDS
            while self.counts["hits"] < self.hits_wanted and time.monotonic() < end:
                try:
                    self._step(kept, loose)
                except ABSENT:
                    time.sleep(0.02)
                except Exception as error:
                    self.faults.append(repr(error))

    def _step(self, kept: OpenNamespace, loose: OpenNamespace) -> None:
        keys = prompt_keys(kept, self._dice.randrange(PROMPTS))
        into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        match self._dice.randrange(5):
            case 0 | 1:
                got = kept.get(keys, into, deadline_seconds=SECONDS)
                self.counts["hits"] += got.blocks
                self.counts["wrong"] += wrong_blocks(keys, into, got.blocks)
            case 2:
                ack = self._dice.choice([AckTier.HOST, AckTier.SSD])
                put = kept.put(kept.root, keys, blocks_of(keys), ack=ack, deadline_seconds=SECONDS)
                self.counts["stored"] += put.stored
            case 3:
                kept.touch(keys)
                match = kept.match(keys, lease_seconds=5.0)
                kept.renew(match, lease_seconds=5.0)
                kept.release(match, used=0)
                kept.cancel(kept.prefetch(keys, deadline_seconds=1.0))
            case _:
                own = prompt_keys(loose, 100 + self._dice.randrange(PROMPTS))
                loose.put(loose.root, own, blocks_of(own), deadline_seconds=SECONDS)
                loose.delete(own[-HASH_BYTES:], deadline_seconds=SECONDS)
                loose.list(limit=10, deadline_seconds=SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("change", [older, later])
def test_ends_of_different_age_serve_each_other_under_load(home: Home, change: Change) -> None:
    """An older one hears only the fields of protocol 1, a later one says more than the other knows."""
    there = f"unix:{home.root}/pipe.sock"
    with Served(home) as served, Pipe(there, home.address, change=change) as pipe:
        ends = [(there, Transport.MAPPED), (there, Transport.FRAMED), (home.address, Transport.MAPPED)]
        clients = [
            Load(address, seed=index, transport=transport) for index, (address, transport) in enumerate(ends)
        ]
        for client in clients:
            client.start()
        until_hits(clients)
        served.stop(signal.SIGKILL)
        with Served(home):
            for client in clients:
                client.hits_wanted = client.counts["hits"] + HITS
            for client in clients:
                client.join()
        for client in clients:
            assert not client.faults
            assert not client.counts["wrong"]
            assert client.counts["hits"] >= client.hits_wanted, client.counts
        assert pipe.messages > 100


def until_hits(clients: list[Load]) -> None:
    """Wait until every client had some."""
    end = time.monotonic() + PATIENCE_SECONDS
    while min(client.counts["hits"] for client in clients) < HITS:
        assert time.monotonic() < end, [client.counts for client in clients]
        clients[0].join(0.05)
