"""Administration: what administrators change on a running ladder, and the counts to decide it by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from kvstore.api import RunInfo
from kvstore.core.asked import Asked
from kvstore.core.catalog import NamespaceState
from kvstore.core.frames import Node
from kvstore.core.hitrate import Cell, Key, summed
from kvstore.core.ledger import Departed, LedgerImage
from kvstore.core.oversight import Oversight
from kvstore.core.purging import (
    Foresight,
    Purge,
    Target,
    below,
    remove_asleep,
    remove_blocks,
    remove_runs,
    remove_unread,
)
from kvstore.core.removal import Removal
from kvstore.core.sweep import Amount, Comparison, Effect, Forecast, Pause, no_pause, stretches, sweep
from kvstore.retention import ClassTable, RetentionClass
from kvstore.types import Fingerprint, MissReason, Tier, key_at

OnDeleted = Callable[[int, bool], None]
PRESENT_MAX = 16
IMAGE_ENTRIES = 1 << 14
NODES_AT_ONCE, SLEEPERS_AT_ONCE = 16, 16
"""As many are removed in about half a millisecond."""


class Administration(Oversight):
    """The class table in force and what follows from another one.

    Threads: any; walks hold the lock for a batch of runs at a time and call `pause` between batches.
    """

    def class_table(self) -> ClassTable:
        """Return the class table in force."""
        with self._lock:
            return self._retention.table

    def wall(self) -> float:
        """Return the steady wall time that lives are judged by."""
        with self._lock:
            return self._retention.now()

    def adopt(self, table: ClassTable) -> None:
        """Let another class table be in force. What it hides stays for UNDO_SECONDS unless room is needed."""
        with self._decision():
            self._retention.adopt(table)

    def effect(self, table: ClassTable, *, pause: Pause = no_pause) -> Effect:
        """Count what a class table would hide and show now; changes nothing."""
        with self._lock:
            names, now = self._catalog.sleepers.names, self._retention.now()
            comparison = Comparison(self._retention.table, table, names=names, now=now)
        sweep(self._lock, self._catalog, comparison, pause=pause)
        return comparison.effect

    def over_quota(self, wanted: RetentionClass) -> dict[Tier, int]:
        """Return by how many bytes a class is above what a quota would allow, by tier: those would leave."""
        with self._lock:
            held = self._catalog.quotas.held_bytes(wanted.name)
        quota = wanted.quota_bytes
        return {tier: max(0, size - quota) if quota else 0 for tier, size in held.items()}

    def forecast(self, *, hours: int, pause: Pause = no_pause) -> Forecast:
        """Count what expires in each of the next hours if nothing is touched again."""
        with self._lock:
            forecast = Forecast(self._catalog, now=self._retention.now(), hours=hours)
        sweep(self._lock, self._catalog, forecast, pause=pause)
        return forecast

    # The recent past

    def hit_rates(self, seconds: float) -> dict[Key, Cell]:
        """Return what was asked for and delivered in the last so many seconds, by namespace and class."""
        with self._lock:
            stretches = self._asked.rates.within(seconds, monotonic=self._clock.monotonic())
        return summed(stretches)

    def request(self, owner: str) -> Asked | None:
        """Return what came of the latest match of an owner, None when it is not remembered."""
        with self._lock:
            found = self._asked.request(owner)
            return None if found is None else replace(found)

    def present(
        self, hash_prefix: bytes, *, pause: Pause = no_pause
    ) -> list[tuple[Fingerprint, bytes, RunInfo]]:
        """Return the runs that hold a block whose hash starts so, each with its namespace and that hash."""
        with self._lock:
            states = list(self._catalog.namespaces.values())
        return self._present(states, hash_prefix, limit=PRESENT_MAX, pause=pause)

    def departed(self, key: bytes) -> list[tuple[Fingerprint, MissReason, Departed | None]]:
        """Return per namespace why a block is not there; the first 8 bytes of its hash are enough."""
        with self._lock:
            ledger = self._catalog.ledger
            return [
                (space, ledger.reason(key, space=space), ledger.look(key, space=space))
                for space in self._catalog.namespaces
            ]

    # The ledger across restarts

    @property
    def departures(self) -> int:
        """How often something has left: whether the ledger is worth writing again."""
        return self._catalog.ledger.notes

    def ledger_image(self) -> LedgerImage:
        """Return the ledger as it is to be kept, copied a stretch at a time."""
        ledger = self._catalog.ledger
        parts = []
        for start in range(0, len(ledger), IMAGE_ENTRIES):
            with self._lock:
                parts.append(ledger.image(start, IMAGE_ENTRIES))
        with self._lock:
            return ledger.whole(parts)

    def restore_ledger(self, image: LedgerImage) -> bool:
        """Take over a ledger that was kept; says whether it fits. Before the first verb only."""
        with self._lock:
            return self._catalog.ledger.restore(image)

    def forget_unknown(self) -> None:
        """Blocks that the ledger does not know are `forgotten` from now on: it may lack some that left."""
        with self._lock:
            self._catalog.ledger.forget_all()

    def has_unwritten(self) -> bool:
        """Say whether blocks lie in host memory alone: an end would lose them."""
        with self._lock:
            states = list(self._catalog.namespaces.values())
        for nodes in stretches(self._lock, states):
            with self._lock:
                if any(piece.frame.location is None for node in nodes for piece in node.slices if node.count):
                    return True
        return False

    # Removal

    def delete(
        self,
        namespace: Fingerprint,
        keys: bytes | None,
        on_durable: OnDeleted | None = None,
        *,
        pause: Pause = no_pause,
    ) -> int:
        """Remove the first of the given blocks of a chain and all that follows it, in a flat namespace the
        given ones, with None everything; side parts and old copies on SSD too. Returns how many blocks left.

        They are gone at the return. `on_durable` hears their number, and whether no restart can bring any
        of them back; False when the disk refuses or hangs: it is asked again, and a repeated delete waits for
        that. `pause` as in a sweep.
        """
        count = 0
        if keys is not None:
            self._check_keys(keys)
            self._wake_below(namespace, keys, key_at(keys, 0))
        else:
            count += self._delete_most(namespace, pause)
        with self._decision():
            state = self._catalog.state(namespace)
            left, kept = Removal(self._catalog, state).run(keys)
            count += left
            for node in kept:
                self._writeback.enqueue(node)
            if on_durable is not None:
                self._catalog.graves.wait(
                    namespace,
                    {*self._writeback.leaving(namespace), *self._moves.leaving(namespace)},
                    deadline=self._clock.monotonic() + self._limits.write_seconds_max,
                    done=partial(on_durable, count),
                )
        self._writes.run()
        return count

    def _delete_most(self, namespace: Fingerprint, pause: Pause) -> int:
        """Remove what a namespace has, a little at a time; what comes meanwhile may stay."""
        with self._lock:
            states = [self._catalog.state(namespace)]
        target, purge = Target(namespace=namespace), Purge()
        self._purge_awake(target, states, purge, pause)
        self._purge_asleep(target, states, purge, pause)
        return purge.amount.blocks + purge.also_blocks

    # Purge

    def foresee_purge(self, target: Target, *, pause: Pause = no_pause) -> Amount:
        """Count what a purge would remove now.

        Errors: UnknownNamespace.
        """
        if target.keys and target.namespace is not None:
            self._wake_below(target.namespace, target.keys, key_at(target.keys, -1))
        with self._lock:
            states = target.spaces(self._catalog)
            if target.keys:
                found = Purge()
                for node, at in below(states[0], target.keys):
                    found.note(node, at)
                return found.amount
            foresight = Foresight(self._catalog, target, states)
        sweep(self._lock, self._catalog, foresight, pause=pause)
        return foresight.amount

    def purge(self, target: Target, *, pause: Pause = no_pause) -> Purge:
        """Remove for good; what was meant is invisible at the return, `look_after` tells how far it is gone.

        What is committed afterwards is a new write, also where its reservation is older.
        Errors: UnknownNamespace.
        """
        purge = Purge()
        if target.keys and target.namespace is not None:
            self._wake_below(target.namespace, target.keys, key_at(target.keys, -1))
        with self._lock:
            states = target.spaces(self._catalog)
        if not target.keys:
            self._purge_awake(target, states, purge, pause)
            self._purge_asleep(target, states, purge, pause)
            self._purge_awake(target, states, purge, pause)  # what woke meanwhile
        with self._removing(purge):
            for state in states:
                if target.retention_class:
                    remove_unread(self._catalog, state, target, purge)
                    continue
                purge.waiting.add(state.fingerprint)
                self._write_again(remove_blocks(self._catalog, state, target.keys or None, purge))
            purge.refused.update(purge.waiting)
        self._writes.run()
        purge.unreachable_since = self.wall()
        self.look_after(purge)
        return purge

    def _purge_awake(
        self, target: Target, states: Sequence[NamespaceState], purge: Purge, pause: Pause
    ) -> None:
        for nodes in stretches(self._lock, states):
            if target.retention_class:
                self._wake_copies(nodes)
            for start in range(0, len(nodes), NODES_AT_ONCE):
                with self._removing(purge):
                    batch = [n for n in nodes[start : start + NODES_AT_ONCE] if n.count]
                    meant = [node for node in batch if target.holds(self._catalog, node.retention_class)]
                    purge.waiting.update(node.slices[0].frame.fingerprint for node in meant)
                    kept = remove_runs(self._catalog, meant, purge)
                    if target.retention_class:
                        self._write_again(kept)
                pause()

    def _wake_copies(self, nodes: Sequence[Node]) -> None:
        """Wake what sleeps of the blocks of some runs: an older copy, of another class, must not outlive
        them.
        """
        sleepers, names = self._catalog.sleepers, defaultdict[Fingerprint, list[bytes]](list)
        with self._lock:
            for node in nodes if sleepers.count else ():
                if node.count and not node.loose:
                    names[node.slices[0].frame.fingerprint].append(node.keys)
        for space, keys in names.items():
            self._wake(self._search.holding(space, b"".join(keys)))

    def _purge_asleep(
        self, target: Target, states: Sequence[NamespaceState], purge: Purge, pause: Pause
    ) -> None:
        is_here = self._catalog.sleepers.is_here
        for asleep in self._search.asleep([state.fingerprint for state in states]):
            for start in range(0, len(asleep), SLEEPERS_AT_ONCE):
                with self._removing(purge):
                    there = filter(is_here, asleep[start : start + SLEEPERS_AT_ONCE])
                    remove_asleep(self._catalog, there, target, purge)
                pause()

    def _wake_below(self, namespace: Fingerprint, keys: bytes, key: bytes) -> None:
        """Wake what holds a block, and all frames that follow it; `keys` may lead to it."""
        with self._lock:
            state = self._catalog.state(namespace)
            if state.flat or self._catalog.sleepers.is_empty(namespace):
                return
        self._when_awake(lambda: self._inspect(namespace, keys, 1))
        while True:
            with self._lock:
                names = b"".join([key, *(node.keys for node, _ in below(state, key))])
            asleep = self._catalog.sleepers.wanted(self._search.below(namespace, names))
            if not asleep:
                return
            self._wake(asleep)

    def _write_again(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._writeback.enqueue(node)

    @contextmanager
    def _removing(self, purge: Purge) -> Iterator[None]:
        """Decide, and count what of the SSD that takes."""
        with self._decision():
            before = len(self._plan.delete)
            yield
            purge.ssd_bytes += sum(location.length_bytes for location in self._plan.delete[before:])

    def look_after(self, purge: Purge) -> None:
        """Bring up to date how far a purge is: what leases hold, what is being written, what is gone."""
        with self._decision():
            purge.look(self._catalog, self._writeback.is_writing)
            asked, purge.refused = purge.refused, set()
            for space in asked:
                self._catalog.graves.wait(
                    space,
                    {*self._writeback.leaving(space), *self._moves.leaving(space)},
                    deadline=self._clock.monotonic() + self._limits.write_seconds_max,
                    done=partial(purge.heard, space),
                )
        if purge.gone_at is None and purge.is_durable and not (purge.leased_bytes or purge.writing_bytes):
            purge.gone_at = self.wall()
