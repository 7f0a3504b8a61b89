"""One client process of the torture: random verbs, every byte checked, acknowledgements noted in a journal.

Lines of the journal go out with one write each, so that a killed client leaves no false ones:
`acked PROMPT BLOCKS` after STORED_SSD, `purged PROMPT BLOCK` after a delete, `wrong ...` and `raised ...` for
what must not be.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvstore.api import OutcomeRun
from kvstore.client import Client, ClientLimits, OpenNamespace, Transport
from kvstore.errors import DeadlineExceeded, Overloaded, ShuttingDown, TierUnavailable
from kvstore.types import HASH_BYTES, AckTier, MissReason, PutOutcome
from tests.torture.workload import (
    BLOCK_BYTES,
    BLOCKS,
    KEPT,
    LOOSE,
    PURGED,
    SHARED_BLOCKS,
    WINDOW,
    blocks_of,
    prompt_keys,
    wrong_blocks,
)

LIMITS = ClientLimits(
    breaker_seconds=0.1, breaker_seconds_max=0.2, reconnect_seconds_max=0.2, worker_threads=2
)
THREADS = 2
ABSENT = (TierUnavailable, ShuttingDown, DeadlineExceeded, Overloaded)
CLASSES = ("agent", "batch", "handoff", "swa")
PROMPTS_PER_SECOND = 8.0


class Journal:
    """What the supervisor hears of this process; the counts are rewritten now and then."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._lines = os.open(path, flags, 0o600)
        self._counts_path = path.with_suffix(".json")
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._due = 0.0

    def line(self, text: str) -> None:
        """Append a line."""
        os.write(self._lines, (text + "\n").encode())

    def add(self, counts: Counter[str]) -> None:
        """Add to the counts, and save them if they have not been for a while."""
        with self._lock:
            self._counts += counts
            if time.monotonic() >= self._due:
                self._save()

    def save(self) -> None:
        """Save the counts now."""
        with self._lock:
            self._save()

    def _save(self) -> None:
        self._due = time.monotonic() + 0.1
        draft = self._counts_path.with_suffix(".tmp")
        draft.write_text(json.dumps(self._counts))
        draft.replace(self._counts_path)


