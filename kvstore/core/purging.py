"""Purge: what an administrator removes for good, a batch of runs at a time, and how far it is gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.core.beds import Rows
from kvstore.core.catalog import Catalog, NamespaceState
from kvstore.core.farewells import dismiss_and_bury
from kvstore.core.frames import Frame, Node
from kvstore.core.removal import Removal
from kvstore.core.sleepers import Sleeper
from kvstore.core.sweep import Amount, node_bytes
from kvstore.types import Fingerprint, MissReason, key_at, split_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to purge: exactly one of a namespace, a tenant, a class, or a block with all that follows it (in a
    flat namespace the given blocks).
    """

    namespace: Fingerprint | None = None
    keys: bytes = b""
    tenant: str | None = None
    retention_class: str = ""

    def spaces(self, catalog: Catalog) -> list[NamespaceState]:
        """Return the namespaces in which something may be.

        Errors: UnknownNamespace.
        """
        if self.namespace is not None:
            return [catalog.state(self.namespace)]
        states = catalog.namespaces.values()
        return [s for s in states if self.tenant is None or s.namespace.tenant == self.tenant]

    def holds(self, catalog: Catalog, retention_class: str) -> bool:
        """Say whether what a class of those namespaces holds is meant."""
        name = self.retention_class
        return not name or catalog.retention.held_by(retention_class).name == name


@dataclass(slots=True)
class Purge:
    """One purge. Its blocks are invisible since `unreachable_since`; bytes follow when leases end and writes
    come back, and the last of them were gone at `gone_at`. `also_blocks` shared a frame on SSD with what was
    meant, were nowhere else, and left with it.

    Units: wall seconds; bytes of blocks in `amount`, of frames on SSD in `ssd_bytes`.
    """

    amount: Amount = field(default_factory=Amount)
    also_blocks: int = 0
    ssd_bytes: int = 0
    unreachable_since: float | None = None
    gone_at: float | None = None
    leased_bytes: int = 0
    writing_bytes: int = 0
    frames: dict[Frame, None] = field(default_factory=dict)
    waiting: set[Fingerprint] = field(default_factory=set)
    """Namespaces of which the disk has not confirmed every deletion."""
    refused: set[Fingerprint] = field(default_factory=set)
    """Those of them that the disk has to be asked again for."""

    @property
    def is_durable(self) -> bool:
        """Say whether no restart can bring anything back."""
        return self.unreachable_since is not None and not self.waiting

    def heard(self, space: Fingerprint, durable: bool) -> None:
        """The disk has confirmed what was deleted of a namespace, or refuses, or hangs."""
        if durable:
            self.waiting.discard(space)
        else:
            self.refused.add(space)

    def note(self, node: Node, at: int = 0) -> None:
        """Count blocks of a run from `at` on before they leave, and remember what may hold them."""
        self.amount.runs += 1
        self.amount.blocks += node.count - at
        last = node.slices[-1].frame
        self.amount.bytes += (node.count - at) * last.block_stride_bytes if at else node_bytes(node)
        for piece in node.slices:
            if piece.frame.holds or piece.frame.queued:
                self.frames[piece.frame] = None

    def look(self, catalog: Catalog, is_writing: Callable[[Frame], bool]) -> None:
        """Count what is still held by leases or being written; frames that are neither are over."""
        self.leased_bytes = self.writing_bytes = 0
        for frame in list(self.frames):
            stride = frame.block_stride_bytes
            writing = frame.count * stride if frame.dead and is_writing(frame) else 0
            held = sum(count for _, count in catalog.zombies.get(frame, ()))
            leased = 0 if writing else held * stride
            self.writing_bytes += writing
            self.leased_bytes += leased
            if not (writing or leased):
                del self.frames[frame]


