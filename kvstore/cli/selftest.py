"""The part of `doctor` that uses a daemon: write, read and expire a small run through each of its tiers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.cli.checks import MIB
from kvstore.cli.child import ChildDaemon
from kvstore.cli.connection import LIMITS, Daemon, tls_of
from kvstore.cli.output import bytes_text, duration_text, time_text
from kvstore.cli.views import VerifyView
from kvstore.client import Client, OpenNamespace
from kvstore.errors import KVStoreError
from kvstore.finding import Finding, Level
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.types import AckTier, MatchMode, MissReason, Tier

BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 8, 16, 64 << 10
DEADLINE_SECONDS = 10.0
CHILD_ARENA_BYTES = 64 * MIB
CHILD_CLASS, CHILD_TTL_SECONDS = "doctor", 1.0
CHILD_SETTINGS = {
    f"classes.{CHILD_CLASS}.ttl_seconds": f"{CHILD_TTL_SECONDS:g}",
    "ssd.segment_bytes": "16MiB",
    "ssd.capacity_bytes": "64MiB",
}
LOG_ADVICE = "look at the daemon's log, and file a bug with it and `kvstore doctor --json`"

NAMESPACE = Namespace(
    model="kvstore-doctor",
    weights="none",
    layout=Layout.single(dtype="u8", bytes_max=BLOCK_BYTES, layers=4, segments=4),
    block_tokens=BLOCK_TOKENS,
)
Payload = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Sample:
    """A run that nobody has stored before, and its bytes."""

    keys: bytes
    payload: Payload

    @staticmethod
    def make(namespace: OpenNamespace) -> Sample:
        """Draw one at random."""
        seed = np.random.default_rng(secrets.randbits(64))
        tokens = seed.integers(0, 1 << 31, BLOCKS * BLOCK_TOKENS)
        payload = seed.integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        return Sample(namespace.hashes(tokens), payload)


def exercise(address: str, *, token: str = "", tls_ca: Path | None = None) -> list[Finding]:
    """Use a running daemon: write, read back, verify on SSD, delete; leaves nothing behind."""
    try:
        with (
            Client(address, token=token, tls=tls_of(tls_ca), limits=LIMITS) as client,
            Daemon(address, token=token, tls_ca=tls_ca) as daemon,
        ):
            namespace = client.open(NAMESPACE)
            sample = Sample.make(namespace)
            try:
                return [
                    _host_tier(namespace, sample),
                    _ssd_tier(namespace, sample, daemon),
                    _expiry_time(namespace, sample, daemon),
                    _deletion(namespace, sample),
                ]
            finally:
                namespace.delete(sample.keys)
    except KVStoreError as error:
        return [Finding("daemon", Level.PROBLEM, str(error), LOG_ADVICE)]


def _host_tier(namespace: OpenNamespace, sample: Sample) -> Finding:
    check = "host tier"
    began = time.monotonic()
    put = namespace.put(namespace.root, sample.keys, sample.payload, deadline_seconds=DEADLINE_SECONDS)
    if put.stored < BLOCKS:
        outcomes = ", ".join(f"{run.count} {run.outcome}" for run in put.outcomes) or str(put.reason)
        return Finding(
            check, Level.PROBLEM, f"{put.stored} of {BLOCKS} blocks stored: {outcomes}", LOG_ADVICE
        )
    return _read_back(check, namespace, sample, "wrote and read", began)


def _read_back(check: str, namespace: OpenNamespace, sample: Sample, verb: str, began: float) -> Finding:
    into = np.zeros_like(sample.payload)
    fetched = namespace.get(sample.keys, into, deadline_seconds=DEADLINE_SECONDS)
    taken = duration_text(time.monotonic() - began)
    if fetched.blocks < BLOCKS:
        found = f"{fetched.blocks} of {BLOCKS} blocks came back: {fetched.reason}"
        return Finding(check, Level.PROBLEM, found, LOG_ADVICE)
    if not np.array_equal(into, sample.payload):
        return Finding(check, Level.PROBLEM, "other bytes came back than were written", LOG_ADVICE)
    size = bytes_text(BLOCKS * BLOCK_BYTES)
    return Finding(check, Level.OK, f"{verb} {BLOCKS} blocks, {size}, the same bytes, in {taken}")


def _ssd_tier(namespace: OpenNamespace, sample: Sample, daemon: Daemon) -> Finding:
    check = "ssd tier"
    tiers = {tier.get("tier"): tier for tier in daemon.status().get("tiers", ())}
    if Tier.SSD not in tiers:
        return Finding(
            check, Level.NOTE, "the daemon has no SSD tier", "nothing survives a restart: ssd.enabled"
        )
    began = time.monotonic()
    other = Sample.make(namespace)
    try:
        put = namespace.put(
            namespace.root, other.keys, other.payload, ack=AckTier.SSD, deadline_seconds=DEADLINE_SECONDS
        )
        if put.stored < BLOCKS:
            outcomes = ", ".join(f"{run.count} {run.outcome}" for run in put.outcomes) or str(put.reason)
            return Finding(check, Level.PROBLEM, f"not durable: {outcomes}", LOG_ADVICE)
        views = [VerifyView.from_wire(message) for message in daemon.verify(NAMESPACE.fingerprint)]
    finally:
        namespace.delete(other.keys)
    faults = [fault for view in views for fault in view.faults]
    if faults:
        advice = f"the disk or its controller changes bytes: run `kvstore verify`; {LOG_ADVICE}"
        return Finding(
            check, Level.PROBLEM, f"{len(faults)} blocks read back wrong: {faults[0].detail}", advice
        )
    taken = duration_text(time.monotonic() - began)
    checked = views[-1].blocks_done if views else 0
    return Finding(
        check, Level.OK, f"{BLOCKS} blocks durable, {checked} copies read and verified, in {taken}"
    )


def _expiry_time(namespace: OpenNamespace, sample: Sample, daemon: Daemon) -> Finding:
    reply = daemon.inspect(NAMESPACE.fingerprint, keys=sample.keys)
    if not reply.runs:
        return Finding("expiry", Level.PROBLEM, "a run just written is not listed", LOG_ADVICE)
    run = reply.runs[0]
    ttls = {item["class"]: item.get("ttl_seconds") for item in daemon.status().get("classes", ())}
    ttl = ttls.get(run.retention_class)
    ends = time_text(run.expires_at)
    found = f"class {run.retention_class} expires {ends}, {duration_text(ttl)} after its touch"
    if ttl is not None and abs(run.expires_at - run.touched_at - ttl) > 1:
        return Finding("expiry", Level.PROBLEM, found + ": does not add up", LOG_ADVICE)
    return Finding("expiry", Level.OK, found + " (--self-test sees one happen)")


def _deletion(namespace: OpenNamespace, sample: Sample) -> Finding:
    gone = namespace.delete(sample.keys)
    match = namespace.match(sample.keys, deadline_seconds=DEADLINE_SECONDS)
    if match.blocks or gone < BLOCKS:
        found = f"{gone} of {BLOCKS} blocks deleted, {match.blocks} still found"
        return Finding("deletion", Level.PROBLEM, found, LOG_ADVICE)
    return Finding("deletion", Level.OK, f"{gone} blocks deleted; a match then says {match.reason}")


def self_test(directory: Path) -> Iterator[Finding]:
    """Start a temporary daemon in `directory` and put a run through every tier, a restart and its expiry."""
    child = ChildDaemon(directory, arena_bytes=CHILD_ARENA_BYTES, settings=CHILD_SETTINGS)
    try:
        yield Finding("start", Level.OK, f"a temporary daemon served after {duration_text(child.start())}")
        yield from exercise(child.address)
        yield from _restart(child)
        yield _expiry(child)
    except KVStoreError as error:
        yield Finding("temporary daemon", Level.PROBLEM, str(error), LOG_ADVICE)
    finally:
        child.stop()


def _restart(child: ChildDaemon) -> Iterator[Finding]:
    with Client(child.address) as client:
        namespace = client.open(NAMESPACE)
        sample = Sample.make(namespace)
        namespace.put(
            namespace.root, sample.keys, sample.payload, ack=AckTier.SSD, deadline_seconds=DEADLINE_SECONDS
        )
    child.stop()
    taken = child.start()
    yield Finding("restart", Level.OK, f"stopped and started again in {duration_text(taken)}")
    with Client(child.address) as client:
        namespace = client.open(NAMESPACE)
        match = namespace.match(sample.keys, load=False, deadline_seconds=DEADLINE_SECONDS)
        from_ssd = sum(run.count for run in match.tiers if run.tier is Tier.SSD)
        namespace.release(match, used=0)
        finding = _read_back("read from ssd", namespace, sample, "after the restart read", time.monotonic())
    if finding.level is Level.OK and from_ssd < BLOCKS:
        found = f"{from_ssd} of {BLOCKS} blocks lay on SSD after the restart"
        finding = Finding("read from ssd", Level.PROBLEM, found, LOG_ADVICE)
    yield finding


def _expiry(child: ChildDaemon) -> Finding:
    check = "expiry"
    with Client(child.address) as client:
        namespace = client.open(NAMESPACE)
        sample = Sample.make(namespace)
        namespace.put(namespace.root, sample.keys, sample.payload, retention_class=CHILD_CLASS)
        before = _probe(namespace, sample.keys)[0]
        time.sleep(1.2 * CHILD_TTL_SECONDS)
        after, reason = _probe(namespace, sample.keys)
    found = f"class of {CHILD_TTL_SECONDS:g} s: {before} blocks found, then {after} ({reason})"
    if before == BLOCKS and after == 0 and reason is MissReason.EXPIRED:
        return Finding(check, Level.OK, found)
    return Finding(check, Level.PROBLEM, found, LOG_ADVICE)


def _probe(namespace: OpenNamespace, keys: bytes) -> tuple[int, MissReason | None]:
    match = namespace.match(keys, mode=MatchMode.PROBE, deadline_seconds=DEADLINE_SECONDS)
    return match.blocks, match.reason
