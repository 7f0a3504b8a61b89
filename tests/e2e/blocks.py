"""A small namespace with real bytes, put and fetched over the wire."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from kvstore.api import MatchAnswer, MatchRequest, OutcomeRun, PartDigests, ReserveRequest
from kvstore.hashing import block_hashes, chain_root
from kvstore.layout import Layout
from kvstore.namespace import Namespace
from kvstore.rpc import wire
from kvstore.rpc.v1 import data_pb2 as pb
from kvstore.types import AckTier, MatchMode, PutOutcome, key_count
from tests.e2e.served import Wire

LAYOUT = Layout.single(dtype="u8", bytes_max=20_000, layers=2, segments=2)
PART = LAYOUT.parts[0]
NAMESPACE = Namespace(model="tiny", weights="v1", layout=LAYOUT, block_tokens=16)
ROOT = chain_root(NAMESPACE.fingerprint)


def keys_of(blocks: int, *, seed: int = 0) -> bytes:
    """Return the keys of a prompt of `blocks` blocks."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 20, blocks * NAMESPACE.block_tokens)
    return block_hashes(ROOT, tokens, block_tokens=NAMESPACE.block_tokens)


def payload(keys: bytes, block: int) -> bytes:
    """Return the bytes of a block, a function of its key."""
    seed = int.from_bytes(keys[32 * block : 32 * block + 8], "little")
    return np.random.default_rng(seed).integers(0, 256, PART.bytes_max, np.uint8).tobytes()


def digests(data: bytes) -> bytes:
    """Return the digests of one block."""
    return b"".join(xxhash.xxh3_128_digest(data[s.offset : s.offset + s.length]) for s in PART.segments)


def open_namespace(client: Wire) -> None:
    """Open the namespace, beside any session."""
    client.data.Open(wire.open_to_wire(NAMESPACE, root=ROOT), metadata=client.metadata)


def put_requests(keys: bytes, *, ack: AckTier, spoiled: int = -1) -> Iterator[pb.PutRequest]:
    """Yield a framed put; block `spoiled` arrives with another byte than its digest says."""
    reserve = ReserveRequest(namespace=NAMESPACE.fingerprint, parent=ROOT, keys=keys)
    records = [payload(keys, block) for block in range(key_count(keys))]
    said = PartDigests(0, 0, b"", b"".join(map(digests, records)))
    yield wire.put_header_to_wire(reserve, [said], ack=ack)
    for block, record in enumerate(records):
        data = bytes([record[0] ^ 1]) + record[1:] if block == spoiled else record
        for offset in range(0, len(data), 16_384):
            piece = data[offset : offset + 16_384]
            yield pb.PutRequest(chunk=pb.PutRequest.Chunk(part=0, block=block, offset=offset, data=piece))


def put(
    client: Wire, keys: bytes, *, ack: AckTier = AckTier.SSD, spoiled: int = -1
) -> list[tuple[PutOutcome, int]]:
    """Put blocks through the framed stream and return the outcomes."""
    reply = client.data.Put(put_requests(keys, ack=ack, spoiled=spoiled), metadata=client.metadata)
    runs: tuple[OutcomeRun, ...] = wire.outcomes_from_wire(reply.outcomes)
    return [(run.outcome, run.count) for run in runs]


def match_request(keys: bytes, *, mode: MatchMode = MatchMode.LEASE) -> pb.MatchRequest:
    """Return a match request."""
    return wire.match_to_wire(MatchRequest(namespace=NAMESPACE.fingerprint, keys=keys, mode=mode))


def match(client: Wire, keys: bytes, *, mode: MatchMode = MatchMode.LEASE) -> MatchAnswer:
    """Match by the unary twin."""
    reply = client.data.Match(match_request(keys, mode=mode), metadata=client.metadata)
    return wire.match_answer_from_wire(reply, LAYOUT)


def fetch(client: Wire, lease: int) -> dict[int, bytes]:
    """Fetch a lease's blocks through the framed stream."""
    got: dict[int, bytes] = {}
    for reply in client.data.Fetch(pb.FetchRequest(lease=lease, payload=True), metadata=client.metadata):
        assert reply.boot_id
        if reply.WhichOneof("message") == "chunk":
            assert len(got.get(reply.chunk.block, b"")) == reply.chunk.offset
            got[reply.chunk.block] = got.get(reply.chunk.block, b"") + reply.chunk.data
    return got


def assert_fetched(client: Wire, keys: bytes) -> None:
    """Check that all blocks come back with their bytes."""
    answer = match(client, keys)
    assert answer.blocks == key_count(keys)
    got = fetch(client, answer.lease)
    assert got == {block: payload(keys, block) for block in range(key_count(keys))}
    client.data.Release(
        pb.ReleaseRequest(lease=answer.lease, used=answer.blocks, outcome=pb.RELEASE_OUTCOME_USED),
        metadata=client.metadata,
    )