class Thread(threading.Thread):
    """One thread's random verbs."""

    def __init__(self, client: Client, journal: Journal, *, seed: int, started: float) -> None:
        super().__init__()
        self._kept, self._loose = client.open(KEPT), client.open(LOOSE)
        self._purged, self._purges = client.open(PURGED), itertools.count(seed * 1_000_000)
        self._journal = journal
        self._dice = random.Random(seed)
        self._began = started
        self._counts: Counter[str] = Counter()
        self._into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self.over = threading.Event()

    def run(self) -> None:
        """Do random things until told to end."""
        verbs = [
            self._put,
            self._get,
            self._match,
            self._ticket,
            self._reserve,
            self._loosely,
            self._prefetch,
            self._purge,
        ]
        while not self.over.is_set():
            verb = self._dice.choices(verbs, [35, 35, 8, 6, 4, 8, 4, 6])[0]
            try:
                verb()
            except Exception as error:
                self._journal.line(f"raised {verb.__name__} {error!r}"[:300])
            self._counts["operations"] += 1
            self._journal.add(self._counts)
            self._counts = Counter()

    def _prompt(self, namespace: OpenNamespace) -> tuple[int, bytes]:
        first = int((time.time() - self._began) * PROMPTS_PER_SECOND)
        number = first + self._dice.randrange(WINDOW)
        if self._dice.random() < 0.2:
            number = self._dice.randrange(first + WINDOW)
        return number, prompt_keys(namespace, number)[: HASH_BYTES * self._dice.randint(1, BLOCKS)]

    def _put(self) -> None:
        number, keys = self._prompt(self._kept)
        ack = self._dice.choice([AckTier.HOST, AckTier.SSD, AckTier.SSD])
        put = self._kept.put(self._kept.root, keys, blocks_of(keys), ack=ack, deadline_seconds=1.0)
        durable = durable_blocks(put.outcomes)
        if durable:
            self._journal.line(f"acked {number} {durable}")
        self._counts["stored"] += put.stored
        self._miss("put", put.reason)

    def _get(self) -> None:
        _, keys = self._prompt(self._kept)
        got = self._kept.get(keys, self._into, deadline_seconds=1.0)
        self._check("get", keys, got.blocks)
        self._miss("get", got.reason)

    def _ticket(self) -> None:
        _, keys = self._prompt(self._kept)
        got = self._kept.submit_get(keys, self._into, deadline_seconds=1.0).result()
        self._check("ticket", keys, got.blocks)
        self._miss("get", got.reason)

    def _match(self) -> None:
        _, keys = self._prompt(self._kept)
        match = self._kept.match(keys, owner=f"{self._dice.randrange(20)}", lease_seconds=1.0)
        self._miss("match", match.reason)
        fate = self._dice.random()
        if fate < 0.3:
            got = self._kept.fetch(match, self._into[: match.blocks], deadline_seconds=0.5)
            self._check("fetch", keys, got.blocks)
        if fate < 0.7:  # the rest is forgotten: the lease's end gives it back
            self._kept.release(match, used=0)

    def _reserve(self) -> None:
        if self._kept.client.transport is not Transport.MAPPED:
            return
        _, keys = self._prompt(self._kept)
        reservation = self._kept.reserve(self._kept.root, keys)
        try:
            self._kept.fill(reservation, blocks_of(keys), deadline_seconds=0.5)
        except ABSENT:
            self._counts["fill not possible"] += 1
        self._kept.abort(reservation)

    def _loosely(self) -> None:
        _, keys = self._prompt(self._loose)
        action = self._dice.random()
        if action < 0.5:
            name = self._dice.choice(CLASSES)
            put = self._loose.put(
                self._loose.root, keys, blocks_of(keys), retention_class=name, deadline_seconds=1.0
            )
            self._miss("put", put.reason)
        elif action < 0.8:
            got = self._loose.get(keys, self._into, deadline_seconds=1.0)
            self._check("loose get", keys, got.blocks)
            self._miss("get", got.reason)
        else:
            try:
                self._loose.delete(keys[-HASH_BYTES:], deadline_seconds=1.0)
            except ABSENT:
                self._counts["delete not possible"] += 1

    def _purge(self) -> None:
        """Store a prompt that nobody else stores, and delete it from some block on, perhaps while it is being
        written.
        """
        number = next(self._purges)
        keys, first = prompt_keys(self._purged, number), self._dice.randrange(SHARED_BLOCKS, BLOCKS)
        ack = self._dice.choice([AckTier.HOST, AckTier.SSD])
        put = self._purged.put(self._purged.root, keys, blocks_of(keys), ack=ack, deadline_seconds=1.0)
        self._miss("put", put.reason)
        if put.reason is not None:
            return  # who knows what of it still comes
        try:
            self._purged.delete(keys[HASH_BYTES * first :][:HASH_BYTES], deadline_seconds=5.0)
        except ABSENT:
            self._counts["purge not answered"] += 1
        else:
            self._journal.line(f"purged {number} {first}")

    def _prefetch(self) -> None:
        _, keys = self._prompt(self._kept)
        self._kept.touch(keys)
        answer = self._kept.prefetch(keys, deadline_seconds=1.0)
        if answer.prefetch and self._dice.random() < 0.5:
            self._kept.cancel(answer)

    def _check(self, verb: str, keys: bytes, blocks: int) -> None:
        self._counts["hit blocks"] += blocks
        self._counts["hits"] += bool(blocks)
        wrong = wrong_blocks(keys, self._into, blocks)
        if wrong:
            self._journal.line(f"wrong {verb}: {wrong} of {blocks} blocks of {keys[:8].hex()}")

    def _miss(self, verb: str, reason: MissReason | None) -> None:
        if reason is not None:
            self._counts[f"miss {reason}"] += 1
            self._counts[f"{verb} not whole"] += 1
        if reason in (MissReason.DAEMON_GONE, MissReason.BREAKER_OPEN):
            time.sleep(0.01)  # an engine would compute now


def durable_blocks(outcomes: tuple[OutcomeRun, ...]) -> int:
    """Return how deep a put from the root was acknowledged on SSD; what it found there is promised with it.

    Behind a block that another put is bringing, or that found no room, nothing is promised: without its
    parent a block is kept but not seen.
    """
    position = durable = 0
    for run in outcomes:
        if run.outcome not in (PutOutcome.STORED_SSD, PutOutcome.DUPLICATE):
            break
        position += run.count
        if run.outcome is PutOutcome.STORED_SSD:
            durable = position
    return durable


def main(address: str, journal_path: str, seed: str, started: str) -> None:
    """Run the threads until standard input ends."""
    logging.disable(logging.WARNING)  # that the daemon comes and goes is no news here
    journal = Journal(Path(journal_path))
    transport = [Transport.MAPPED, Transport.MAPPED, Transport.FRAMED][int(seed) % 3]
    with Client(address, transport=transport, limits=LIMITS) as client:
        threads = [
            Thread(client, journal, seed=10 * int(seed) + index, started=float(started))
            for index in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        for thread in threads:
            thread.over.set()
        for thread in threads:
            thread.join()
    journal.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
