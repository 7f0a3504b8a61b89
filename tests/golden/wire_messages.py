"""Messages of protocol 1 as this build writes them; their bytes lie in tests/golden/wire, a file each.

Run as a program it writes the files of new messages; those that are there are a promise and stay as they are.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.api import (
    CommitAnswer,
    CommitRequest,
    Extent,
    ListAnswer,
    MatchAnswer,
    MatchRequest,
    OpenAnswer,
    OutcomeRun,
    PartBlocks,
    PartDigests,
    PrefetchAnswer,
    Progress,
    ReserveAnswer,
    ReserveRequest,
    RunInfo,
    TierRun,
)
from kvstore.errors import Overloaded
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.rpc import wire
from kvstore.rpc.v1 import admin_pb2
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import (
    AckTier,
    BlockHash,
    MatchMode,
    MissReason,
    PutOutcome,
    ReleaseOutcome,
    Tier,
)

FOLDER = Path(__file__).with_name("wire")
LAYOUT = Layout.single(dtype="u8", bytes_max=3000, layers=2, segments=2)
NAMESPACE = Namespace(model="golden", weights="wire", layout=LAYOUT, block_tokens=16)
PRINT = NAMESPACE.fingerprint
ROOT = BlockHash(b"r" * 32)
KEYS = bytes(range(64))
BOOT = 0x1122334455667788
LEASE = 0x0807060504030201
EXTENT = Extent(
    part=0,
    first=0,
    slots=np.array([7, 8], np.uint32),
    generations=np.array([1, 0xFFFFFFFF], np.uint32),
    lengths=np.array([3000, 1500], np.uint32),
    digests=bytes(range(64)),
)
MATCH = MatchRequest(
    namespace=PRINT,
    keys=KEYS,
    mode=MatchMode.LEASE,
    owner="request-1",
    retention_class="chat",
    exact_only=True,
    parts=(0,),
    lease_seconds=12.5,
    load=False,
)
RELEASE = wire.Release(LEASE, 2, ReleaseOutcome.CORRUPT)
RESERVE = ReserveRequest(
    namespace=PRINT,
    parent=ROOT,
    keys=KEYS,
    put_id=b"put-1",
    parts=(PartBlocks(0, 0, 2),),
    retention_class="agent",
    provenance=640,
    token_ids=bytes(4 * 32),
)
DIGESTS = PartDigests(0, 0, np.array([3000, 1500], "<u4").tobytes(), bytes(range(64)))
COMMIT = CommitRequest(reservation=5, blocks=2, parts=(DIGESTS,), ack=AckTier.SSD)
MATCHED = MatchAnswer(
    blocks=2,
    boundaries=(2, 1),
    reason=MissReason.EXPIRED,
    lease=LEASE,
    lease_seconds=12.5,
    tiers=(TierRun(Tier.HOST, 1), TierRun(Tier.SSD, 1)),
    ready=False,
    extents=(EXTENT,),
)
PREFETCHED = PrefetchAnswer(prefetch=9, blocks=4, resident=1, loading=3, reason=MissReason.EVICTED)
RUN = RunInfo(
    parent=ROOT,
    keys=KEYS,
    tiers=(Tier.HOST, Tier.SSD),
    host_blocks=1,
    ssd_blocks=2,
    retention_class="agent",
    written_at=1.7e9,
    touched_at=1.7e9 + 1,
    expires_at=math.inf,
    bytes=8192,
    provenance=640,
    leased=True,
)
LISTED = ListAnswer(runs=(RUN,), cursor="ab")
OUTCOMES = (OutcomeRun(PutOutcome.DUPLICATE, 1), OutcomeRun(PutOutcome.RESERVED, 2))
RESERVED = ReserveAnswer(reservation=5, outcomes=OUTCOMES, extents=(EXTENT,), seconds=60.0)
STORED = CommitAnswer(outcomes=(OutcomeRun(PutOutcome.STORED_SSD, 2), OutcomeRun(PutOutcome.THROTTLED, 1)))
PROGRESS = Progress(LEASE, (EXTENT,), True, 2, MissReason.CORRUPT)


def requests() -> dict[str, pb.SessionRequest]:
    """Return one request of every verb."""
    verbs: dict[str, Any] = {
        "hello": pb.HelloRequest(protocol=1, client="kvstore-client 0.1.0 pid=1", want_mapping=True),
        "open": wire.open_to_wire(NAMESPACE, root=ROOT),
        "match": wire.match_to_wire(MATCH, releases=[RELEASE]),
        "touch": pb.TouchRequest(namespace=PRINT, keys=KEYS, retention_class="chat"),
        "prefetch": pb.PrefetchRequest(namespace=PRINT, keys=KEYS, deadline_seconds=1.5),
        "cancel": pb.CancelRequest(prefetch=9),
        "renew": pb.RenewRequest(leases=[LEASE, 1], lease_seconds=30.0),
        "release": wire.release_to_wire(RELEASE),
        "delete": pb.DeleteRequest(namespace=PRINT, keys=KEYS),
        "list": pb.ListRequest(namespace=PRINT, cursor="ab", limit=10),
        "reserve": wire.reserve_to_wire(RESERVE),
        "commit": wire.commit_to_wire(COMMIT),
        "abort": pb.AbortRequest(reservation=5),
        "ping": pb.PingRequest(),
    }
    return {
        verb: pb.SessionRequest(request_id=index, **{verb: message})
        for index, (verb, message) in enumerate(verbs.items(), start=1)
    }


def replies() -> dict[str, pb.SessionReply]:
    """Return one reply of every kind."""
    hello = pb.HelloReply(
        protocol=1,
        session=3,
        arena_path="/dev/shm/arena",
        arena_bytes=1 << 30,
        arena_id=77,
        lock_path="/run/locks",
        server="kvstore 0.1.0",
        message_bytes_max=1 << 26,
    )
    opened = OpenAnswer(fingerprint=PRINT, siblings=("rope differs",))
    answers: dict[str, Any] = {
        "error": wire.error_to_wire(Overloaded("sessions: all taken", retry_after_ms=250)),
        "hello": hello,
        "open": wire.open_answer_to_wire(opened, boot_id=BOOT),
        "match": wire.match_answer_to_wire(MATCHED, layout=LAYOUT, boot_id=BOOT),
        "touch": pb.TouchReply(blocks=2, boot_id=BOOT),
        "prefetch": wire.prefetch_answer_to_wire(PREFETCHED, boot_id=BOOT),
        "cancel": pb.CancelReply(found=True, boot_id=BOOT),
        "renew": pb.RenewReply(ended=[1], boot_id=BOOT),
        "release": pb.ReleaseReply(found=True, boot_id=BOOT),
        "delete": pb.DeleteReply(blocks=5, boot_id=BOOT),
        "list": wire.list_answer_to_wire(LISTED, boot_id=BOOT),
        "reserve": wire.reserve_answer_to_wire(RESERVED, layout=LAYOUT, boot_id=BOOT),
        "commit": wire.commit_answer_to_wire(STORED, boot_id=BOOT),
        "abort": pb.AbortReply(found=True, boot_id=BOOT),
        "ping": pb.PingReply(),
        "progress": wire.progress_to_wire(PROGRESS, layout=LAYOUT),
    }
    return {
        kind: pb.SessionReply(request_id=index, boot_id=BOOT, **{kind: message})
        for index, (kind, message) in enumerate(answers.items(), start=1)
    }


def framed() -> dict[str, Any]:
    """Return the messages of the framed streams."""
    put_chunk = pb.PutRequest.Chunk(part=0, block=1, offset=1000, data=b"payload")
    fetch_chunk = pb.FetchReply.Chunk(part=0, block=1, offset=1000, data=b"payload")
    return {
        "put_header": wire.put_header_to_wire(RESERVE, [DIGESTS], ack=AckTier.SSD),
        "put_chunk": pb.PutRequest(chunk=put_chunk),
        "put_reply": pb.PutReply(outcomes=wire.outcomes_to_wire(STORED.outcomes), boot_id=BOOT),
        "fetch_request": pb.FetchRequest(lease=LEASE, parts=[0], payload=True),
        "fetch_progress": pb.FetchReply(
            progress=wire.progress_to_wire(PROGRESS, layout=LAYOUT), boot_id=BOOT
        ),
        "fetch_chunk": pb.FetchReply(chunk=fetch_chunk, boot_id=BOOT),
    }


def administration() -> dict[str, Any]:
    """Return what administrators ask with; the answers are JSON."""
    change = admin_pb2.ClassChange(
        retention_class="agent", ttl_seconds=math.inf, mode="fixed", quota_bytes=1 << 40
    )
    undo = admin_pb2.ClassUndo(retention_class="agent")
    return {
        "admin_document": admin_pb2.Document(document="{}", boot_id=BOOT),
        "admin_change": admin_pb2.RetentionRequest(change=change, dry_run=True),
        "admin_undo": admin_pb2.RetentionRequest(undo=undo),
        "admin_forecast": admin_pb2.ForecastRequest(hours=72),
        "admin_hit_rate": admin_pb2.HitRateRequest(window_seconds=3600, by=["class", "tier"]),
        "admin_why": admin_pb2.WhyRequest(request="r1", hash_prefix=b"12345678", namespace=PRINT),
        "admin_purge": admin_pb2.PurgeRequest(namespace=PRINT, keys=KEYS, hash_prefix=b"1", dry_run=True),
        "admin_purge_tenant": admin_pb2.PurgeRequest(tenant=""),
        "admin_purge_class": admin_pb2.PurgeRequest(retention_class="batch"),
        "admin_receipts": admin_pb2.ReceiptsRequest(receipt="5f0c2a91d3e7"),
    }


def messages() -> dict[str, Any]:
    """Return all of them by file name."""
    return {
        **{f"request_{verb}": message for verb, message in requests().items()},
        **{f"reply_{kind}": message for kind, message in replies().items()},
        **framed(),
        **administration(),
    }


def recorded(name: str) -> bytes:
    """Return the bytes that were recorded for a message."""
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


def main() -> None:
    """Record what has not been recorded."""
    for name, message in messages().items():
        path = FOLDER / f"{name}.hex"
        if not path.exists():
            data = message.SerializeToString(deterministic=True).hex()
            path.write_text("\n".join(data[i : i + 100] for i in range(0, len(data), 100)) + "\n")
            sys.stdout.write(f"recorded {name}\n")


if __name__ == "__main__":
    main()
