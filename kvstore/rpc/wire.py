"""The only two-way mapping between the values of kvstore.api and protobuf messages.

`<thing>_to_wire` and `<thing>_from_wire` come in pairs. Malformed input is InvalidArgument naming the field,
the limit and the value got; limits that depend on the store (keys per request, classes) are judged there.
Replies carry the boot id of the daemon where they travel outside a session.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.api import (
    NO_SESSION,
    ListAnswer,
    MatchAnswer,
    MatchRequest,
    OpenAnswer,
    PrefetchAnswer,
    RunInfo,
    TierRun,
)
from kvstore.errors import LayoutMismatch
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.rpc.enums import MATCH_MODE, MISS_REASON, RELEASE_OUTCOME, TIER
from kvstore.rpc.packing import fingerprint_of, hash_of, keys_of, seconds_of, text_of, u32_to_wire
from kvstore.rpc.status import error_from_call, error_from_wire, error_metadata, error_to_wire, status_of
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.wire_extent import (
    extent_from_wire,
    extent_to_wire,
    parts_from_wire,
    progress_from_wire,
    progress_to_wire,
)
from kvstore.rpc.wire_put import (
    commit_answer_from_wire,
    commit_answer_to_wire,
    commit_from_wire,
    commit_to_wire,
    outcomes_from_wire,
    outcomes_to_wire,
    part_digests_from_wire,
    part_digests_to_wire,
    put_header_from_wire,
    put_header_to_wire,
    reserve_answer_from_wire,
    reserve_answer_to_wire,
    reserve_from_wire,
    reserve_to_wire,
)
from kvstore.types import BlockHash, ReleaseOutcome

__all__ = [
    "Release", "commit_answer_from_wire", "commit_answer_to_wire", "commit_from_wire", "commit_to_wire",
    "error_from_call", "error_from_wire", "error_metadata", "error_to_wire", "extent_from_wire",
    "extent_to_wire", "fingerprint_of", "hash_of", "keys_of", "list_answer_from_wire",
    "list_answer_to_wire", "match_answer_from_wire", "match_answer_to_wire", "match_from_wire",
    "match_to_wire", "open_answer_from_wire", "open_answer_to_wire", "open_from_wire", "open_to_wire",
    "outcomes_from_wire", "outcomes_to_wire", "part_digests_from_wire", "part_digests_to_wire",
    "parts_from_wire", "prefetch_answer_from_wire", "prefetch_answer_to_wire", "progress_from_wire",
    "progress_to_wire", "put_header_from_wire", "put_header_to_wire", "release_from_wire",
    "release_to_wire", "releases_from_wire", "reserve_answer_from_wire", "reserve_answer_to_wire",
    "reserve_from_wire", "reserve_to_wire", "root_from_wire", "run_info_from_wire", "run_info_to_wire",
    "seconds_of", "status_of", "text_of", "u32_to_wire",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Release:
    """A reader is done with a lease: `used` blocks were delivered to the engine."""

    lease: int
    used: int
    outcome: ReleaseOutcome = ReleaseOutcome.USED


def open_to_wire(namespace: Namespace, *, root: BlockHash | None = None) -> pb.OpenRequest:
    """Return the request that opens a namespace and declares the client's chain root."""
    canonical, fingerprint = namespace.canonical(), namespace.fingerprint
    return pb.OpenRequest(canonical=canonical, fingerprint=fingerprint, root=root or b"")


def open_from_wire(message: pb.OpenRequest) -> Namespace:
    """Return the namespace to open.

    Errors: InvalidArgument; LayoutMismatch when both ends name it differently.
    """
    namespace = Namespace.from_canonical(message.canonical)
    claimed = fingerprint_of(message.fingerprint, "open.fingerprint")
    if namespace.fingerprint != claimed:
        ours = namespace.fingerprint.hex()
        raise LayoutMismatch(
            f"open.fingerprint: the canonical form hashes to {ours}, the client says {claimed.hex()}"
        )
    return namespace


def root_from_wire(message: pb.OpenRequest) -> BlockHash | None:
    """Return the chain root that an open declares, None when it declares none."""
    return hash_of(message.root, "open.root") if message.root else None


def open_answer_to_wire(answer: OpenAnswer, *, boot_id: int = 0) -> pb.OpenReply:
    """Return the reply of open."""
    return pb.OpenReply(fingerprint=answer.fingerprint, siblings=answer.siblings, boot_id=boot_id)


def open_answer_from_wire(message: pb.OpenReply) -> OpenAnswer:
    """Return the answer of open."""
    fingerprint = fingerprint_of(message.fingerprint, "open reply.fingerprint")
    return OpenAnswer(fingerprint=fingerprint, siblings=tuple(message.siblings))


def match_to_wire(request: MatchRequest, *, releases: Iterable[Release] = ()) -> pb.MatchRequest:
    """Return a match request; one-way releases ride along."""
    return pb.MatchRequest(
        namespace=request.namespace,
        keys=request.keys,
        mode=MATCH_MODE.to_wire(request.mode),
        owner=request.owner,
        retention_class=request.retention_class,
        exact_only=request.exact_only,
        parts=request.parts,
        lease_seconds=request.lease_seconds,
        no_load=not request.load,
        release=[release_to_wire(release) for release in releases],
    )


