"""Put, match, fetch, release on both transports, against a fake daemon."""

from __future__ import annotations

import select
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.api import OutcomeRun, TierRun
from kvstore.client import Client, OpenNamespace, Transport
from kvstore.errors import InvalidArgument
from kvstore.types import HASH_BYTES, MissReason, PutOutcome, ReleaseOutcome, Tier
from tests.unit.client.conftest import LIMITS, NAMESPACE, SECONDS, empty, keys_of, payload
from tests.unit.client.fake_daemon import FakeDaemon


@pytest.fixture
def client(daemon: FakeDaemon, transport: Transport) -> Iterator[Client]:
    with Client(daemon.address, transport=transport, limits=LIMITS) as connected:
        yield connected


def test_what_is_put_comes_back(
    daemon: FakeDaemon, client: Client, namespace: OpenNamespace, transport: Transport
) -> None:
    keys, source, into = keys_of(namespace, 3), payload(3), empty(3)
    stored = namespace.put(namespace.root, keys, source, deadline_seconds=SECONDS)
    assert stored.outcomes == (OutcomeRun(PutOutcome.STORED_HOST, 3),)
    assert (stored.stored, stored.present, stored.reason) == (3, 3, None)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    assert (match.blocks, match.reason, match.ready) == (3, None, True)
    fetched = namespace.fetch(match, into, deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (3, None)
    assert fetched.tiers == (TierRun(Tier.HOST, 3),)
    assert np.array_equal(into, source)
    namespace.release(match, used=3)
    release = daemon.waits_for("release")[0]
    assert (release.lease, release.used) == (77, 3)
    assert client.transport is transport
    assert client.connected
    assert client.boot_id == 1


def test_a_second_put_is_a_duplicate_and_a_longer_one_adds(namespace: OpenNamespace) -> None:
    keys, source = keys_of(namespace, 4), payload(4)
    head = keys[: 2 * HASH_BYTES]
    assert namespace.put(namespace.root, head, source[:2], deadline_seconds=SECONDS).stored == 2
    again = namespace.put(namespace.root, head, source[:2], deadline_seconds=SECONDS)
    assert (again.stored, again.present) == (0, 2)
    longer = namespace.put(namespace.root, keys, source, deadline_seconds=SECONDS)
    assert longer.outcomes == (OutcomeRun(PutOutcome.DUPLICATE, 2), OutcomeRun(PutOutcome.STORED_HOST, 2))
    into = empty(4)
    fetched = namespace.get(keys, into, deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (4, None)
    assert np.array_equal(into, source)


def test_get_releases_what_it_used_and_says_why_there_is_not_more(
    daemon: FakeDaemon, namespace: OpenNamespace
) -> None:
    keys, source, into = keys_of(namespace, 3), payload(2), empty(3)
    namespace.put(namespace.root, keys[: 2 * HASH_BYTES], source, deadline_seconds=SECONDS)
    fetched = namespace.get(keys, into, deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (2, MissReason.NEVER_STORED)
    release = daemon.waits_for("release")[0]
    assert (release.lease, release.used) == (77, 2)
    assert not into[2].any()


def test_layer_major_buffers_and_short_records(namespace: OpenNamespace) -> None:
    keys, source = keys_of(namespace, 3), payload(3)
    # Finer than the two segments, and cut elsewhere on the way out than on the way in.
    columns = [np.ascontiguousarray(source[:, a:b]) for a, b in ((0, 4000), (4000, 4500), (4500, 8000))]
    lengths = [8000, 5000, 100]
    stored = namespace.put(namespace.root, keys, columns, lengths=lengths, deadline_seconds=SECONDS)
    assert stored.stored == 3
    into = [np.zeros((3, width), np.uint8) for width in (1000, 2000, 1000, 4000)]
    assert namespace.get(keys, into, deadline_seconds=SECONDS).blocks == 3
    whole = np.concatenate(into, axis=1)
    for row, length in enumerate(lengths):
        assert np.array_equal(whole[row, :length], source[row, :length])
        assert not whole[row, length:].any()


def test_fewer_blocks_may_be_fetched_than_are_there(namespace: OpenNamespace) -> None:
    keys, source, into = keys_of(namespace, 3), payload(3), empty(2)
    namespace.put(namespace.root, keys, source, deadline_seconds=SECONDS)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    fetched = namespace.fetch(match, into, blocks=2, deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (2, None)
    assert np.array_equal(into, source[:2])


def test_a_match_can_be_fetched_a_window_at_a_time(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys, source, into = keys_of(namespace, 5), payload(5), empty(2)
    namespace.put(namespace.root, keys, source, deadline_seconds=SECONDS)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    for first, count in ((0, 2), (2, 2), (4, 1)):
        fetched = namespace.fetch(match, into, first=first, blocks=2, deadline_seconds=SECONDS)
        assert (fetched.blocks, fetched.reason) == (count, None)
        assert fetched.tiers == (TierRun(Tier.HOST, count),)
        assert np.array_equal(into[:count], source[first : first + count])
    assert namespace.fetch(match, into, first=5, deadline_seconds=SECONDS).blocks == 0
    slot, _, _ = daemon.blocks[keys[3 * HASH_BYTES : 4 * HASH_BYTES]]
    daemon.arena.bytes[slot * 4096] ^= 1
    fetched = namespace.fetch(match, into, first=2, blocks=2, deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (1, MissReason.CORRUPT)
    assert daemon.waits_for("release")[0].used == 3


def test_a_corrupt_block_ends_the_result_before_it_and_is_reported(
    daemon: FakeDaemon, client: Client, namespace: OpenNamespace
) -> None:
    keys, source, into = keys_of(namespace, 3), payload(3), empty(3)
    namespace.put(namespace.root, keys, source, deadline_seconds=SECONDS)
    slot, _, _ = daemon.blocks[keys[HASH_BYTES : 2 * HASH_BYTES]]
    daemon.arena.bytes[slot * 4096 + 7999] ^= 1
    match = namespace.match(keys, deadline_seconds=SECONDS)
    fetched = namespace.fetch(match, into, deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (1, MissReason.CORRUPT)
    assert np.array_equal(into[0], source[0])
    release = daemon.waits_for("release")[0]
    assert (release.used, release.outcome) == (1, 3)
    assert client.events.total("kvstore_client_corrupt_total") == 1
    unchecked = namespace.fetch(match, into, verify=False, deadline_seconds=SECONDS)
    assert unchecked.blocks == 3


def test_tickets_resolve_and_their_descriptors_become_readable(namespace: OpenNamespace) -> None:
    keys, source, into = keys_of(namespace, 3), payload(3), empty(3)
    put = namespace.submit_put(namespace.root, keys, source, deadline_seconds=SECONDS)
    assert select.select([put.fileno()], [], [], SECONDS)[0]
    assert put.poll()
    assert put.result().stored == 3
    match = namespace.submit_match(keys, deadline_seconds=SECONDS).result(SECONDS)
    assert match.blocks == 3
    fetched = namespace.submit_fetch(match, into, deadline_seconds=SECONDS)
    assert fetched.result(SECONDS).blocks == 3
    assert select.select([fetched.fileno()], [], [], SECONDS)[0]
    assert np.array_equal(into, source)
    assert namespace.submit_get(keys, empty(3), deadline_seconds=SECONDS).result(SECONDS).blocks == 3


def test_a_miss_has_nothing_to_fetch(namespace: OpenNamespace) -> None:
    match = namespace.match(keys_of(namespace, 2), deadline_seconds=SECONDS)
    assert (match.blocks, match.lease, match.reason) == (0, 0, MissReason.NEVER_STORED)
    fetched = namespace.fetch(match, empty(2))
    assert (fetched.blocks, fetched.reason) == (0, MissReason.NEVER_STORED)
    assert namespace.match(b"", deadline_seconds=SECONDS).blocks == 0


def test_the_callers_mistakes_are_raised(namespace: OpenNamespace) -> None:
    keys = keys_of(namespace, 2)
    namespace.put(namespace.root, keys, payload(2), deadline_seconds=SECONDS)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    with pytest.raises(InvalidArgument, match=r"expected uint8 \[>= 2, bytes\], got uint8 \[1, 8000\]"):
        namespace.fetch(match, empty(1))
    with pytest.raises(InvalidArgument, match="is read-only"):
        namespace.fetch(match, np.frombuffer(bytes(16000), np.uint8).reshape(2, 8000))
    with pytest.raises(InvalidArgument, match="at least one block"):
        namespace.put(namespace.root, b"", payload(0))
    with pytest.raises(InvalidArgument, match="multiple of 32"):
        namespace.match(b"123")
    with pytest.raises(InvalidArgument, match=r"2 numbers in 0\.\.8000"):
        namespace.put(namespace.root, keys, payload(2), lengths=[1, 8001])
    with pytest.raises(InvalidArgument, match="the layout has 1 parts, got part 3"):
        namespace.fetch(match, {3: empty(2)})


def test_what_open_said_of_siblings(namespace: OpenNamespace) -> None:
    assert namespace.siblings == ("rope differs",)
    assert namespace.namespace is NAMESPACE


def test_released_unused(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = keys_of(namespace, 1)
    namespace.put(namespace.root, keys, payload(1), deadline_seconds=SECONDS)
    match = namespace.match(keys, deadline_seconds=SECONDS)
    namespace.release(match, used=0, outcome=ReleaseOutcome.UNUSED)
    assert daemon.waits_for("release")[0].outcome == 2


def test_a_release_rides_on_the_match_that_follows(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys = keys_of(namespace, 1)
    namespace.put(namespace.root, keys, payload(1), deadline_seconds=SECONDS)
    daemon.gate.clear()  # requests are read when it opens, so nobody depends on how fast this test is
    first = namespace.submit_match(keys, deadline_seconds=SECONDS)
    daemon.gate.set()
    namespace.release(first.result(SECONDS), used=1)
    namespace.match(keys, deadline_seconds=SECONDS)
    riders = [rider for match in daemon.waits_for("match", 2) for rider in match.release]
    # On a busy machine the match may come too late to ride on; then the release goes alone, before it.
    alone = [r.release for r in daemon.seen if r.WhichOneof("verb") == "release"]
    assert [(r.lease, r.used) for r in riders + alone] == [(77, 1)]


def test_a_get_asks_for_no_more_than_it_has_room_for(daemon: FakeDaemon, namespace: OpenNamespace) -> None:
    keys, source, into = keys_of(namespace, 3), payload(3), empty(2)
    namespace.put(namespace.root, keys, source, deadline_seconds=SECONDS)
    fetched = namespace.get(keys, into, deadline_seconds=SECONDS)
    assert (fetched.blocks, fetched.reason) == (2, None)
    match = daemon.waits_for("match")[0]
    assert (match.keys, list(match.parts)) == (keys[: 2 * HASH_BYTES], [0])


def test_a_prompt_beyond_the_daemons_limit_is_asked_as_far_as_it_goes(
    daemon: FakeDaemon, namespace: OpenNamespace
) -> None:
    assert namespace.match(bytes(HASH_BYTES * 65_537), deadline_seconds=SECONDS).blocks == 0
    assert len(daemon.waits_for("match")[0].keys) == 65_536 * HASH_BYTES
