"""The supervisor: carries out the plan on a daemon and its clients, and audits what they have left."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvstore.client import Client, OpenNamespace
from kvstore.types import HASH_BYTES, MatchMode, MissReason
from tests.e2e.served import Home
from tests.torture.daemon import Tormented, Vitals
from tests.torture.flood import Quiet, flood, quiet
from tests.torture.plan import KILLS, Blow, Step, plan
from tests.torture.workload import BLOCK_BYTES, BLOCKS, KEPT, PURGED, prompt_keys, wrong_blocks

WORKER = Path(__file__).with_name("worker.py")
WAIT_SECONDS = 30.0
SAMPLE = 40
"""Of the prompts acknowledged earlier so many are asked for in every audit; the last one asks for all."""
SLACK = Vitals(descriptors=24, threads=16, rss_mib=96.0)
"""Sockets of clients, gRPC's pollers, and what an allocator does not give back."""
READS = 3
"""A disk that was too busy for a read in time has lost nothing: what is lost stays lost."""
WARM_UP_SECONDS_MAX = 600.0


@dataclass(slots=True)
class Summary:
    """What came of a run."""

    seed: int
    seconds: float = 0.0
    blows: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    acked: int = 0
    lost: int = 0
    purged: int = 0
    returned: int = 0
    encrypted: bool = False
    audits: int = 0
    wrong: int = 0
    faults: list[str] = field(default_factory=list)
    alone: Quiet | None = None
    flooded: Quiet | None = None
    before: Vitals | None = None
    after: Vitals | None = None
    afresh: Vitals | None = None

    @property
    def kills(self) -> int:
        """How often the daemon was killed."""
        return sum(count for blow, count in self.blows.items() if blow in KILLS)

    @property
    def is_clean(self) -> bool:
        """Say whether nothing was violated."""
        return not (self.faults or self.wrong or self.lost or self.returned)

    def line(self) -> str:
        """Return everything in one line."""
        misses = ", ".join(
            f"{name.removeprefix('miss ')} {count}"
            for name, count in sorted(self.counts.items())
            if name.startswith("miss ")
        )
        blows = ", ".join(f"{name} {count}" for name, count in sorted(self.blows.items()))
        return (
            f"torture seed={self.seed} encrypted={self.encrypted} seconds={self.seconds:.0f} "
            f"kills={self.kills} ({blows}); "
            f"operations={self.counts['operations']} hits={self.counts['hits']} "
            f"hit_blocks={self.counts['hit blocks']} misses=({misses or 'none'}); "
            f"wrong_bytes={self.wrong} acknowledged_blocks={self.acked} lost_acknowledged={self.lost} "
            f"purged_prompts={self.purged} returned={self.returned} audits={self.audits}; "
            f"a quiet client alone: {self.alone}; while another floods: {self.flooded}; "
            f"daemon at start: {self.before}; at end: {self.after}; afresh on the same store: {self.afresh}"
        )


