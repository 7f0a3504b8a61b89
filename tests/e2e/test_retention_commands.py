"""Retention, purge, hit rates and reasons on a real daemon: what the commands do, what a restart keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from signal import Signals
from typing import Any

import numpy as np
import pytest

from kvstore.cli.main import run
from kvstore.client import Client
from kvstore.hashing import block_hashes, chain_root
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.types import AckTier
from tests.e2e.served import Home, Served

BLOCKS, BLOCK_BYTES = 8, 8192
NAMESPACE = Namespace(
    model="tiny",
    weights="w1",
    layout=Layout.single(dtype="u8", bytes_max=BLOCK_BYTES, layers=2, segments=2),
    block_tokens=4,
)
PAYLOAD = np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    try:
        yield made
    finally:
        made.remove()


def keys(seed: int) -> bytes:
    root = chain_root(NAMESPACE.fingerprint)
    return block_hashes(root, [seed, *range(1, 4 * BLOCKS)], block_tokens=4)


def store(home: Home) -> None:
    """Put one run of each of three classes, durably."""
    with Client(home.address) as client:
        opened = client.open(NAMESPACE)
        for seed, name in enumerate(("agent", "chat", "batch")):
            put = opened.put(opened.root, keys(seed), PAYLOAD, retention_class=name, ack=AckTier.SSD)
            assert put.stored == BLOCKS


def fetched(home: Home, seed: int, *, owner: str = "") -> int:
    with Client(home.address) as client:
        into = np.zeros_like(PAYLOAD)
        return client.open(NAMESPACE).get(keys(seed), into, owner=owner).blocks


class Commands:
    """The command line in this process, against one daemon."""

    def __init__(self, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
        self._address = ("--address", home.address)
        self._capsys = capsys

    def said(self, *arguments: str, code: int = 0) -> str:
        assert run([*arguments, *self._address]) == code
        return self._capsys.readouterr().out

    def document(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.said(*arguments, "--json", code=code))
        return found


def test_an_operator_changes_a_class_asks_why_and_purges(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands(home, capsys)
    with Served(home) as daemon:
        store(home)
        assert fetched(home, 1, owner="request-1") == BLOCKS
        rates = commands.document("hit-rate", "--by", "class,tier,tenant,namespace")
        [row] = rates["rows"]
        assert (row["class"], row["requests"], row["hit_rate"], row["model"]) == ("chat", 1, 1.0, "tiny")
        assert sum(row["hit_tokens_by_tier"].values()) == 4 * BLOCKS
        assert "100.0 %" in commands.said("hit-rate", "--by", "namespace,tier")
        assert "configuration" in commands.said("retention", "list")
        # Too short to be true, so that nothing has to wait.
        foreseen = commands.said("retention", "set", "chat", "--ttl", "1ms")
        assert "life 7 d -> 1 ms" in foreseen.replace("ttl", "life")
        assert "this would hide 8 blocks, 96.0 KiB, now" in foreseen
        assert "nothing has changed" in foreseen
        assert fetched(home, 1) == BLOCKS
        done = commands.document("retention", "set", "chat", "--ttl", "1ms", "--yes")
        assert (done["applied"], done["hides"]["blocks"]) == (True, BLOCKS)
        assert fetched(home, 1, owner="request-2") == 0
        why = commands.said("why", "request-2")
        assert "stopped at block" in why and "expired" in why and "a life of class chat longer than" in why
        assert "used 8" in commands.said("why", "request-1")
        assert "is there, in host and ssd" in commands.said("why", keys(1)[:8].hex())
        assert "nothing is remembered" in commands.said("why", "request-9", code=1)
        advice = commands.document("retention", "advice")["classes"]["chat"]["hour"]
        assert advice["lost_to_expiry_tokens"] == 4 * BLOCKS
        said = commands.said("retention", "advice")
        assert "chat: a life of" in said and "32 tokens (100.0 %) of those lost to expiry" in said
        daemon.stop(Signals.SIGKILL)
    with Served(home) as daemon:
        assert any("classes.chat.ttl_seconds follows `kvstore retention set" in line for line in daemon.lines)
        assert fetched(home, 1) == 0
        assert "life 1 ms -> 7 d" in commands.said("retention", "undo", "--yes").replace("ttl", "life")
        assert fetched(home, 1) == BLOCKS
        assert "chat" in commands.said("retention", "forecast", "--hours", "200")
        dry = commands.document("purge", "--class", "batch")
        assert (dry["applied"], dry["blocks"]) == (False, BLOCKS)
        receipt = commands.document("purge", "--class", "batch", "--yes")["receipts"][0]
        assert (receipt["blocks"], receipt["durable"], receipt["state"]) == (BLOCKS, True, "gone")
        daemon.stop(Signals.SIGKILL)
    with Served(home):
        assert [fetched(home, seed) for seed in range(3)] == [BLOCKS, BLOCKS, 0]
        again = commands.document("purge", "--receipt", receipt["id"])["receipts"][0]
        assert (again["unreachable_since"], again["gone_at"]) == (
            receipt["unreachable_since"],
            receipt["gone_at"],
        )
        part = commands.document("purge", "--hash", keys(0)[6 * 32 :][:6].hex(), "--yes")["receipts"][0]
        assert (part["blocks"], fetched(home, 0)) == (2, 6)
        assert "receipt" in commands.said("purge", "--receipts")
