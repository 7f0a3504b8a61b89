"""Second-touch admission: what is put and never used again is not written to SSD."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.api import CommitAnswer
from kvstore.namespace import Namespace
from kvstore.retention import SHIPPED_CLASSES, ClassTable
from kvstore.types import HASH_BYTES, AckTier, Addressing, Admission, MissReason, PutOutcome
from tests.support.driver import namespace, put
from tests.unit.core.rig import Rig

SECOND = ClassTable.of(replace(c, admission=Admission.SECOND) for c in SHIPPED_CLASSES if c.name != "chat")
TABLE = ClassTable.of([*SECOND.classes.values(), *(c for c in SHIPPED_CLASSES if c.name == "chat")])


def choosy(space: Namespace | None = None, *, pages: int = 512) -> Rig:
    rig = Rig(space=space, pages=pages)
    rig.ladder._retention.adopt(TABLE)
    return rig


def on_disk(rig: Rig) -> set[bytes]:
    """All blocks on SSD."""
    keys = b"".join(frame.header.keys for frame in rig.disk.frames.values())
    return {keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES)}


@pytest.mark.parametrize("space", [namespace(), namespace(addressing=Addressing.FLAT)], ids=["chain", "flat"])
def test_a_block_goes_to_ssd_when_it_is_used_after_its_put(space: Namespace) -> None:
    rig = choosy(space)
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys)
    assert not on_disk(rig)
    rig.ladder.release(rig.match(keys).lease, used=4)
    assert len(on_disk(rig)) == 4


def test_only_what_is_used_goes() -> None:
    rig = choosy()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys)
    rig.ladder.touch(rig.space.fingerprint, keys[: 2 * HASH_BYTES])
    assert on_disk(rig) == {keys[:HASH_BYTES], keys[HASH_BYTES : 2 * HASH_BYTES]}


def test_a_put_of_what_follows_is_a_use_of_what_it_follows() -> None:
    rig = choosy()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys[: 4 * HASH_BYTES])
    put(rig.ladder, rig.space, keys[3 * HASH_BYTES : 4 * HASH_BYTES], keys[4 * HASH_BYTES :])
    assert len(on_disk(rig)) == 4


def test_what_left_host_memory_unused_is_written_when_it_is_put_again() -> None:
    rig = choosy(pages=16)
    keys = rig.keys(4, salt=1)
    put(rig.ladder, rig.space, rig.root, keys)
    for salt in range(2, 7):
        put(rig.ladder, rig.space, rig.root, rig.keys(4, salt=salt))
    assert rig.match(keys).reason is MissReason.EVICTED
    assert not on_disk(rig)
    put(rig.ladder, rig.space, rig.root, keys)
    assert on_disk(rig) >= {keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES)}


def test_an_acknowledgement_says_that_it_is_not_durable() -> None:
    rig = choosy()
    acks: list[CommitAnswer] = []
    answer = put(rig.ladder, rig.space, rig.root, rig.keys(2), ack=AckTier.SSD, acks=acks)
    assert (answer or acks[0]).outcomes[0].outcome is PutOutcome.STORED_HOST


def test_what_was_on_ssd_is_written_again_when_its_neighbours_are_deleted() -> None:
    rig = choosy()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys)
    rig.ladder.release(rig.match(keys).lease, used=4)
    rig.ladder.close(deadline_seconds=0.0)
    rig = Rig(disk=rig.disk, space=rig.space, clock=rig.clock)
    rig.ladder._retention.adopt(TABLE)
    rig.ladder.release(rig.match(keys).lease, used=0)
    rig.ladder.delete(rig.space.fingerprint, keys[3 * HASH_BYTES :])
    assert len(on_disk(rig)) == 3


def test_other_classes_are_written_at_once() -> None:
    rig = choosy()
    put(rig.ladder, rig.space, rig.root, rig.keys(2), retention_class="chat")
    assert len(on_disk(rig)) == 2