class Crew:
    """The client processes. A victim is replaced by one with a fresh seed."""

    def __init__(self, home: Home, *, size: int, seed: int) -> None:
        self._home, self._seed, self._started = home, seed, time.time()
        self._next = 0
        self._places: dict[Path, int] = {}
        self._members: list[subprocess.Popen[str]] = [self._hire() for _ in range(size)]

    def _hire(self) -> subprocess.Popen[str]:
        number, self._next = self._next, self._next + 1
        journal = self._home.root / f"client-{number}.journal"
        self._places[journal] = 0
        command = [sys.executable, str(WORKER), self._home.address, str(journal)]
        command += [str(1000 * self._seed + number), repr(self._started)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=WORKER.parents[2])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all."""
        for member in self._members:
            member.send_signal(number)

    def stop_one(self, victim: int, seconds: float) -> None:
        """Hold one client still for a while."""
        member = self._members[victim % len(self._members)]
        member.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        member.send_signal(signal.SIGCONT)

    def kill_one(self, victim: int) -> None:
        """Kill one client and hire another."""
        index = victim % len(self._members)
        _killed(self._members[index])
        self._members[index] = self._hire()

    def dismiss(self) -> list[str]:
        """Tell all to end; returns who did not."""
        for member in self._members:
            assert member.stdin is not None
            member.stdin.close()
        faults = []
        for member in self._members:
            try:
                code = member.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                _killed(member)
                code = -9
            if code:
                faults.append(f"client ended with {code}")
        self._members.clear()
        return faults

    def kill(self) -> None:
        """Kill whoever is left."""
        for member in self._members:
            _killed(member)

    def news(self) -> Iterator[str]:
        """Yield the lines that the journals have gained."""
        for path, place in self._places.items():
            data = path.read_bytes()[place:] if path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            self._places[path] = place + len(whole)
            yield from whole.decode().splitlines()

    def work(self) -> int:
        """Return how often clients had a hit or stored something."""
        counts = self.counts()
        return counts["hits"] + counts["stored"]

    def counts(self) -> Counter[str]:
        """Return the sum of all counts."""
        total: Counter[str] = Counter()
        for path in self._places:
            counts = path.with_suffix(".json")
            if counts.exists():
                total.update(json.loads(counts.read_text()))
        return total


def _killed(member: subprocess.Popen[str]) -> None:
    member.kill()
    member.wait()
    if member.stdin is not None and not member.stdin.closed:
        member.stdin.close()


class Torture:
    """One run; a context manager that leaves nothing behind."""

    def __init__(self, *, seed: int, clients: int = 3, encrypted: bool | None = None) -> None:
        """`encrypted` None: as the seed decides."""
        self._dice = random.Random(seed)
        encrypted = self._dice.random() < 0.5 if encrypted is None else encrypted
        self.summary = Summary(seed, encrypted=encrypted)
        self._home = Home()
        self._purged: dict[int, int] = {}
        self._fresh_purges: set[int] = set()
        self._acked: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._worked = 0
        self._daemon = Tormented(self._home, encrypted=encrypted)
        self._crew = Crew(self._home, size=clients, seed=seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._crew.kill()
        if self._daemon.served.process.poll() is None:
            self._daemon.served.stop(signal.SIGKILL)
        self._home.remove()

    def run(self, *, seconds: float, kills_max: int) -> Summary:
        """Carry out the plan until the time or the kills are used up, then audit everything."""
        summary, begin = self.summary, time.monotonic()
        steps = plan(summary.seed, kills=kills_max > 0)
        while time.monotonic() - begin < seconds and (not kills_max or summary.kills < kills_max):
            step = next(steps)
            self._wait_for_work()
            time.sleep(min(step.after_seconds, max(0.0, begin + seconds - time.monotonic())))
            self._strike(step)
            self._read_journals()
            if summary.before is None and time.monotonic() - begin > min(WARM_UP_SECONDS_MAX, seconds / 4):
                summary.before = Vitals.of(self._daemon.served.pid)
        self._finish()
        summary.seconds = time.monotonic() - begin
        return summary

    def _wait_for_work(self) -> None:
        """Wait until the clients have hits or store something again: a blow at idle hands shows nothing."""
        end = time.monotonic() + WAIT_SECONDS
        while (done := self._crew.work()) <= self._worked:
            if time.monotonic() > end:
                self.summary.faults.append(f"no client had a hit or stored a block for {WAIT_SECONDS} s")
                break
            time.sleep(0.02)
        self._worked = done

    def flood(self, *, seconds: float, sessions: int = 16) -> None:
        """Ask how a client that wants little is served while another wants all; the crew stands still."""
        self._crew.send(signal.SIGSTOP)
        address, summary = self._home.address, self.summary
        summary.alone = quiet(address, seconds=seconds)
        with flood(address, sessions=sessions):
            summary.flooded = quiet(address, seconds=2 * seconds)
        self._crew.send(signal.SIGCONT)
        if summary.flooded.misses:
            summary.faults.append(f"a flood starved a quiet client: {summary.flooded}")

    def _strike(self, step: Step) -> None:
        self.summary.blows[step.blow] += 1
        daemon = self._daemon
        match step.blow:
            case Blow.KILL_QUIET:
                self._crew.send(signal.SIGSTOP)
                daemon.end(signal.SIGKILL)
                daemon.start()
                self._audit(sample=SAMPLE)
                self._crew.send(signal.SIGCONT)
            case Blow.KILL_BUSY:
                daemon.end(signal.SIGKILL)
                daemon.start()
            case Blow.KILL_STARTING:
                daemon.end(signal.SIGKILL)
                daemon.start_and_kill(step.hold_seconds)
                daemon.start()
            case Blow.TERM:
                daemon.end(signal.SIGTERM)
                daemon.start()
            case Blow.STOP:
                daemon.served.send(signal.SIGSTOP)
                time.sleep(step.hold_seconds)
                daemon.served.send(signal.SIGCONT)
            case Blow.KILL_CLIENT:
                self._crew.kill_one(step.victim)
            case Blow.STOP_CLIENT:
                self._crew.stop_one(step.victim, step.hold_seconds)

    def _read_journals(self) -> None:
        for line in self._crew.news():
            word, _, rest = line.partition(" ")
            if word == "acked":
                number, depth = map(int, rest.split())
                if depth > self._acked.get(number, 0):
                    self._acked[number] = depth
                    self._fresh.add(number)
            elif word == "purged":
                number, first = map(int, rest.split())
                self._purged[number] = first
                self._fresh_purges.add(number)
                self.summary.purged += 1
            else:
                self.summary.wrong += word == "wrong"
                self.summary.faults.append(line)

    def _audit(self, *, sample: int) -> None:
        """With all clients still: is what was acknowledged there, and do the books agree with the disk."""
        self._read_journals()
        fault = self._daemon.accounting_fault()
        if fault:
            self.summary.faults.append(fault)
        older = sorted(self._acked.keys() - self._fresh)
        asked = [*self._fresh, *self._dice.sample(older, min(sample, len(older)))]
        self._fresh.clear()
        with Client(self._home.address) as client:
            namespace = client.open(KEPT)
            for number in asked:
                depth = self._acked[number]
                keys = prompt_keys(namespace, number)[: HASH_BYTES * depth]
                found = namespace.match(keys, mode=MatchMode.PROBE, deadline_seconds=WAIT_SECONDS)
                if found.blocks < depth:
                    self._lose(number, depth, found.blocks, str(found.reason))
            self._audit_purges(client.open(PURGED), sample=sample)
        self.summary.audits += 1

    def _audit_purges(self, namespace: OpenNamespace, *, sample: int) -> None:
        """Is what was deleted away, whatever was being written when."""
        older = sorted(self._purged.keys() - self._fresh_purges)
        asked = [*self._fresh_purges, *self._dice.sample(older, min(sample, len(older)))]
        self._fresh_purges.clear()
        for number in asked:
            keys, first = prompt_keys(namespace, number), self._purged[number]
            found = namespace.match(keys, mode=MatchMode.PROBE, deadline_seconds=WAIT_SECONDS)
            if found.blocks > first:
                self.summary.returned += 1
                self.summary.faults.append(
                    f"returned: prompt {number}: deleted from block {first} on, {found.blocks} there; "
                    f"blows so far {dict(self.summary.blows)}"
                )

    def _lose(self, number: int, promised: int, found: int, reason: str) -> None:
        self.summary.lost += promised - found
        self.summary.faults.append(
            f"lost: prompt {number}: {promised} blocks acknowledged, {found} there, {reason}; "
            f"blows so far {dict(self.summary.blows)}"
        )
        self._acked[number] = found

    def _finish(self) -> None:
        """Let the clients end, look that nothing is held, kill once more and read all that was promised."""
        summary, daemon = self.summary, self._daemon
        summary.faults += self._crew.dismiss()
        held = daemon.held()
        if held:
            summary.faults.append(f"held by nobody: {held}")
        summary.after = Vitals.of(daemon.served.pid)
        summary.before = summary.before or summary.after
        daemon.end(signal.SIGKILL)
        summary.blows[Blow.KILL_QUIET] += 1
        daemon.start()
        self._audit(sample=len(self._acked) + len(self._purged))
        self._read_all()
        summary.afresh = Vitals.of(daemon.served.pid)
        self._compare(summary.before, summary.after, summary.afresh)
        summary.acked = sum(self._acked.values())
        daemon.end(signal.SIGTERM)
        summary.faults += daemon.faults
        summary.counts = self._crew.counts()

    def _compare(self, before: Vitals, after: Vitals, afresh: Vitals) -> None:
        """Nothing grows with time. Memory grows with what is stored: a daemon started afresh on the same
        store says how much of it that is.
        """
        for name in ("descriptors", "threads", "rss_mib"):
            earlier = max(getattr(before, name), getattr(afresh, name) if name == "rss_mib" else 0)
            if getattr(after, name) > earlier + getattr(SLACK, name):
                self.summary.faults.append(f"{name} grew: {before} to {after}; afresh {afresh}")

    def _read_all(self) -> None:
        into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        with Client(self._home.address) as client:
            namespace = client.open(KEPT)
            for number, depth in self._acked.items():
                keys = prompt_keys(namespace, number)[: HASH_BYTES * depth]
                for _ in range(READS):
                    got = namespace.get(keys, into, deadline_seconds=WAIT_SECONDS)
                    if got.reason is not MissReason.TIER_DOWN:
                        break
                if got.blocks < depth:
                    self._lose(number, depth, got.blocks, f"read: {got.reason}")
                self.summary.wrong += wrong_blocks(keys, into, got.blocks)
