"""The documents of hit rates, reasons, advice and purges: their keys are the contract of --json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore import hashing
from kvstore.api import MatchAnswer, MatchRequest
from kvstore.clock import ManualClock
from kvstore.errors import InvalidArgument, TierUnavailable, UnknownNamespace
from kvstore.events import Events
from kvstore.retention import HOUR
from kvstore.rpc.v1 import admin_pb2 as pb
from kvstore.service.purges import RECEIPTS_KEPT
from kvstore.service.store import Store
from kvstore.service.why import span_text
from kvstore.types import HASH_BYTES
from tests.support.driver import namespace, put
from tests.unit.service.test_store import settings

SPACE = namespace()
ROOT = hashing.chain_root(SPACE.fingerprint)
KEYS = hashing.block_hashes(ROOT, list(range(24)), block_tokens=4)


class Desk:
    """A store with a run of six blocks of class batch."""

    def __init__(self, place: Path) -> None:
        self.clock = ManualClock()
        self.store = Store.open(settings(place), clock=self.clock, events=Events())
        self.store.recover()
        self.store.ladder.open(SPACE, root=ROOT)
        put(self.store.ladder, SPACE, ROOT, KEYS, retention_class="batch")
        self.asks = self.store.administrator

    def match(self, *, owner: str = "") -> MatchAnswer:
        request = MatchRequest(namespace=SPACE.fingerprint, keys=KEYS, owner=owner)
        return self.store.ladder.match(request)


@pytest.fixture
def desk() -> Iterator[Desk]:
    with TemporaryDirectory(prefix="kvs-") as name:
        made = Desk(Path(name))
        try:
            yield made
        finally:
            made.store.close(deadline_seconds=5)


def test_hit_rates_are_grouped_as_asked(desk: Desk) -> None:
    desk.store.ladder.release(desk.match().lease, used=3)
    document = desk.asks.hit_rate(pb.HitRateRequest(by=["class", "tenant", "namespace"]))
    [row] = document["rows"]
    assert (row["class"], row["tenant"], row["namespace"]) == ("batch", "", SPACE.fingerprint.hex())
    assert (row["asked_tokens"], row["hit_tokens"], row["hit_rate"]) == (24, 12, 0.5)
    assert document["total"]["hit_tokens_by_tier"] == {"host": 12}
    assert document["window_seconds"] == HOUR
    assert desk.asks.hit_rate(pb.HitRateRequest())["rows"][0].keys() == document["total"].keys()


@pytest.mark.parametrize(
    "request_",
    [
        pb.HitRateRequest(by=["model"]),
        pb.HitRateRequest(window_seconds=1e6),
        pb.HitRateRequest(window_seconds=-1),
    ],
)
def test_a_window_or_group_that_is_not_known_is_refused(desk: Desk, request_: pb.HitRateRequest) -> None:
    with pytest.raises(InvalidArgument, match="hit-rate"):
        desk.asks.hit_rate(request_)


def test_why_tells_the_remedy(desk: Desk) -> None:
    desk.clock.advance(1.5 * HOUR)
    desk.match(owner="r1")
    asked = desk.asks.why(pb.WhyRequest(request="r1"))["request"]
    assert (asked["asked_blocks"], asked["found_blocks"], asked["reason"]) == (6, 0, "expired")
    assert asked["remedy"] == (
        "it was needed 90m after its last touch: "
        "a life of class batch longer than that, now 1h, would have kept it"
    )
    [block] = desk.asks.why(pb.WhyRequest(hash_prefix=KEYS[:6]))["blocks"]
    assert (block["present"]["class"], block["reason"]) == ("batch", "expired")
    with pytest.raises(InvalidArgument, match="name a request"):
        desk.asks.why(pb.WhyRequest())


def test_why_finds_a_block_that_has_left_by_half_its_hash(desk: Desk) -> None:
    desk.store.ladder.delete(SPACE.fingerprint, KEYS[:HASH_BYTES])
    [block] = desk.asks.why(pb.WhyRequest(hash_prefix=KEYS[:8]))["blocks"]
    assert (block["present"], block["reason"], block["departed"]["class"]) == (None, "deleted", "batch")
    assert desk.asks.why(pb.WhyRequest(hash_prefix=KEYS[:7]))["blocks"] == []


def test_advice_names_longer_lives_only(desk: Desk) -> None:
    desk.clock.advance(1.5 * HOUR)
    desk.match()
    document = desk.asks.advice()["classes"]["batch"]
    assert document["hour"]["lost_to_expiry_tokens"] == 24
    assert document["hour"]["longer_life"] == [{"ttl_seconds": 2 * HOUR, "kept_tokens": 24}]
    assert desk.asks.advice()["classes"]["agent"]["day"]["lost_to_expiry_tokens"] == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.PurgeRequest(), "exactly one"),
        (pb.PurgeRequest(namespace=SPACE.fingerprint, tenant=""), "exactly one"),
        (pb.PurgeRequest(retention_class="agnet"), "unknown"),
        (
            pb.PurgeRequest(namespace=SPACE.fingerprint, hash_prefix=b"\0\0"),
            "0 blocks of this namespace start",
        ),
    ],
)
def test_a_purge_of_nothing_certain_is_refused(desk: Desk, request_: pb.PurgeRequest, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        desk.asks.purge(request_)


def test_a_purge_of_an_unknown_namespace_is_refused(desk: Desk) -> None:
    with pytest.raises(UnknownNamespace):
        desk.asks.purge(pb.PurgeRequest(namespace=bytes(32)))


def test_a_receipt_is_kept_and_followed_until_the_bytes_are_gone(desk: Desk) -> None:
    lease = desk.match().lease
    assert desk.asks.purge(pb.PurgeRequest(tenant="", dry_run=True))["blocks"] == 6
    receipt = desk.asks.purge(pb.PurgeRequest(tenant=""))
    assert (receipt["what"], receipt["blocks"], receipt["durable"]) == ({"tenant": ""}, 6, True)
    assert (receipt["state"], receipt["leased_bytes"]) == ("leaving", 6 * 4096)
    desk.store.ladder.release(lease, used=6)
    desk.asks.purges.look_after()
    [followed] = desk.asks.receipts(pb.ReceiptsRequest(receipt=receipt["id"]))["receipts"]
    assert (followed["state"], followed["leased_bytes"]) == ("gone", 0)
    with pytest.raises(InvalidArgument, match="no receipt 'x'"):
        desk.asks.receipts(pb.ReceiptsRequest(receipt="x"))


def test_receipts_are_bounded_and_survive_a_restart_with_the_word_of_a_crash(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    receipts = [{"id": str(n), "what": {}, "state": "gone"} for n in range(RECEIPTS_KEPT)]
    receipts[1]["state"], receipts[2]["state"] = "running", "leaving"
    (folder / "receipts.json").write_text(json.dumps({"version": 1, "receipts": receipts}))
    desk = Desk(tmp_path)
    try:
        new = desk.asks.purge(pb.PurgeRequest(retention_class="batch"))["id"]
        found = desk.asks.receipts(pb.ReceiptsRequest())["receipts"]
        assert len(found) == RECEIPTS_KEPT
        assert found[0]["id"] == new
        states = {receipt["id"]: receipt["state"] for receipt in found}
        assert (states["1"], states["2"]) == ("interrupted: purge again", "gone")
        assert "0" not in states
    finally:
        desk.store.close(deadline_seconds=5)


def test_without_a_receipt_nothing_is_purged(desk: Desk) -> None:
    path = desk.store.settings.ssd.path / "receipts.json.tmp"
    path.mkdir()
    with pytest.raises(TierUnavailable, match="nothing was removed"):
        desk.asks.purge(pb.PurgeRequest(tenant=""))
    assert desk.match().blocks == 6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.002, "2ms"),
        (5, "5s"),
        (60, "1m"),
        (90, "90s"),
        (5400, "90m"),
        (259200, "3d"),
        (float("inf"), "forever"),
    ],
)
def test_spans_are_written_as_settings_are(seconds: float, text: str) -> None:
    assert span_text(seconds) == text
