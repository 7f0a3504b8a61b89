"""A daemon in this process that does what a test tells it: a real socket and arena, a dict for a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np

from kvstore.api import CommitAnswer, Extent, MatchAnswer, OutcomeRun, Progress, ReserveAnswer, TierRun
from kvstore.arena import Arena, ArenaHeader
from kvstore.layout import Layout
from kvstore.locks import ClientLocks
from kvstore.rpc import wire
from kvstore.rpc.packets import SOCKET_SUFFIX
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.rpc.v1 import data_pb2_grpc
from kvstore.types import HASH_BYTES, PAGE_BYTES, MissReason, PutOutcome, Tier
from tests.unit.client.fake_plain import FakePlain

Answer = dict[str, Any] | None
Script = Callable[[pb.SessionRequest], Answer]


class FakeDaemon(data_pb2_grpc.DataServicer):
    """Serves one layout of one part. `scripts` replaces verbs; `gate`, while cleared, hangs every session."""

    def __init__(
        self,
        directory: Path,
        layout: Layout,
        *,
        boot_id: int = 1,
        mapped: bool = True,
        plain: bool = False,
    ) -> None:
        self.address = f"unix:{directory / 'fake.sock'}"
        self.layout = layout
        self.boot_id = boot_id
        self.mapped = mapped
        self.scripts: dict[str, Script] = {}
        self.seen: list[pb.SessionRequest] = []
        self.gate = threading.Event()
        self.gate.set()
        self.heard = threading.Condition()
        self.blocks: dict[bytes, tuple[int, int, bytes]] = {}
        self.metadata: list[dict[str, Any]] = []
        self.ended = 0
        """Sessions whose client is gone."""
        self._reserved: list[bytes] = []
        self._sessions: list[SimpleQueue[pb.SessionReply | None]] = []
        self._arena_path = directory / f"arena-{boot_id}"
        header = ArenaHeader.plan(1 << 20, arena_id=boot_id, boot_id=boot_id, owner=b"fake")
        with self._arena_path.open("wb") as file:
            file.write(header.pack())
            file.truncate(header.total_pages * PAGE_BYTES)
        self.arena = Arena.map(self._arena_path, writable=True)
        self._next_page = header.first_page
        self.locks = ClientLocks(directory / f"locks-{boot_id}")
        self._server = grpc.server(ThreadPoolExecutor(16))
        data_pb2_grpc.add_DataServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()
        path = f"{directory / 'fake.sock'}{SOCKET_SUFFIX}"
        self.plain = FakePlain(path, self.Session) if plain else None

    def stop(self) -> None:
        """Die: sessions break, the socket goes."""
        self.gate.set()
        for session in self._sessions:
            session.put(None)
        self._server.stop(None).wait()
        if self.plain is not None:
            self.plain.stop()
        self.locks.close()
        self._arena_path.unlink(missing_ok=True)

    def waits_for(self, verb: str, count: int = 1) -> list[Any]:
        """Wait until `count` requests of a verb were seen; return them."""

        def found() -> list[Any]:
            return [getattr(r, verb) for r in list(self.seen) if r.WhichOneof("verb") == verb]

        with self.heard:
            assert self.heard.wait_for(lambda: len(found()) >= count, 10), f"no {count} x {verb}: {self.seen}"
            return found()

    def send(self, number: int, **answer: Any) -> None:
        """Send a reply on the latest session."""
        self._sessions[-1].put(pb.SessionReply(request_id=number, boot_id=self.boot_id, **answer))

    def Session(self, requests: Iterator[pb.SessionRequest], context: Any) -> Iterator[pb.SessionReply]:
        replies: SimpleQueue[pb.SessionReply | None] = SimpleQueue()
        self._sessions.append(replies)
        self.metadata.append(dict(context.invocation_metadata()))
        number = len(self._sessions)

        def read() -> None:
            try:
                for request in requests:
                    self.gate.wait()
                    answer = self._answer(request, number)
                    if answer is not None and request.request_id:
                        replies.put(
                            pb.SessionReply(request_id=request.request_id, boot_id=self.boot_id, **answer)
                        )
                    with self.heard:
                        self.seen.append(request)
                        self.heard.notify_all()
            except Exception:
                pass  # the stream broke
            self.ended += 1
            replies.put(None)

        threading.Thread(target=read, daemon=True).start()
        yield from iter(replies.get, None)

    def _answer(self, request: pb.SessionRequest, session: int) -> Answer:
        verb = request.WhichOneof("verb") or ""
        if verb in self.scripts:
            return self.scripts[verb](request)
        if verb == "hello":
            return {"hello": self._hello(session)}
        if verb == "open":
            namespace = wire.open_from_wire(request.open)
            return {"open": pb.OpenReply(fingerprint=namespace.fingerprint, siblings=["rope differs"])}
        if verb == "match":
            return {"match": wire.match_answer_to_wire(self.match(request.match.keys), layout=self.layout)}
        if verb == "reserve":
            return {"reserve": wire.reserve_answer_to_wire(self.reserve(request.reserve.keys))}
        if verb == "commit":
            return {"commit": wire.commit_answer_to_wire(self.commit(request.commit))}
        return {verb: getattr(pb, f"{verb.capitalize()}Reply")()}

    def _hello(self, session: int) -> pb.HelloReply:
        reply = pb.HelloReply(protocol=1, session=session, server="fake")
        if self.mapped:
            reply.arena_path = str(self._arena_path)
            reply.arena_id = self.boot_id
            reply.lock_path = str(self.locks.path)
        return reply

    def match(self, keys: bytes, *, lease: int = 77) -> MatchAnswer:
        """Return what the dict holds of the keys, all resident."""
        names = [keys[i : i + HASH_BYTES] for i in range(0, len(keys), HASH_BYTES)]
        count = next((i for i, name in enumerate(names) if name not in self.blocks), len(names))
        reason = None if count == len(names) else MissReason.NEVER_STORED
        if not count:
            return MatchAnswer(blocks=0, reason=reason)
        return MatchAnswer(
            blocks=count,
            reason=reason,
            lease=lease,
            lease_seconds=30.0,
            tiers=(TierRun(Tier.HOST, count),),
            extents=(self.extent(names[:count]),),
        )

    def extent(self, names: list[bytes], *, first: int = 0) -> Extent:
        """Return the extent of stored blocks."""
        slots, lengths, digests = zip(*(self.blocks[name] for name in names), strict=True)
        pages = np.array(slots, dtype=np.uint32)
        return Extent(
            part=0,
            first=first,
            slots=pages,
            generations=self.arena.generations[pages].copy(),
            lengths=np.array(lengths, dtype=np.uint32),
            digests=b"".join(digests),
        )

    def progress(self, keys: bytes, *, first: int, count: int, done: bool, blocks: int) -> pb.ProgressEvent:
        """Return the news that some blocks became resident."""
        names = [keys[(first + i) * HASH_BYTES : (first + i + 1) * HASH_BYTES] for i in range(count)]
        extents = (self.extent(names, first=first),) if names else ()
        return wire.progress_to_wire(Progress(77, extents, done, blocks), layout=self.layout)

    def reserve(self, keys: bytes) -> ReserveAnswer:
        """Lend slots for every block that is not stored."""
        part = self.layout.parts[0]
        names = [keys[i : i + HASH_BYTES] for i in range(0, len(keys), HASH_BYTES)]
        have = next((i for i, name in enumerate(names) if name not in self.blocks), len(names))
        self._reserved = names[have:]
        outcomes = [OutcomeRun(PutOutcome.DUPLICATE, have)] if have else []
        if not self._reserved:
            return ReserveAnswer(reservation=0, outcomes=tuple(outcomes))
        count = len(self._reserved)
        slots = np.arange(count, dtype=np.uint32) * part.stride_pages + self._next_page
        self._next_page += count * part.stride_pages
        extent = Extent(0, have, slots, np.zeros(count, np.uint32), np.zeros(count, np.uint32))
        self._slots = slots
        outcomes.append(OutcomeRun(PutOutcome.RESERVED, count))
        return ReserveAnswer(reservation=5, outcomes=tuple(outcomes), extents=(extent,), seconds=60.0)

    def commit(self, message: pb.CommitRequest) -> CommitAnswer:
        """Store what was reserved."""
        width = 16 * len(self.layout.parts[0].segments)
        lengths = np.frombuffer(b"".join(p.lengths for p in message.parts), dtype="<u4")
        digests = b"".join(p.digests for p in message.parts)
        for index, name in enumerate(self._reserved):
            digest = digests[index * width : (index + 1) * width]
            self.blocks[name] = (int(self._slots[index]), int(lengths[index]), digest)
        return CommitAnswer(outcomes=(OutcomeRun(PutOutcome.STORED_HOST, len(self._reserved)),))

    def Put(self, requests: Iterator[pb.PutRequest], context: Any) -> pb.PutReply:
        reserve, digests, _ = wire.put_header_from_wire(next(requests))
        part = self.layout.parts[0]
        answer = self.reserve(reserve.keys)
        lengths = np.frombuffer(b"".join(p.lengths for p in digests), dtype="<u4")
        packed = b"".join(p.digests for p in digests)
        width, skipped = 16 * len(part.segments), len(reserve.keys) // HASH_BYTES - len(self._reserved)
        for request in requests:
            chunk = request.chunk
            if chunk.block < skipped:
                continue
            start = int(self._slots[chunk.block - skipped]) * PAGE_BYTES + chunk.offset
            self.arena.bytes[start : start + len(chunk.data)] = np.frombuffer(chunk.data, np.uint8)
        for index, name in enumerate(self._reserved, skipped):
            slot = int(self._slots[index - skipped])
            self.blocks[name] = (slot, int(lengths[index]), packed[index * width : (index + 1) * width])
        outcomes = [
            OutcomeRun(PutOutcome.STORED_HOST, run.count) if run.outcome is PutOutcome.RESERVED else run
            for run in answer.outcomes
        ]
        return pb.PutReply(outcomes=wire.outcomes_to_wire(outcomes), boot_id=self.boot_id)

    def Fetch(self, request: pb.FetchRequest, context: Any) -> Iterator[pb.FetchReply]:
        self.gate.wait(10)
        extent = self.extent(list(self.blocks))
        event = wire.progress_to_wire(Progress(request.lease, (extent,), True, extent.count))
        yield pb.FetchReply(progress=event, boot_id=self.boot_id)
        for index in range(extent.count if request.payload else 0):
            base = int(extent.slots[index]) * PAGE_BYTES
            length = int(extent.lengths[index])
            for offset in range(0, length, 3000):
                data = self.arena.bytes[base + offset : base + min(length, offset + 3000)].tobytes()
                chunk = pb.FetchReply.Chunk(part=0, block=index, offset=offset, data=data)
                yield pb.FetchReply(chunk=chunk, boot_id=self.boot_id)
