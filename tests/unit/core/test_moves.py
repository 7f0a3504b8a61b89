"""Room on SSD: what lives moves only when it is little or room is short, and is found all the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.limits import Limits
from kvstore.core.reclaim import LIVING_SHARE
from kvstore.namespace import Namespace
from kvstore.types import HASH_BYTES, PAGE_BYTES, Addressing, MissReason, ReleaseOutcome
from tests.support.driver import check_extents, namespace, put
from tests.support.integrity import check_integrity
from tests.unit.core.rig import Rig

HOUR = 3600.0


def settled(rig: Rig, seconds: float = 1.5, *, times: int = 6) -> None:
    """Let the housekeeping come round."""
    for _ in range(times):
        rig.tick(seconds)


def stored(rig: Rig, runs: int, blocks: int = 2, *, by: str = "batch", **fields: object) -> list[bytes]:
    """Put runs of their own; the dict tier begins a segment every few of them."""
    chains = [rig.keys(blocks, salt=salt) for salt in range(runs)]
    for keys in chains:
        put(rig.ladder, rig.space, rig.root, keys, retention_class=by, **fields)  # type: ignore[arg-type]
    return chains


def use(rig: Rig, keys: bytes, *, by: str = "") -> None:
    answer = rig.match(keys, retention_class=by)
    assert answer.blocks == len(keys) // HASH_BYTES
    rig.ladder.release(answer.lease, used=answer.blocks)


def read_all(rig: Rig, keys: bytes) -> None:
    answer = rig.match(keys)
    progress, _ = rig.fetch(answer.lease)
    assert (progress.blocks, progress.reason) == (len(keys) // HASH_BYTES, None)
    parts = len(rig.space.layout.required_parts)
    assert check_extents(rig.ladder, rig.space, keys, progress.extents) >= answer.blocks * parts
    rig.ladder.release(answer.lease, used=answer.blocks, outcome=ReleaseOutcome.USED)


def restarted(rig: Rig) -> Rig:
    rig.ladder.close(deadline_seconds=0.0)
    again = Rig(disk=rig.disk, space=rig.space, clock=rig.clock, limits=rig.ladder._limits)
    check_integrity(again.ladder)
    return again


def copied(rig: Rig, reason: str = "time") -> float:
    return rig.events.total("kvstore_ssd_copied_bytes_total", reason=reason)


class OneSegment(Rig):
    """All frames of a bucket in one segment, as many as they are."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        self.tier._per_segment = 1 << 20
        self.disk.next_offset += 1 << 20  # a segment of its own


def seal(rig: Rig) -> None:
    """Let what comes next begin another segment."""
    rig.disk.next_offset = (rig.disk.next_offset // (1 << 20) + 1) << 20


def mostly_dead(
    spaces: Namespace | None = None, *, living: int = 1, **fields: object
) -> tuple[Rig, list[bytes]]:
    """A segment of 20 runs of which some were touched on, the others have ended."""
    rig: Rig = OneSegment(space=spaces, pages=2048, **fields)
    chains = stored(rig, 20, with_side=bool(spaces and spaces.layout.side_parts))
    seal(rig)
    rig.clock.advance(0.9 * HOUR)
    put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=99), retention_class="chat")
    for keys in chains[:living]:
        use(rig, keys)
    rig.clock.advance(0.2 * HOUR)
    return rig, chains


@pytest.mark.parametrize(
    "space",
    [namespace(), namespace(parts=2), namespace(addressing=Addressing.FLAT), namespace(side="checkpoint")],
    ids=["chain", "two parts", "flat", "side"],
)
def test_the_little_that_lives_moves_and_its_segment_goes(space: Namespace) -> None:
    rig, chains = mostly_dead(space)
    segments = {place[0] for place, f in rig.disk.frames.items() if f.header.keys == chains[0]}
    settled(rig)
    assert copied(rig) > 0
    assert not segments & {place[0] for place in rig.disk.frames}, "the old segment is gone"
    for _ in range(2):
        read_all(rig, chains[0])
        rig = restarted(rig)
    assert rig.match(chains[1]).blocks == 0


def test_time_alone_copies_nothing() -> None:
    rig, chains = mostly_dead(living=int(20 * LIVING_SHARE) + 1)
    frames = len(rig.disk.frames)
    settled(rig, times=8)
    assert copied(rig) == 0
    assert len(rig.disk.frames) == frames
    read_all(rig, chains[0])


