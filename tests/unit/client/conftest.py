"""A fake daemon and a namespace for the tests of the client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import Client, ClientLimits, OpenNamespace, Transport
from kvstore.copying import Bytes
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from tests.unit.client.fake_daemon import FakeDaemon

LAYOUT = Layout.single(dtype="bf16", bytes_max=8000, layers=4, segments=2)
NAMESPACE = Namespace(model="m", weights="w1", layout=LAYOUT, block_tokens=4)
LIMITS = ClientLimits(reconnect_seconds=0.01, reconnect_seconds_max=0.05)
SECONDS = 10.0
"""A deadline that no test waits for."""


@pytest.fixture(params=["grpc", "plain"])
def daemon(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeDaemon]:
    """A daemon whose sessions go over gRPC, or over the plain socket beside it."""
    fake = FakeDaemon(tmp_path, LAYOUT, plain=request.param == "plain")
    yield fake
    fake.stop()


@pytest.fixture(params=[Transport.MAPPED, Transport.FRAMED])
def transport(request: pytest.FixtureRequest) -> Transport:
    kind: Transport = request.param
    return kind


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.address, limits=LIMITS) as connected:
        yield connected


@pytest.fixture
def namespace(client: Client) -> OpenNamespace:
    return client.open(NAMESPACE)


def payload(blocks: int, *, seed: int = 0) -> Bytes:
    """Return random blocks."""
    return np.random.default_rng(seed).integers(0, 256, (blocks, 8000), dtype=np.uint8)


def empty(blocks: int) -> Bytes:
    """Return a destination."""
    return np.zeros((blocks, 8000), dtype=np.uint8)


def keys_of(namespace: OpenNamespace, blocks: int) -> bytes:
    """Return the keys of a prompt of that many blocks."""
    return namespace.hashes(list(range(4 * blocks)))


def stored(namespace: OpenNamespace, blocks: int = 3) -> bytes:
    """Put a prompt of that many blocks and return its keys."""
    keys = keys_of(namespace, blocks)
    assert namespace.put(namespace.root, keys, payload(blocks), deadline_seconds=SECONDS).stored == blocks
    return keys


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread brings about."""
    import time

    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.002)
