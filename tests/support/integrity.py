"""Checks that the core's structures agree with one another; run after every step of a property test."""

from __future__ import annotations

from collections import Counter

from kvstore.core.catalog import NamespaceState
from kvstore.core.frames import Frame, Node
from kvstore.core.ladder import Ladder
from kvstore.tiers.base import FrameShape
from kvstore.types import PAGE_BYTES, split_keys


def check_integrity(ladder: Ladder) -> None:
    """Assert every structural invariant: trees, tails, back references, slots owned exactly once,
    accounting.
    """
    catalog = ladder._catalog
    frames: dict[int, Frame] = {}
    for state in catalog.namespaces.values():
        _check_tree(state)
        for node in state.nodes():
            _check_node(node)
            frames.update({id(p.frame): p.frame for p in node.slices})
    _check_slots(ladder, frames)
    _check_segments(ladder, frames)
    _check_quotas(ladder)
    _check_sleepers(ladder)


def _check_tree(state: NamespaceState) -> None:
    runs = state.runs
    reachable: list[Node] = []
    stack = list(runs.root.children.values())
    for waiting in runs.orphans.values():
        assert waiting, "empty orphan bucket"
        stack.extend(waiting.values())
    while stack:
        node = stack.pop()
        reachable.append(node)
        for head, child in node.children.items():
            assert child.head == head and child.parent is node and child.parent_hash == node.tail
            stack.append(child)
    known = list(runs.nodes())
    assert {id(n) for n in reachable} == {id(n) for n in known}
    assert len(reachable) == len(known)
    for tail, node in runs.tails.items():
        assert node.tail == tail and node in known
    loose = {node for frame, _ in state.loose._entries.values() for node in frame.nodes}
    assert set(state.loose.nodes()) == loose
    for roll in (runs.roll, state.loose.roll):
        assert len(roll) == len(list(roll)) == sum(len(nodes) for nodes in roll.stretches())
    for node in known:
        assert all(node in runs.roll.holding(key) for key in split_keys(node.keys))


def _check_node(node: Node) -> None:
    assert node.count == sum(p.count for p in node.slices) > 0
    for piece in node.slices:
        assert piece.start >= 0 and piece.start + piece.count <= piece.frame.count
        assert node in piece.frame.nodes and not piece.frame.dead
        if piece.frame.location is None:
            assert piece.frame.resident(piece.start, piece.count).all(), (
                "a block that lies nowhere is in the index"
            )


def _check_slots(ladder: Ladder, frames: dict[int, Frame]) -> None:
    catalog = ladder._catalog
    for frame in catalog.zombies:
        frames.setdefault(id(frame), frame)
    owned: Counter[int] = Counter()
    pages = 0
    for frame in frames.values():
        for part in frame.host or ():
            slots = part.slots[part.slots != 0].tolist()
            owned.update(slots)
            pages += len(slots) * part.part.stride_pages
        for load in set(frame.loads.values()):
            if load.submitted:
                for part_slots, part_ in zip(load.slots, frame.parts, strict=True):
                    owned.update(part_slots.tolist())
                    pages += len(part_slots) * part_.stride_pages
    for condemned_frame, pieces in catalog._condemned.items():
        strides = [part.stride_pages for part in condemned_frame.parts]
        for index, piece in enumerate(pieces):
            owned.update(piece.tolist())
            pages += len(piece) * strides[index % len(strides)]
    putting = ladder._putting
    open_puts = [*putting._puts.values(), *(r.put for r in putting._reservations.values())]
    for put in {id(p): p for p in open_puts}.values():
        for put_part in put.parts.values():
            slots = put_part.data.slots[put_part.data.slots != 0].tolist()
            owned.update(slots)
            pages += len(slots) * put_part.data.part.stride_pages
    assert not [slot for slot, count in owned.items() if count > 1], "a slot has two owners"
    for move, slots in ladder._moves.slots:
        for part_slots, part_ in zip(slots, move.frame.parts, strict=True):
            owned.update(part_slots.tolist())
            pages += len(part_slots) * part_.stride_pages
    if not ladder._putting._quarantine:
        assert pages == catalog.slabs.used_pages, (
            f"{pages} pages are owned, {catalog.slabs.used_pages} counted"
        )
    assert catalog.slabs.used_pages * PAGE_BYTES == ladder.gauges()["kvstore_host_used_bytes"]


def _check_segments(ladder: Ladder, frames: dict[int, Frame]) -> None:
    table = ladder._catalog.segments
    # What was moved keeps its old place until that segment goes.
    listed = {id(frame) for segment in table for frame in segment.frames if frame.nodes}
    placed = {i for i, frame in frames.items() if frame.location is not None and frame.nodes}
    assert listed == placed
    assert table.used_bytes == sum(segment.bytes for segment in table)


def _check_sleepers(ladder: Ladder) -> None:
    """Every frame asleep is found by its first and last key, lies where no frame awake does, and its blocks
    are held by slices without gaps.
    """
    sleepers = ladder._catalog.sleepers
    count, held = 0, Counter[tuple[FrameShape, str]]()
    for segment in ladder._catalog.segments:
        awake = {frame.location for frame in segment.frames}
        for sleeper in sleepers.of_segment(segment.number):
            count += 1
            row, space = segment.bed.rows[sleeper.row], sleepers.shape(sleeper).namespace
            assert sleepers.location(sleeper) not in awake
            assert sleeper in sleepers.beginning_with(space, int(row["head"]).to_bytes(8, "little"))
            assert sleeper in sleepers.ending_with(space, int(row["tail"]).to_bytes(8, "little"))
            end = 0
            for touch in sleepers.held(sleeper):
                assert touch.first == end
                end += touch.count
                held[sleepers.shape(sleeper), touch.retention_class] += touch.count
            assert end == sleepers.blocks(sleeper)
    assert count == sleepers.count
    names = sleepers.names
    counted = {(names.shapes[s], names.classes[c]): n for (s, c), n in sleepers.blocks_held.items() if n}
    assert counted == held


def _check_quotas(ladder: Ladder) -> None:
    catalog = ladder._catalog
    assert sum(catalog.quotas.host_pages.values()) == catalog.slabs.used_pages
    assert all(pages >= 0 for pages in catalog.quotas.host_pages.values())
    classes: Counter[str] = Counter()
    for segment in catalog.segments:
        for frame in segment.frames:
            assert frame.location is not None
            classes[frame.retention_class] += frame.location.length_bytes
        for sleeper in catalog.sleepers.of_segment(segment.number):
            location = catalog.sleepers.location(sleeper)
            classes[catalog.sleepers.shape(sleeper).retention_class] += location.length_bytes
    assert classes == +Counter(catalog.segments.class_bytes)