def test_a_head_moves_without_the_tail_that_ended() -> None:
    rig: Rig = OneSegment(pages=2048)
    keys = rig.keys(40)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    seal(rig)
    rig.clock.advance(0.9 * HOUR)
    put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=99), retention_class="chat")
    use(rig, keys[: 3 * HASH_BYTES])
    rig.clock.advance(0.2 * HOUR)
    settled(rig)
    (frame,) = [f for f in rig.disk.frames.values() if f.header.retention_class == "batch"]
    assert frame.header.keys == keys[: 3 * HASH_BYTES]
    assert rig.length(keys) == 3
    rig = restarted(rig)
    read_all(rig, keys[: 3 * HASH_BYTES])


def test_a_copy_keeps_time_of_writing_and_touch() -> None:
    rig, chains = mostly_dead()
    (run,), _, _ = rig.ladder.inspect(rig.space.fingerprint, keys=chains[0])
    settled(rig)
    (frame,) = [f for f in rig.disk.frames.values() if f.header.keys == chains[0]]
    assert (frame.header.written_at, frame.header.touched_at) == (run.written_at, run.touched_at)
    frame.touches = ()  # the index was lost: the header alone speaks
    rig = restarted(rig)
    (again,), _, _ = rig.ladder.inspect(rig.space.fingerprint, keys=chains[0])
    assert (again.written_at, again.expires_at) == (run.written_at, run.expires_at)


def test_a_lease_reads_on_while_its_blocks_move() -> None:
    rig, chains = mostly_dead()
    lease = rig.match(chains[0], lease_seconds=60.0)
    settled(rig)
    assert copied(rig) > 0
    assert check_extents(rig.ladder, rig.space, chains[0], lease.extents) == 2
    progress, _ = rig.fetch(lease.lease)
    assert (progress.blocks, progress.reason) == (2, None)
    rig.ladder.release(lease.lease, used=2)
    settled(rig)
    read_all(rig, chains[0])


def test_the_answer_of_an_owner_stands_while_its_blocks_move() -> None:
    rig, chains = mostly_dead()
    first = rig.match(chains[0], owner="r1", lease_seconds=60.0)
    settled(rig)
    assert copied(rig) > 0
    longer = rig.keys(4, salt=0)
    assert longer.startswith(chains[0])
    put(rig.ladder, rig.space, chains[0][HASH_BYTES:], longer[2 * HASH_BYTES :])
    second = rig.match(longer, owner="r1", lease_seconds=60.0)
    assert (first.blocks, second.blocks, rig.length(longer)) == (2, 2, 4)
    rig.ladder.release(first.lease, used=2)
    check_integrity(rig.ladder)
    assert check_extents(rig.ladder, rig.space, longer, second.extents) == 2
    rig.ladder.delete(rig.space.fingerprint, chains[0])
    assert rig.match(longer, owner="r1").blocks == 0, "what was deleted has left, wherever it moved"


def test_what_is_deleted_while_it_moves_stays_away() -> None:
    rig, chains = mostly_dead()
    rig.tier.manual = True
    settled(rig, times=3)
    assert rig.tier.run(1) == 1, "the copy is being read"
    rig.ladder.delete(rig.space.fingerprint, chains[0])
    for _ in range(4):
        rig.tier.run()
        rig.tick(1.5)
    rig = restarted(rig)
    assert rig.length(chains[0]) == 0
    assert not any(f.header.keys == chains[0] for f in rig.disk.frames.values())


def test_a_purge_between_copy_and_unlink_reaches_both_copies() -> None:
    rig, chains = mostly_dead(living=2)
    lease = rig.match(chains[1], load=False)
    settled(rig)
    assert copied(rig) > 0
    assert any(place[0] == 1 for place in rig.disk.frames), "a lease holds the old segment"
    rig.ladder.delete(rig.space.fingerprint, chains[0])
    rig = restarted(rig)
    assert rig.length(chains[0]) == 0
    assert lease.lease


def test_a_run_put_again_while_its_segment_goes_is_kept() -> None:
    rig: Rig = OneSegment(pages=2048)
    chains = stored(rig, 40)
    seal(rig)
    rig.clock.advance(1.1 * HOUR)
    ladder = rig.ladder
    monotonic, now = rig.clock.monotonic(), ladder._retention.now()
    with ladder._decision():
        ladder._housekeeping._reclaim.step(now, monotonic=monotonic)
    gone = [keys for keys in chains if rig.match(keys).reason is MissReason.EXPIRED]
    left = [keys for keys in chains if keys not in {k for k in chains if not _stands(rig, k)}]
    assert gone and left
    put(ladder, rig.space, rig.root, left[-1], retention_class="batch")
    settled(rig)
    assert rig.length(left[-1]) == 2
    rig = restarted(rig)
    assert [rig.length(keys) for keys in chains if keys != left[-1]] == [0] * 39
    read_all(rig, left[-1])


def _stands(rig: Rig, keys: bytes) -> bool:
    runs, _, _ = rig.ladder.inspect(rig.space.fingerprint, keys=keys)
    return bool(runs)


