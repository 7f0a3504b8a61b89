"""A real daemon with encryption on: hits after a kill, rotation and shredding while it runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from kvstore.bench import prompt
from kvstore.bench.prompt import BLOCK_BYTES, Prompt
from kvstore.client import Client
from kvstore.errors import TierUnavailable
from kvstore.types import AckTier, Tier
from tests.e2e.served import Home, Served

BLOCKS = 12
SECONDS = 30.0
PAYLOAD = prompt.random_bytes(BLOCKS, BLOCK_BYTES, seed=1)


def keys(home: Home, *arguments: str) -> str:
    """Run `kvstore keys` in the daemon's environment."""
    command = [sys.executable, "-m", "kvstore.cli.main", "keys", *arguments]
    done = subprocess.run(
        command, env=home.environ(**environ(home)), capture_output=True, text=True, check=True
    )
    return done.stdout


def environ(home: Home) -> dict[str, str]:
    return {
        "KVSTORE_ENCRYPTION__ENABLED": "true",
        "KVSTORE_ENCRYPTION__KEY_FILE": str(home.root / "keys.toml"),
    }


def prompt_of(client: Client, tenant: str) -> Prompt:
    return Prompt.draw(client.open(replace(prompt.block_major("e2e"), tenant=tenant)), BLOCKS, seed=3)


def is_hit(client: Client, tenant: str, tier: Tier) -> bool:
    """Fetch a tenant's prompt and compare it; says whether all of it came from a tier."""
    into = np.zeros_like(PAYLOAD)
    try:
        fetched = prompt_of(client, tenant).fetch(into, verify=True)
    except TierUnavailable:
        return False
    assert (into == PAYLOAD).all()
    return {run.tier for run in fetched.tiers} == {tier}


@pytest.mark.slow
def test_kill_rotate_and_shred(home: Home) -> None:
    home.root.mkdir(exist_ok=True)
    keys(home, "rotate", "acme")
    keys(home, "rotate", "other")
    with Served(home, environ=environ(home)) as daemon, Client(home.address) as client:
        assert "encrypted" in daemon.fact("ssd")
        for tenant in ("acme", "other"):
            prompt_of(client, tenant).store(PAYLOAD, ack=AckTier.SSD)
        daemon.stop(signal.SIGKILL)
    stored = b"".join(path.read_bytes() for path in (home.data / "segments").iterdir())
    assert len(stored) > 2 * PAYLOAD.nbytes
    assert not any(
        PAYLOAD[block, at : at + 16].tobytes() in stored for block in range(BLOCKS) for at in (0, 70_000)
    )
    with Served(home, environ=environ(home)) as daemon, Client(home.address) as client:
        assert is_hit(client, "acme", Tier.SSD)
        assert is_hit(client, "acme", Tier.HOST)
        assert f"pid {daemon.pid} was told" in keys(home, "rotate", "acme")
        assert f"pid {daemon.pid} was told" in keys(home, "shred", "acme", "--yes")
        ends = time.monotonic() + SECONDS
        while is_hit(client, "acme", Tier.HOST) and time.monotonic() < ends:
            time.sleep(0.05)
        assert not is_hit(client, "acme", Tier.HOST)
        assert is_hit(client, "other", Tier.SSD)
        assert daemon.stop() == 0
    with Served(home, environ=environ(home)) as daemon, Client(home.address) as client:
        assert not is_hit(client, "acme", Tier.SSD)
        assert is_hit(client, "other", Tier.SSD)
        prompt_of(client, "nobody").store(PAYLOAD, ack=AckTier.HOST)
        assert is_hit(client, "nobody", Tier.HOST), "a tenant without a key lives in host memory"
        assert daemon.stop() == 0
    assert "'nobody'" not in keys(home, "list")


@pytest.mark.slow
def test_a_daemon_without_keys_serves_and_keeps_what_it_cannot_read(home: Home) -> None:
    home.root.mkdir(exist_ok=True)
    keys(home, "rotate", "acme")
    with Served(home, environ=environ(home)) as daemon, Client(home.address) as client:
        prompt_of(client, "acme").store(PAYLOAD, ack=AckTier.SSD)
        assert daemon.stop() == 0
    with Served(home) as daemon, Client(home.address) as client:
        assert not is_hit(client, "acme", Tier.SSD)
        daemon.send(signal.SIGHUP)
        assert not is_hit(client, "acme", Tier.SSD)
        assert daemon.stop() == 0
    with Served(home, environ=environ(home)) as daemon, Client(home.address) as client:
        assert is_hit(client, "acme", Tier.SSD)
        assert daemon.stop() == 0