class Foresight:
    """Visits runs and counts those that are meant."""

    def __init__(self, catalog: Catalog, target: Target, states: Iterable[NamespaceState]) -> None:
        self.amount = Amount()
        self._catalog = catalog
        self._target = target
        self._spaces = {state.fingerprint for state in states}

    def visit(self, node: Node) -> None:
        """Count a run if it is meant."""
        is_here = node.slices[0].frame.fingerprint in self._spaces
        if is_here and self._target.holds(self._catalog, node.retention_class):
            self.amount.add(node)

    def visit_asleep(self, slices: Rows) -> None:
        """Count what is meant of what sleeps."""
        names = self._catalog.sleepers.names
        holds = [self._target.holds(self._catalog, name) for name in names.classes]
        is_meant = np.array(holds, np.bool_)[slices["name"]] & np.isin(
            slices["shape"], names.codes(self._spaces)
        )
        self.amount.add_asleep(slices[is_meant], names)


def remove_runs(catalog: Catalog, nodes: Sequence[Node], purge: Purge) -> list[Node]:
    """Remove whole runs, not what follows them; returns the runs that have to be written again."""
    kept: list[Node] = []
    by_space: defaultdict[Fingerprint, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.count:
            by_space[node.slices[0].frame.fingerprint].append(node)
    for space, mine in by_space.items():
        before = purge.amount.blocks
        for node in mine:
            purge.note(node)
        count, again = Removal(catalog, catalog.namespaces[space]).run_nodes(mine)
        purge.also_blocks += count - (purge.amount.blocks - before)
        kept += again
    return kept


def remove_asleep(catalog: Catalog, sleepers: Iterable[Sleeper], target: Target, purge: Purge) -> None:
    """Remove frames asleep that hold a run that is meant, as a whole: what they hold is nowhere else."""
    for sleeper in sleepers:
        space = catalog.sleepers.shape(sleeper).namespace
        shadows = list(catalog.sleepers.stand_ins([sleeper]))
        meant = [shadow for shadow in shadows if target.holds(catalog, shadow.retention_class)]
        for shadow in meant:
            purge.note(shadow)
        if meant:
            purge.waiting.add(space)
            purge.also_blocks += sum(shadow.count for shadow in shadows) - sum(
                shadow.count for shadow in meant
            )
            dismiss_and_bury(catalog, [sleeper], MissReason.DELETED)


def remove_unread(catalog: Catalog, state: NamespaceState, target: Target, purge: Purge) -> None:
    """Have the frames of a namespace deleted that are meant and that this start could not read."""
    space = state.fingerprint
    if places := catalog.unread.take_class(space, lambda name: target.holds(catalog, name)):
        catalog.graves.bury_all(dict.fromkeys(places, space))
        purge.waiting.add(space)


def remove_blocks(catalog: Catalog, state: NamespaceState, keys: bytes | None, purge: Purge) -> list[Node]:
    """Remove the last given block and all that follows it, in a flat namespace all given blocks, with None
    all that is left; returns the runs that have to be written again.
    """
    before = purge.amount.blocks
    for node, at in [(node, 0) for node in state.nodes()] if keys is None else below(state, keys):
        purge.note(node, at)
    meant = keys if keys is None or state.flat else key_at(keys, -1)
    count, kept = Removal(catalog, state).run(meant)
    purge.also_blocks += max(0, count - (purge.amount.blocks - before))
    return kept


def below(state: NamespaceState, keys: bytes) -> list[tuple[Node, int]]:
    """Return the runs of the last given block and of all that follows it, each with its first block that is
    meant; in a flat namespace the given blocks, one by one.
    """
    if state.flat:
        entries = [state.loose.get(name) for name in split_keys(keys)]
        return [(entry[0].nodes[0], entry[1]) for entry in entries if entry is not None]
    last = key_at(keys, -1)
    node = state.runs.find(last)
    if node is not None and node.count:
        found = [(node, node.count - 1)]
        waiting = [*node.children.values(), *state.runs.waiting_under(last)]
    else:
        found, waiting = [], state.runs.waiting_under(last)
    while waiting:
        item = waiting.pop()
        found.append((item, 0))
        waiting += item.children.values()
        if state.runs.orphans:
            waiting += state.runs.waiting_under(item.keys)
    return found
