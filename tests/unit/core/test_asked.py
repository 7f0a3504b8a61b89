"""What is counted of matches: hit rates by window, losses that advice is made of, and requests by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.hitrate import CELLS_MAX, LIFE_EDGES, MINUTE, OTHER, ROOM_EDGES, Cell, HitRates, summed
from kvstore.core.ladder import Ladder
from kvstore.retention import DAY, HOUR
from kvstore.types import HASH_BYTES, PAGE_BYTES, MatchMode, MissReason, ReleaseOutcome
from tests.support.driver import put
from tests.unit.core.rig import Rig


def cell(rig: Rig, name: str = "agent", *, seconds: float = HOUR) -> Cell:
    return rig.ladder.hit_rates(seconds).get((rig.space.fingerprint, name), Cell())


def test_hits_are_counted_on_delivery_and_misses_by_reason() -> None:
    rig = Rig()
    keys = rig.keys(10)
    put(rig.ladder, rig.space, rig.root, keys[: 6 * HASH_BYTES])
    rig.match(keys, mode=MatchMode.PROBE)
    assert not rig.ladder.hit_rates(HOUR)
    lease = rig.match(keys).lease
    found = cell(rig)
    assert (found.requests, found.full_hits, found.asked, sum(found.hits.values())) == (1, 0, 40, 0)
    assert (found.missed, found.misses) == ({"never_stored": 16}, {"never_stored": 1})
    rig.ladder.release(lease, used=5)
    assert cell(rig).hits == {"host": 20}
    rig.ladder.release(rig.match(keys[: 6 * HASH_BYTES]).lease, used=6, outcome=ReleaseOutcome.UNUSED)
    found = cell(rig)
    assert (found.requests, found.full_hits, found.hits) == (2, 1, {"host": 20})


def test_the_class_of_the_touch_is_the_one_that_counts() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig.ladder.release(rig.match(keys).lease, used=4)
    rig.ladder.release(rig.match(keys, retention_class="chat").lease, used=4)
    assert (cell(rig, "batch").hits, cell(rig, "chat").hits) == ({"host": 16}, {"host": 16})


def test_a_window_forgets_and_a_long_one_adds_quarters_up() -> None:
    rig = Rig()
    for _ in range(50):
        rig.match(rig.keys(1))
        rig.clock.advance(5 * MINUTE)
    assert cell(rig, seconds=MINUTE).requests == 0
    assert cell(rig, seconds=HOUR).requests == pytest.approx(12, abs=1)
    assert cell(rig, seconds=DAY).requests == 50
    rig.clock.advance(2 * DAY)
    rig.match(rig.keys(1))
    assert (cell(rig, seconds=HOUR).requests, cell(rig, seconds=DAY).requests) == (1, 1)


def test_groups_beyond_the_limit_are_put_together() -> None:
    rates = HitRates()
    for number in range(CELLS_MAX + 10):
        rates.cell(bytes([number]) * 32, "agent", monotonic=30.0).requests += 1
    counted = summed(rates.within(HOUR, monotonic=31.0))
    assert len(counted) == CELLS_MAX + 1
    assert counted[OTHER].requests == 10


def test_what_was_handed_out_changes_no_more() -> None:
    rates = HitRates()
    rates.cell(b"a", "agent", monotonic=30.0).requests += 1
    before = rates.within(HOUR, monotonic=31.0)
    rates.cell(b"a", "agent", monotonic=31.0).requests += 1
    assert summed(before)[(b"a", "agent")].requests == 1


def lost_life(found: Cell) -> dict[float, int]:
    return {LIFE_EDGES[edge]: tokens for edge, tokens in found.lost_to_expiry.items()}


@pytest.mark.parametrize("ssd", [True, False])
def test_tokens_lost_to_expiry_say_which_life_would_have_kept_them(ssd: bool) -> None:
    rig = Rig(ssd=ssd)
    keys = rig.keys(8)
    put(rig.ladder, rig.space, rig.root, keys[: 6 * HASH_BYTES], retention_class="batch")
    rig.clock.advance(1.5 * HOUR)
    assert rig.match(keys).reason is MissReason.EXPIRED  # hidden, still there
    assert lost_life(cell(rig, "batch")) == {2 * HOUR: 24}
    rig.tick(60)
    rig.tick(2 * HOUR)
    assert rig.match(keys).reason is MissReason.EXPIRED  # gone
    assert lost_life(cell(rig, "batch", seconds=DAY)) == {2 * HOUR: 24, 4 * HOUR: 24}


def test_tokens_lost_to_eviction_say_how_much_room_would_have_kept_them() -> None:
    rig = Rig(pages=64, ssd=False)
    keys = rig.keys(20)
    put(rig.ladder, rig.space, rig.root, keys)
    for salt in range(1, 8):
        put(rig.ladder, rig.space, rig.root, rig.keys(20, salt=salt))
    assert rig.match(keys, owner="r").reason is MissReason.EVICTED
    found = cell(rig)
    assert {ROOM_EDGES[edge]: tokens for edge, tokens in found.lost_to_eviction.items()} == {
        ROOM_EDGES[0]: 80
    }
    asked = rig.ladder.request("r")
    assert asked is not None
    assert asked.departed is not None
    assert asked.departed.evicted_bytes == 80 * PAGE_BYTES


def test_the_latest_match_of_an_owner_is_remembered() -> None:
    rig = Rig()
    keys = rig.keys(8)
    put(rig.ladder, rig.space, rig.root, keys[: 6 * HASH_BYTES], retention_class="batch")
    lease = rig.match(keys, owner="r1").lease
    rig.ladder.release(lease, used=4)
    asked = rig.ladder.request("r1")
    assert asked is not None
    assert (asked.asked, asked.found, asked.delivered, asked.retention_class) == (8, 6, 4, "batch")
    assert (asked.reason, asked.stopped_at) == (
        MissReason.NEVER_STORED,
        keys[6 * HASH_BYTES : 7 * HASH_BYTES],
    )
    assert asked.departed is None
    assert [(str(run.tier), run.count) for run in asked.tiers] == [("host", 6)]
    since = rig.ladder.wall()
    rig.tick(2 * HOUR)
    rig.match(keys, owner="r1")
    asked = rig.ladder.request("r1")
    assert asked is not None
    assert asked.departed is not None
    assert (asked.reason, asked.departed.retention_class) == (MissReason.EXPIRED, "batch")
    assert (asked.departed.since, asked.departed.left_at) == (since, since + HOUR)
    assert rig.ladder.request("r2") is None


def restarted(rig: Rig) -> Ladder:
    other = Rig(disk=rig.disk, clock=rig.clock, space=rig.space)
    assert other.ladder.restore_ledger(rig.ladder.ledger_image())
    return other.ladder


def test_the_ledger_is_kept_across_a_restart() -> None:
    rig = Rig()
    keys = rig.keys(3)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig.tick(2 * HOUR)
    space, reason, departed = restarted(rig).departed(keys[:HASH_BYTES])[0]
    assert (space, reason) == (rig.space.fingerprint, MissReason.EXPIRED)
    assert departed is not None
    assert departed.retention_class == "batch"


def test_a_ledger_of_another_size_is_refused_and_what_is_unknown_is_forgotten() -> None:
    rig = Rig()
    image = rig.ladder.ledger_image()
    assert not rig.ladder.restore_ledger(replace(image, overwritten=image.overwritten[1:]))
    assert rig.match(rig.keys(1)).reason is MissReason.NEVER_STORED
    rig.ladder.forget_unknown()
    assert rig.match(rig.keys(1)).reason is MissReason.FORGOTTEN


def test_a_block_is_found_by_the_beginning_of_its_hash() -> None:
    rig = Rig()
    keys = rig.keys(6)
    put(rig.ladder, rig.space, rig.root, keys)
    key = keys[3 * HASH_BYTES : 4 * HASH_BYTES]
    [(space, full, run)] = rig.ladder.present(key[:6])
    assert (space, full, run.host_blocks) == (rig.space.fingerprint, key, 6)
    assert rig.ladder.present(b"\0" * 6) == []


def test_a_full_miss_counts_for_the_class_that_had_held_the_block() -> None:
    rig = Rig()
    keys = rig.keys(4)
    put(rig.ladder, rig.space, rig.root, keys, retention_class="batch")
    rig.tick(2 * HOUR)
    rig.match(keys)
    rig.match(keys, retention_class="chat")
    assert (cell(rig, "batch").requests, cell(rig, "chat").requests) == (1, 1)
