"""What the store tells about itself: runs for `list` and `inspect`, totals for `status`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import date, timedelta
from itertools import islice
from typing import Any

from kvstore.api import ListAnswer, RunInfo, StatusSnapshot
from kvstore.core.catalog import Catalog
from kvstore.core.frames import Node
from kvstore.core.searching import Described
from kvstore.core.sleepers import Sleepers
from kvstore.errors import InvalidArgument
from kvstore.retention import DAY
from kvstore.tiers.base import FrameKind
from kvstore.tiers.base import Tier as TierSeam
from kvstore.types import HASH_BYTES, PAGE_BYTES, BlockHash, Fingerprint, Tier, split_keys

LIST_LIMIT_MAX = 1000
WRITTEN_ROWS_MAX = 200
"""Of days and classes, the newest: a month and more."""
Sums = dict[str, float]
Present = list[tuple[Fingerprint, bytes, RunInfo]]
"""Runs, each with its namespace and the hash of a block that it holds."""
RUNS_AT_ONCE = 32
"""Of a page, under the lock."""


def run_info(catalog: Catalog, node: Node) -> RunInfo:
    """Describe one node."""
    host = sum(int(p.frame.resident(p.start, p.count).sum()) for p in node.slices)
    ssd = sum(p.count for p in node.slices if p.frame.location is not None)
    tiers = tuple(tier for tier, blocks in ((Tier.HOST, host), (Tier.SSD, ssd)) if blocks)
    return RunInfo(
        parent=BlockHash(node.parent_hash),
        keys=node.keys,
        tiers=tiers,
        host_blocks=host,
        ssd_blocks=ssd,
        retention_class=node.retention_class,
        written_at=min(p.frame.written_at for p in node.slices),
        touched_at=node.since,
        expires_at=catalog.retention.end(node),
        bytes=sum(p.count * p.frame.block_stride_bytes for p in node.slices),
        provenance=max(p.frame.provenance for p in node.slices),
        leased=any(p.frame.holds for p in node.slices),
    )


def stand_ins(catalog: Catalog, described: Iterable[Described]) -> Iterator[Node]:
    """Yield nodes for what sleeps, to be looked at."""
    for sleeper, header in described:
        yield from catalog.sleepers.described(sleeper, header)


class Page:
    """One page of runs in order of their head hashes, of all that come in any order; the cursor is the last
    place seen.
    """

    def __init__(self, catalog: Catalog, *, after: bytes, limit: int) -> None:
        self.after = after
        self._catalog = catalog
        self._limit = limit
        self._found: list[tuple[bytes, int, Node]] = []
        self._seen = 0

    def take(self, nodes: Iterable[Node]) -> None:
        """Look at some runs."""
        fresh = []
        for node in nodes:
            if node.count and (place := _place(node)) > self.after:
                self._seen += 1
                fresh.append((place, self._seen, node))
        if len(self._found) > self._limit:
            last = self._found[-1][0]
            fresh = [item for item in fresh if item[0] < last]
        if fresh:
            self._found = sorted([*self._found, *fresh])[: self._limit + 1]

    def answer(self, lock: AbstractContextManager[object]) -> ListAnswer:
        """Return the page. Takes the lock a few times."""
        page = self._found[: self._limit]
        more = page[-1][0].hex() if len(self._found) > self._limit else ""
        runs: list[RunInfo] = []
        for start in range(0, len(page), RUNS_AT_ONCE):
            with lock:
                some = page[start : start + RUNS_AT_ONCE]
                runs += (run_info(self._catalog, node) for _, _, node in some if node.count)
        return ListAnswer(runs=tuple(runs), cursor=more)


def place_of(cursor: str, *, limit: int) -> bytes:
    """Return the place behind which a page begins.

    Errors: InvalidArgument on a cursor that is no hash or a limit out of range.
    """
    if not 1 <= limit <= LIST_LIMIT_MAX:
        raise InvalidArgument(f"list: limit must be 1..{LIST_LIMIT_MAX}, got {limit}")
    try:
        return bytes.fromhex(cursor)
    except ValueError as error:
        raise InvalidArgument(f"list: cursor {cursor!r} did not come from a previous page") from error


def _place(node: Node) -> bytes:
    """The order of pages: side parts come behind the run that starts with the same block, the slices of a
    frame asleep, which is known by its first block, one after the other.
    """
    frame = node.slices[0].frame
    if not frame.nodes:
        return frame.keys[:HASH_BYTES] + (0).to_bytes(2, "big") + node.slices[0].start.to_bytes(4, "big")
    side = frame.parts[0].index + 1 if frame.kind is FrameKind.SIDE else 0
    return node.head + side.to_bytes(2, "big")


def find_runs(
    catalog: Catalog,
    nodes: Iterable[Node],
    found: Present,
    *,
    hash_prefix: bytes,
    limit: int,
) -> None:
    """Add runs that hold a block whose hash starts with the given bytes, with their namespace and that
    hash.
    """
    for node in nodes:
        if len(found) >= limit:
            return
        if node.count and hash_prefix in (keys := node.keys):
            names = (key for key in split_keys(keys) if key.startswith(hash_prefix))
            for key in islice(names, 1):
                found.append((node.slices[0].frame.fingerprint, key, run_info(catalog, node)))


class Totals:
    """What the runs of each class and namespace hold: those awake are counted on a walk, those asleep always
    are.
    """

    def __init__(self) -> None:
        self.by_class: defaultdict[str, Sums] = defaultdict(lambda: defaultdict(float))
        self.by_space: defaultdict[bytes, Sums] = defaultdict(lambda: defaultdict(float))

    def visit(self, node: Node) -> None:
        """Count a run that is awake."""
        sums = self.by_space[node.slices[0].frame.fingerprint], self.by_class[node.retention_class]
        for piece in node.slices:
            resident = piece.frame.host is not None
            host = int(piece.frame.resident(piece.start, piece.count).sum()) if resident else 0
            ssd = piece.count if piece.frame.location is not None else 0
            _add(piece.count, host, ssd, piece.frame.block_stride_bytes, sums)

    def add_asleep(self, sleepers: Sleepers) -> None:
        """Count what sleeps."""
        for (shape_number, class_number), blocks in sleepers.blocks_held.items():
            shape, name = sleepers.names.shapes[shape_number], sleepers.names.classes[class_number]
            sums = self.by_space[shape.namespace], self.by_class[name]
            _add(blocks, 0, blocks, shape.block_stride_bytes, sums)


def _add(blocks: int, host: int, ssd: int, stride: int, sums: Iterable[Sums]) -> None:
    for total in sums:
        total["blocks"] += blocks
        total["host_blocks"] += host
        total["ssd_blocks"] += ssd
        total["host_bytes"] += host * stride
        total["ssd_bytes"] += ssd * stride


def status(
    catalog: Catalog, ssd: TierSeam | None, gauges: dict[str, float], totals: Totals
) -> StatusSnapshot:
    """Return totals by tier, class and namespace."""
    by_class, namespaces = totals.by_class, []
    for state in catalog.namespaces.values():
        sums = totals.by_space[state.fingerprint]
        names = {
            "fingerprint": state.fingerprint.hex(),
            "model": state.namespace.model,
            "tenant": state.namespace.tenant,
        }
        namespaces.append({**names, **{key: int(sums[key]) for key in ("blocks", "host_bytes", "ssd_bytes")}})
    blocks = {tier: int(sum(c[f"{tier}_blocks"] for c in by_class.values())) for tier in ("host", "ssd")}
    return StatusSnapshot(
        tiers=(
            _host(catalog, blocks["host"]),
            *(_ssd(catalog, ssd, blocks["ssd"]) if ssd is not None else ()),
        ),
        classes=tuple(_class_row(catalog, name, by_class[name]) for name in catalog.retention.classes),
        namespaces=tuple(namespaces),
        counters={_flat(name, labels): value for (name, labels), value in catalog.events.counters().items()},
        gauges=gauges,
    )


def _host(catalog: Catalog, blocks: int) -> dict[str, Any]:
    capacity = catalog.slabs.usable_pages * PAGE_BYTES
    used = catalog.slabs.used_pages * PAGE_BYTES
    row = {
        "tier": "host",
        "state": "ok",
        "capacity_bytes": capacity,
        "used_bytes": used,
        "free_bytes": capacity - used,
    }
    return {**row, "blocks": blocks, "detail": ""}


def _ssd(catalog: Catalog, ssd: TierSeam, blocks: int) -> tuple[dict[str, Any], ...]:
    usage, health = ssd.usage(), ssd.healthy()
    state = "ok" if health.readable and health.writable else "read-only" if health.readable else "down"
    row = {
        "tier": "ssd",
        "state": state,
        "capacity_bytes": usage.capacity_bytes,
        "used_bytes": usage.used_bytes,
    }
    more = {
        "free_bytes": usage.free_bytes,
        "blocks": blocks,
        "detail": health.detail,
        "segments": usage.segments,
        "since": health.since,
        "scrub": health.scrub,
        "today": _date(int(catalog.retention.now() // DAY)),
        "written": [
            {"day": _date(item.day), "class": item.retention_class, "bytes": item.bytes}
            for item in ssd.written()[-WRITTEN_ROWS_MAX:]
        ],
    }
    return (
        {**row, **more, "living_bytes": catalog.segments.used_bytes, "written_bytes": usage.written_bytes},
    )


def _date(day: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=day)).isoformat()


def _class_row(catalog: Catalog, name: str, sums: dict[str, float]) -> dict[str, Any]:
    held_by = catalog.retention.classes[name]
    fixed = {
        "class": name,
        "ttl_seconds": held_by.ttl_seconds,
        "mode": str(held_by.mode),
        "lowest_tier": str(held_by.lowest_tier),
        "quota_bytes": held_by.quota_bytes,
    }
    fixed |= {f"quota_{tier}_bytes": held for tier, held in catalog.quotas.held_bytes(name).items()}
    return {**fixed, **{key: int(sums[key]) for key in ("blocks", "host_bytes", "ssd_bytes")}}


def _flat(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    return name + ("{" + ",".join(f"{key}={value}" for key, value in labels) + "}" if labels else "")
