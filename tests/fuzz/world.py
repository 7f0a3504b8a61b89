"""A real daemon to fuzz, and what must be true of it afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.hashing import chain_root
from kvstore.namespace import Namespace
from kvstore.rpc import wire
from kvstore.rpc.v1 import admin_pb2
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import Addressing, PutOutcome
from tests.e2e import blocks
from tests.e2e.served import Home, Served, Wire
from tests.fuzz.drive import Fault, Fuzzer
from tests.fuzz.messages import Known

SETTLE_SECONDS = 30.0
LEVELS = ("kvstore_leases", "kvstore_reservations", "kvstore_prefetches", "kvstore_quarantined_slots")
FLAT = replace(blocks.NAMESPACE, model="flat", addressing=Addressing.FLAT, block_tokens=1)
SPACES: tuple[Namespace, ...] = (blocks.NAMESPACE, FLAT)
SETTINGS = ("ssd.segment_bytes=4MiB", "ssd.capacity_bytes=64MiB", "log.level=error")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds of the machine."""

    descriptors: int
    threads: int
    resident_bytes: int

    @staticmethod
    def of(pid: int) -> Footprint:
        """Return the footprint of a living process."""
        place = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        return Footprint(
            descriptors=len(list((place / "fd").iterdir())),
            threads=int(status["Threads"]),
            resident_bytes=int(status["VmRSS"].split()[0]) << 10,
        )


class World:
    """A daemon with two namespaces and some blocks."""

    def __init__(self, home: Home, daemon: Served) -> None:
        self.home = home
        self.daemon = daemon
        self.keys = [blocks.keys_of(12, seed=seed) for seed in range(3)]
        with Wire(home.address) as client:
            for space in SPACES:
                client.data.Open(wire.open_to_wire(space, root=chain_root(space.fingerprint)))
            for keys in self.keys:
                assert blocks.put(client, keys) == [(PutOutcome.STORED_SSD, 12)]

    def known(self) -> Known:
        """Return what a stranger may know."""
        return Known(
            canonicals=[space.canonical() for space in SPACES],
            fingerprints=[space.fingerprint for space in SPACES],
            roots=[chain_root(space.fingerprint) for space in SPACES],
            keys=list(self.keys),
        )

    def check(self, before: Footprint, numbers: list[int]) -> Footprint:
        """Check that the daemon answers, holds nothing for anybody, and has not grown.

        Errors: Fault.
        """
        if self.daemon.process.poll() is not None:
            raise Fault(f"the daemon has ended with code {self.daemon.process.returncode}")
        with Wire(self.home.address) as client:
            assert client.hello().session
            assert client.ask(ping=pb.PingRequest()).WhichOneof("answer") == "ping"
            for number in numbers:
                client.data.Release(pb.ReleaseRequest(lease=number, outcome=pb.RELEASE_OUTCOME_UNUSED))
                client.data.Cancel(pb.CancelRequest(prefetch=number))
            self._settles(client, before)
            keys = blocks.keys_of(5, seed=99)
            blocks.open_namespace(client)
            blocks.put(client, keys)
            blocks.assert_fetched(client, keys)
        return Footprint.of(self.daemon.pid)

    def _settles(self, client: Wire, before: Footprint) -> None:
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            document = json.loads(client.admin.Status(admin_pb2.StatusRequest()).document)
            held = {name: document["gauges"][name] for name in LEVELS if document["gauges"][name]}
            now = Footprint.of(self.daemon.pid)
            grown = now.descriptors > before.descriptors + 8 or now.threads > before.threads + 8
            if not held and document["sessions"] == 1 and not grown:
                return
            if time.monotonic() > end:
                raise Fault(f"left behind: {held}, {document['sessions']} sessions, {before} became {now}")
            time.sleep(0.05)


@contextmanager
def fuzzed_daemon() -> Iterator[World]:
    """Run a daemon; at the end it must stop in order, and must not have logged an error."""
    home = Home()
    flags = [part for setting in SETTINGS for part in ("--set", setting)]
    try:
        with Served(home, *flags) as daemon:
            yield World(home, daemon)
            assert daemon.stop() == 0
            mine = [
                line for line in daemon.log.splitlines() if "call failed" in line or "verb failed" in line
            ]
            if mine:
                raise Fault(f"the daemon logged {len(mine)} errors of its own, the first: {mine[0]}")
    finally:
        home.remove()


def fuzz(world: World, *, calls: int, seed: int, warm: int = 200) -> tuple[Fuzzer, Footprint, Footprint]:
    """Make `calls` calls and check the daemon; returns the fuzzer and the footprints before and after."""
    fuzzer = Fuzzer(world.home.address, world.known(), seed=seed)
    try:
        fuzzer.run(warm)
        before = Footprint.of(world.daemon.pid)
        fuzzer.run(calls - warm)
    except Exception as error:
        raise Fault(f"seed {seed}, after {fuzzer.calls} calls: {error!r}") from error
    finally:
        fuzzer.close()
    return fuzzer, before, world.check(before, sorted(fuzzer.known.ever))
