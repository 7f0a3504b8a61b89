"""A peer's worker obeys, and is not believed: bytes are compared, and a store that loses blocks says so."""

from __future__ import annotations

import sys

import pytest

from kvstore.bench.peers import Worker
from kvstore.errors import TierUnavailable

PEER = """
from scripts.peers.work import serve

class Peer:
    def __init__(self):
        self.rows = {}
    def put(self, names, source):
        self.rows = dict(zip(names, source.copy()))
        print("noise on stdout")
    def get(self, names, into):
        for row, name in zip(into, names):
            row[:] = self.rows[name]
        LIE
    def look_up(self, names):
        return sum(name in self.rows for name in names)

serve(Peer(), blocks=4, block_bytes=100)
"""


def worker(lie: str = "pass") -> Worker:
    return Worker([sys.executable, "-c", PEER.replace("LIE", lie)])


def test_orders_are_timed_and_what_comes_back_is_compared() -> None:
    with worker() as peer:
        with pytest.raises(TierUnavailable, match="0 of 4 blocks found"):
            peer.do("look_up")
        assert all(peer.do(order) >= 0 for order in ("put", "get", "check", "look_up"))


@pytest.mark.parametrize("lie", ["into[2, 7] ^= 1", "into[:] = 1"])
def test_other_bytes_are_found_out(lie: str) -> None:
    with worker(lie) as peer:
        peer.do("put")
        peer.do("get")
        with pytest.raises(TierUnavailable, match="other bytes came back"):
            peer.do("check")


def test_a_worker_that_does_not_start_is_told() -> None:
    with pytest.raises(TierUnavailable, match="it ended before it was ready"), Worker(["false"]):
        pass
