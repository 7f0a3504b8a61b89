"""The administration service: what tools and operators ask. Nothing here is on an engine's path."""
# ruff: noqa: N802 - the contract names the methods

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from typing import Any

from kvstore.api import StatusSnapshot
from kvstore.core.ladder import Ladder
from kvstore.errors import InvalidArgument
from kvstore.events import Events
from kvstore.rpc import wire
from kvstore.rpc.enums import MISS_REASON, TIER
from kvstore.rpc.packing import fingerprint_of, keys_of
from kvstore.rpc.v1 import admin_pb2 as pb
from kvstore.rpc.v1 import admin_pb2_grpc
from kvstore.service.administrator import Administrator
from kvstore.service.class_changes import pause
from kvstore.service.gate import Gate
from kvstore.service.servicer import Context, refuse
from kvstore.types import HASH_BYTES

INSPECT_RUNS_MAX = 1000
FAULTS_MAX = 1000


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Serves one listener. `about` returns what the daemon knows of itself, JSON-ready.

    Threads: the event loop; verify reads on `workers`, segments and status too, for they may ask the disk.
    """

    def __init__(
        self,
        ladder: Ladder,
        *,
        administrator: Administrator,
        gate: Gate,
        events: Events,
        workers: Executor,
        boot_id: int,
        about: Callable[[], dict[str, Any]],
    ) -> None:
        self._ladder = ladder
        self._administrator = administrator
        self._gate = gate
        self._events = events
        self._workers = workers
        self._boot_id = boot_id
        self._about = about

    async def _off_loop(self, context: Context, work: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, work)
        except Exception as error:
            await refuse(context, error, self._events)

    async def _answer(self, context: Context, work: Callable[[], dict[str, Any]]) -> pb.Document:
        document = await self._off_loop(context, lambda: json.dumps(json_ready(work())))
        return pb.Document(document=document, boot_id=self._boot_id)

    async def Retention(self, request: pb.RetentionRequest, context: Context) -> pb.Document:
        """Return the retention classes, or change one."""
        return await self._answer(context, lambda: self._administrator.retention(request))

    async def Forecast(self, request: pb.ForecastRequest, context: Context) -> pb.Document:
        """Return what expires when."""
        return await self._answer(context, lambda: self._administrator.forecast(request))

    async def HitRate(self, request: pb.HitRateRequest, context: Context) -> pb.Document:
        """Return hit rates of the recent past."""
        return await self._answer(context, lambda: self._administrator.hit_rate(request))

    async def Advice(self, request: pb.AdviceRequest, context: Context) -> pb.Document:
        """Return what a longer life or more room would have kept."""
        return await self._answer(context, self._administrator.advice)

    async def Why(self, request: pb.WhyRequest, context: Context) -> pb.Document:
        """Return why a request or a block missed."""
        return await self._answer(context, lambda: self._administrator.why(request))

    async def Purge(self, request: pb.PurgeRequest, context: Context) -> pb.Document:
        """Remove for good."""
        return await self._answer(context, lambda: self._administrator.purge(request))

    async def Receipts(self, request: pb.ReceiptsRequest, context: Context) -> pb.Document:
        """Return the receipts of purges."""
        return await self._answer(context, lambda: self._administrator.receipts(request))

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        """Return everything `status` prints; answers also while draining or failed."""
        document = await self._off_loop(context, lambda: self._document(self._ladder.status(pause=pause)))
        return pb.StatusReply(document=document, boot_id=self._boot_id)

    def _document(self, snapshot: StatusSnapshot) -> str:
        document = {**self._about(), **dataclasses.asdict(snapshot)}
        return json.dumps(json_ready(document))

    async def Namespaces(self, request: pb.NamespacesRequest, context: Context) -> pb.NamespacesReply:
        """Return the open namespaces and what they hold."""

        def work() -> pb.NamespacesReply:
            held = {row["fingerprint"]: row for row in self._ladder.status(pause=pause).namespaces}
            infos = []
            for namespace in self._ladder.namespaces():
                row = held.get(namespace.fingerprint.hex(), {})
                sizes = {key: int(row.get(key, 0)) for key in ("blocks", "host_bytes", "ssd_bytes")}
                infos.append(
                    pb.NamespaceInfo(
                        fingerprint=namespace.fingerprint, canonical=namespace.canonical(), **sizes
                    )
                )
            return pb.NamespacesReply(namespaces=infos, boot_id=self._boot_id)

        reply: pb.NamespacesReply = await self._off_loop(context, work)
        return reply

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectReply:
        """Return the runs behind the keys of a prompt, or behind the first bytes of a hash."""

        def work() -> pb.InspectReply:
            if len(request.hash_prefix) > HASH_BYTES:
                raise InvalidArgument(
                    f"inspect.hash_prefix: at most {HASH_BYTES} bytes, got {len(request.hash_prefix)}"
                )
            runs, visible, reason = self._ladder.inspect(
                fingerprint_of(request.namespace, "inspect.namespace"),
                keys=keys_of(request.keys, "inspect.keys"),
                hash_prefix=request.hash_prefix,
                limit=min(request.limit or 100, INSPECT_RUNS_MAX),
            )
            return pb.InspectReply(
                runs=[wire.run_info_to_wire(run) for run in runs],
                visible_blocks=visible,
                reason=MISS_REASON.to_wire_optional(reason),
                boot_id=self._boot_id,
            )

        reply: pb.InspectReply = await self._off_loop(context, work)
        return reply

    async def Segments(self, request: pb.SegmentsRequest, context: Context) -> pb.SegmentsReply:
        """Return the segments of the data directory."""

        def work() -> pb.SegmentsReply:
            rows = [pb.SegmentInfo(**dataclasses.asdict(info)) for info in self._ladder.segments()]
            return pb.SegmentsReply(segments=rows, boot_id=self._boot_id)

        reply: pb.SegmentsReply = await self._off_loop(context, work)
        return reply

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> AsyncIterator[pb.VerifyReply]:
        """Re-read everything and check every digest; a reply per step."""
        try:
            self._gate.admit()
            wanted = fingerprint_of(request.namespace, "verify.namespace") if request.namespace else None
            steps: Iterator[Any] = iter(self._ladder.verify(wanted))
            loop = asyncio.get_running_loop()
            last = pb.VerifyReply(boot_id=self._boot_id)
            while (step := await loop.run_in_executor(self._workers, next, steps, None)) is not None:
                last = self._step(step)
                yield last
            # The faults went out with their steps; the end repeats the counts alone.
            yield pb.VerifyReply(
                blocks_done=last.blocks_done,
                blocks_total=last.blocks_total,
                bytes_done=last.bytes_done,
                done=True,
                boot_id=self._boot_id,
            )
        except Exception as error:
            await refuse(context, error, self._events)

    def _step(self, step: Any) -> pb.VerifyReply:
        faults = [
            pb.VerifyFault(
                namespace=fault.namespace, key=fault.key, tier=TIER.to_wire(fault.tier), detail=fault.detail
            )
            for fault in step.faults[:FAULTS_MAX]
        ]
        return pb.VerifyReply(
            blocks_done=step.blocks_done,
            blocks_total=step.blocks_total,
            bytes_done=step.bytes_done,
            faults=faults,
            boot_id=self._boot_id,
        )


def json_ready(value: Any) -> Any:
    """Return a value that strict JSON can carry: bytes as hex, an infinite time as null."""
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