def match_from_wire(message: pb.MatchRequest, *, session: int = NO_SESSION) -> MatchRequest:
    """Return a match request of a session; its piggybacked releases come from `releases_from_wire`."""
    return MatchRequest(
        namespace=fingerprint_of(message.namespace, "match.namespace"),
        keys=keys_of(message.keys, "match.keys"),
        mode=MATCH_MODE.from_wire(message.mode, "match.mode"),
        owner=text_of(message.owner, "match.owner"),
        retention_class=text_of(message.retention_class, "match.retention_class"),
        exact_only=message.exact_only,
        parts=parts_from_wire(message.parts, "match.parts"),
        lease_seconds=seconds_of(message.lease_seconds, "match.lease_seconds"),
        load=not message.no_load,
        session=session,
    )


def releases_from_wire(message: pb.MatchRequest) -> tuple[Release, ...]:
    """Return the releases that ride on a match request; to be done before the match."""
    return tuple(release_from_wire(release) for release in message.release)


def release_to_wire(release: Release) -> pb.ReleaseRequest:
    """Return a release."""
    outcome = RELEASE_OUTCOME.to_wire(release.outcome)
    return pb.ReleaseRequest(lease=release.lease, used=release.used, outcome=outcome)


def release_from_wire(message: pb.ReleaseRequest) -> Release:
    """Return a release."""
    outcome = RELEASE_OUTCOME.from_wire(message.outcome, "release.outcome")
    return Release(message.lease, message.used, outcome)


def match_answer_to_wire(
    answer: MatchAnswer, *, layout: Layout | None = None, boot_id: int = 0
) -> pb.MatchReply:
    """Return the reply of a match; with the layout at hand, lengths that say nothing are left out."""
    return pb.MatchReply(
        blocks=answer.blocks,
        boundaries=answer.boundaries,
        reason=MISS_REASON.to_wire_optional(answer.reason),
        lease=answer.lease,
        lease_seconds=answer.lease_seconds,
        tiers=[pb.TierRun(tier=TIER.to_wire(run.tier), count=run.count) for run in answer.tiers],
        ready=answer.ready,
        extents=[extent_to_wire(extent, layout=layout) for extent in answer.extents],
        bitmap=answer.bitmap,
        boot_id=boot_id,
    )


def match_answer_from_wire(message: pb.MatchReply, layout: Layout) -> MatchAnswer:
    """Return the answer of a match.

    Errors: InvalidArgument when an extent does not fit the layout.
    """
    tiers = (TierRun(TIER.from_wire(run.tier, "match reply.tiers.tier"), run.count) for run in message.tiers)
    return MatchAnswer(
        blocks=message.blocks,
        boundaries=tuple(message.boundaries),
        reason=MISS_REASON.from_wire_optional(message.reason, "match reply.reason"),
        lease=message.lease,
        lease_seconds=message.lease_seconds,
        tiers=tuple(tiers),
        ready=message.ready,
        extents=tuple(extent_from_wire(extent, layout) for extent in message.extents),
        bitmap=message.bitmap,
    )


def prefetch_answer_to_wire(answer: PrefetchAnswer, *, boot_id: int = 0) -> pb.PrefetchReply:
    """Return the reply of prefetch."""
    return pb.PrefetchReply(
        prefetch=answer.prefetch,
        blocks=answer.blocks,
        resident=answer.resident,
        loading=answer.loading,
        reason=MISS_REASON.to_wire_optional(answer.reason),
        boot_id=boot_id,
    )


def prefetch_answer_from_wire(message: pb.PrefetchReply) -> PrefetchAnswer:
    """Return the answer of prefetch."""
    return PrefetchAnswer(
        prefetch=message.prefetch,
        blocks=message.blocks,
        resident=message.resident,
        loading=message.loading,
        reason=MISS_REASON.from_wire_optional(message.reason, "prefetch reply.reason"),
    )


def run_info_to_wire(run: RunInfo) -> pb.RunInfo:
    """Return a run as list and inspect show it; an infinite expires_at travels as it is."""
    return pb.RunInfo(
        parent=run.parent,
        keys=run.keys,
        tiers=[TIER.to_wire(tier) for tier in run.tiers],
        host_blocks=run.host_blocks,
        ssd_blocks=run.ssd_blocks,
        retention_class=run.retention_class,
        written_at=run.written_at,
        touched_at=run.touched_at,
        expires_at=run.expires_at,
        bytes=run.bytes,
        provenance=run.provenance,
        leased=run.leased,
    )


def run_info_from_wire(message: pb.RunInfo) -> RunInfo:
    """Return a run as list and inspect show it."""
    return RunInfo(
        parent=hash_of(message.parent, "run.parent"),
        keys=keys_of(message.keys, "run.keys"),
        tiers=tuple(TIER.from_wire(tier, "run.tiers") for tier in message.tiers),
        host_blocks=message.host_blocks,
        ssd_blocks=message.ssd_blocks,
        retention_class=message.retention_class,
        written_at=message.written_at,
        touched_at=message.touched_at,
        expires_at=message.expires_at,
        bytes=message.bytes,
        provenance=message.provenance,
        leased=message.leased,
    )


def list_answer_to_wire(answer: ListAnswer, *, boot_id: int = 0) -> pb.ListReply:
    """Return one page of runs."""
    return pb.ListReply(
        runs=[run_info_to_wire(run) for run in answer.runs], cursor=answer.cursor, boot_id=boot_id
    )


def list_answer_from_wire(message: pb.ListReply) -> ListAnswer:
    """Return one page of runs."""
    return ListAnswer(runs=tuple(run_info_from_wire(run) for run in message.runs), cursor=message.cursor)
