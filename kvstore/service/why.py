"""Why something was not there, and what would have helped, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvstore.core.asked import Asked
from kvstore.core.ladder import Ladder
from kvstore.core.ledger import Departed
from kvstore.errors import InvalidArgument
from kvstore.namespace import Namespace
from kvstore.retention import RetentionClass
from kvstore.rpc.packing import text_of
from kvstore.rpc.v1 import admin_pb2 as pb
from kvstore.service.class_changes import pause
from kvstore.service.report import bytes_text
from kvstore.types import HASH_BYTES, Fingerprint, MissReason

LEDGER_KEY_BYTES = 8
REMEDIES: Mapping[MissReason, str] = {
    MissReason.NEVER_STORED: "nobody has put this block here: an earlier token, image or setting differs, "
    "or the put was refused; `kvstore inspect namespaces` shows names that differ",
    MissReason.FORGOTTEN: "the ledger no longer reaches back to it, so nothing is certain",
    MissReason.CORRUPT: "its bytes were bad and were not used; `kvstore verify` tells more",
    MissReason.DELETED: "it was deleted or purged; `kvstore purge --receipts` lists purges",
    MissReason.IDENTITY_MISMATCH: "blocks of this model are there under another name; "
    "`kvstore inspect namespaces` shows what differs",
    MissReason.PART_MISSING: "not all ranks had committed their parts",
    MissReason.IN_FLIGHT: "another put was still writing it: a moment later it was there",
    MissReason.THROTTLED: "there was no room for it: a larger arena or quota would have taken it",
    MissReason.TIER_DOWN: "its tier was down; `kvstore status` says which and why",
}


class Why:
    """Answers `kvstore why`. Threads: any but the event loop; looking for a hash walks the index."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder

    def document(self, request: pb.WhyRequest) -> dict[str, Any]:
        """Return what is remembered of a request, and of blocks.

        Errors: InvalidArgument.
        """
        owner, prefix = text_of(request.request, "why.request"), request.hash_prefix
        if len(prefix) > HASH_BYTES or not (owner or prefix):
            raise InvalidArgument(
                f"why: name a request, or a hash of at most {HASH_BYTES} bytes, got {len(prefix)}"
            )
        asked = self._ladder.request(owner) if owner else None
        names = {namespace.fingerprint: namespace for namespace in self._ladder.namespaces()}
        blocks = self._blocks(prefix, names, request.namespace) if prefix else []
        return {"request": None if asked is None else self._asked(asked, names), "blocks": blocks}

    def _asked(self, asked: Asked, names: Mapping[Fingerprint, Namespace]) -> dict[str, Any]:
        namespace = names.get(Fingerprint(asked.space))
        tokens = namespace.block_tokens if namespace else 0
        document = {
            "request": asked.owner,
            "at": asked.at,
            **_named(asked.space, names),
            "class": asked.retention_class,
            "asked_blocks": asked.asked,
            "found_blocks": asked.found,
            "delivered_blocks": asked.delivered,
            "block_tokens": tokens,
            "tiers": [{"tier": str(run.tier), "blocks": run.count} for run in asked.tiers],
        }
        return {**document, **self._verdict(asked.reason, asked.stopped_at, asked.departed, at=asked.at)}

    def _blocks(
        self, prefix: bytes, names: Mapping[Fingerprint, Namespace], wanted: bytes
    ) -> list[dict[str, Any]]:
        now = self._ladder.wall()
        found: list[dict[str, Any]] = []
        for space, key, run in self._ladder.present(prefix, pause=pause):
            if wanted and space != wanted:
                continue
            there = {
                "class": run.retention_class,
                "tiers": [str(tier) for tier in run.tiers],
                "touched_at": run.touched_at,
                "expires_at": run.expires_at if math.isfinite(run.expires_at) else None,
            }
            hidden = run.expires_at <= now
            reason = MissReason.EXPIRED if hidden else None
            left = Departed(MissReason.EXPIRED, run.retention_class, run.touched_at, run.expires_at)
            verdict = self._verdict(reason, key, left if hidden else None, at=now)
            found.append({**_named(space, names), "present": there, **verdict})
        if found or len(prefix) < LEDGER_KEY_BYTES:
            return found
        for space, why, departed in self._ladder.departed(prefix):
            if (departed is not None or space == wanted) and wanted in (b"", space):
                found.append(
                    {**_named(space, names), "present": None, **self._verdict(why, prefix, departed, at=now)}
                )
        return found

    def _verdict(
        self, reason: MissReason | None, key: bytes, departed: Departed | None, *, at: float
    ) -> dict[str, Any]:
        left = None
        if departed is not None:
            left = {
                "class": departed.retention_class,
                "touched_at": departed.since,
                "left_at": departed.left_at,
                "evicted_bytes_since": departed.evicted_bytes,
            }
        return {
            "reason": None if reason is None else str(reason),
            "stopped_at": key.hex(),
            "departed": left,
            "remedy": "" if reason is None else self._remedy(reason, departed, at),
        }

    def _remedy(self, reason: MissReason, departed: Departed | None, at: float) -> str:
        if departed is None or reason not in (MissReason.EXPIRED, MissReason.EVICTED):
            return REMEDIES.get(reason, "")
        held_by = self._ladder.class_table().classes.get(departed.retention_class)
        if reason is MissReason.EXPIRED:
            return _longer(departed, held_by, at - departed.since)
        size = bytes_text(departed.evicted_bytes)
        quota = f", or a larger quota of class {held_by.name}" if held_by and held_by.quota_bytes else ""
        return f"it was evicted for want of room: {size} more of it{quota} would have kept it"


def _longer(departed: Departed, held_by: RetentionClass | None, needed: float) -> str:
    now = f", now {span_text(held_by.ttl_seconds)}," if held_by else ""
    return (
        f"it was needed {span_text(needed)} after its last touch: a life of class {departed.retention_class} "
        f"longer than that{now} would have kept it"
    )


def _named(space: bytes, names: Mapping[Fingerprint, Namespace]) -> dict[str, Any]:
    namespace = names.get(Fingerprint(space))
    return {
        "namespace": space.hex(),
        "model": namespace.model if namespace else "",
        "tenant": namespace.tenant if namespace else "",
    }


def span_text(seconds: float) -> str:
    """Return a time as a setting would be written: `3d`, `90m`."""
    if not math.isfinite(seconds):
        return "forever"
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * size or seconds == size:
            return f"{seconds / size:.1f}".removesuffix(".0") + unit
    return f"{seconds:.0f}s" if seconds >= 1 else f"{1000 * seconds:.0f}ms"