def test_under_pressure_what_is_half_dead_is_emptied_first() -> None:
    rig: Rig = OneSegment(pages=2048, limits=Limits(ssd_capacity_bytes=44 * PAGE_BYTES))
    chains = stored(rig, 20, by="batch")
    seal(rig)
    chat = [rig.keys(1, salt=salt) for salt in range(100, 120)]
    for keys in chat:
        put(rig.ladder, rig.space, rig.root, keys, retention_class="chat")
    rig.clock.advance(0.9 * HOUR)
    for keys in chains[:8]:
        use(rig, keys)
    rig.clock.advance(0.2 * HOUR)
    settled(rig)
    assert copied(rig, "time") == 0
    assert copied(rig, "capacity") == 8 * PAGE_BYTES
    for keys in [*chains[:8], *chat]:
        read_all(rig, keys)


def test_who_is_worth_least_for_its_size_goes_first() -> None:
    """Not who was touched longest ago: of an old class with days to go and a young one with minutes the
    latter goes.
    """
    rig: Rig = OneSegment(pages=2048, limits=Limits(ssd_capacity_bytes=23 * PAGE_BYTES))
    system = stored(rig, 10, by="system")
    seal(rig)
    rig.clock.advance(6 * HOUR)
    batch = [rig.keys(1, salt=salt) for salt in range(100, 110)]
    for keys in batch:
        put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    seal(rig)
    for salt in range(200, 205):
        put(rig.ladder, rig.space, rig.root, rig.keys(1, salt=salt), retention_class="agent")
    on_disk = {f.header.keys for f in rig.disk.frames.values()}
    assert on_disk >= set(system)
    assert not on_disk & set(batch)


def test_copies_that_fail_are_tried_again_later() -> None:
    rig, chains = mostly_dead()
    rig.tier.refuse_writes = "full"
    settled(rig)
    assert copied(rig) == 0
    rig.tier.refuse_writes = ""
    settled(rig)
    assert copied(rig) == 0, "not at once"
    settled(rig, 61.0, times=3)
    assert copied(rig) > 0
    read_all(rig, chains[0])


def test_a_bad_record_is_not_copied() -> None:
    rig, chains = mostly_dead()
    for stored_frame in rig.disk.frames.values():
        if stored_frame.header.keys == chains[0]:
            data, digest = stored_frame.records[0][1]
            stored_frame.records[0][1] = (bytes([data[0] ^ 1]) + data[1:], digest)
    for node in list(rig.ladder._catalog.namespaces[rig.space.fingerprint].nodes()):
        if all(piece.frame.location for piece in node.slices):
            rig.ladder._catalog._release_host(node)
    settled(rig)
    assert rig.length(chains[0]) == 1
    read_all(rig, chains[0][:HASH_BYTES])


def test_after_a_crash_between_copy_and_unlink_both_copies_are_one() -> None:
    rig, chains = mostly_dead()
    old = {place: replace(frame) for place, frame in rig.disk.frames.items()}
    settled(rig)
    rig.disk.frames.update({place: frame for place, frame in old.items() if place not in rig.disk.frames})
    rig = restarted(rig)
    read_all(rig, chains[0])
    assert len([f for f in rig.disk.frames.values() if f.header.keys == chains[0]]) == 1


def test_a_head_that_many_continue_is_worth_what_hangs_below_it() -> None:
    """It is small and lies among the dead, but what follows it would leave with it."""
    rig = OneSegment(pages=2048, limits=Limits(ssd_capacity_bytes=34 * PAGE_BYTES))
    head = rig.chain([7, 7])
    put(rig.ladder, rig.space, rig.root, head, retention_class="agent")
    dead = [rig.keys(1, salt=salt) for salt in range(2)]
    for keys in dead:
        put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    seal(rig)
    chains = [rig.chain([7, 7, branch, 1, 2, 3]) for branch in range(20)]
    for keys in chains[:10]:
        put(rig.ladder, rig.space, rig.root, keys, retention_class="agent")
    seal(rig)
    old = [rig.keys(1, salt=salt) for salt in range(50, 60)]
    for keys in old:
        put(rig.ladder, rig.space, rig.root, keys, retention_class="agent")
    seal(rig)
    rig.clock.advance(0.9 * HOUR)
    for keys in chains[10:]:
        put(rig.ladder, rig.space, rig.root, keys, retention_class="agent")
    put(rig.ladder, rig.space, rig.root, rig.keys(2, salt=99), retention_class="agent")
    on_disk = {f.header.keys for f in rig.disk.frames.values()}
    assert head in on_disk
    assert rig.events.total("kvstore_evicted_bytes_total", tier="ssd") == 10 * PAGE_BYTES
