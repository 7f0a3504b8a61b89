"""The smallest engine with an adapter: docs/adapters.md explains it, and it proves that the suite can fail.

Its KV is a chain of hashes and its next token a hash over all of the KV, so that one wrong byte anywhere is
another answer. `ranks` shards keep a share of every token each, as tensor parallel ranks do.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.api import PartBlocks, TierRun
from kvstore.client import Client, Match
from kvstore.hashing import block_hashes, chain_root
from kvstore.layout import CacheGroup, Layout, Part, Segment
from kvstore.namespace import Namespace
from kvstore.testing.adapter_suite.harness import Answer, Cancelled
from kvstore.types import HASH_BYTES, BlockHash, MissReason, ReleaseOutcome, key_at

VOCABULARY = 1 << 16
STATE_BYTES = 64
LOADS_MAX = 8
Kv = npt.NDArray[np.uint8]
"""[tokens, STATE_BYTES]; the last row is what the next token's depends on."""
_requests = itertools.count()


class ToyModel:
    """What computes: one row of KV for every token."""

    def __init__(self, weights: str) -> None:
        self.weights = weights

    def extend(self, kv: Kv, tokens: Sequence[int]) -> Kv:
        """Return `kv` and a row more for each token."""
        rows = [kv[-1].tobytes() if len(kv) else b""]
        for token in tokens:
            text = rows[-1] + token.to_bytes(4) + self.weights.encode()
            rows.append(hashlib.blake2b(text, digest_size=STATE_BYTES).digest())
        new = np.frombuffer(b"".join(rows[1:]), np.uint8).reshape(-1, STATE_BYTES)
        return np.concatenate([kv, new])

    def next_token(self, kv: Kv) -> int:
        """Return the token that follows."""
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(kv).data) % VOCABULARY


@dataclass(frozen=True, slots=True)
class Found:
    """What a rank's match found."""

    blocks: int
    reason: MissReason | None
    tiers: tuple[TierRun, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank's fetch brought: the first `good` rows are right."""

    good: int
    reason: MissReason | None
    rows: Kv


class ToyRank:
    """One rank's adapter: its shard of every block, in a client of its own.

    What goes in and out can be sent: a rank may live in a process of its own.
    """

    def __init__(
        self, address: str, namespace: Namespace, *, rank: int, patience_seconds: float, verify: bool = True
    ) -> None:
        self._client = Client(address)
        self._space = self._client.open(namespace)
        self._part = namespace.layout.parts[rank]
        self._patience_seconds = patience_seconds
        self._verify = verify
        self._matches: dict[str, Match] = {}

    def match(self, keys: bytes, owner: str) -> Found:
        """Ask what is there: the same answer for all ranks of a request, as long as its leases live."""
        wait, parts = self._patience_seconds, [self._part.index]
        match = self._space.match(keys, owner=owner, parts=parts, deadline_seconds=wait)
        self._matches[owner] = match
        return Found(match.blocks, match.reason, match.tiers)

    def load(self, owner: str, blocks: int) -> Loaded:
        """Bring this rank's share of the first `blocks` blocks."""
        # Memory is not left as it was found: what did not come must not look right by chance.
        rows = np.full((blocks, self._part.bytes_max), 0xEE, np.uint8)
        match, wait = self._matches[owner], self._patience_seconds
        fetched = self._space.fetch(match, rows, blocks=blocks, deadline_seconds=wait, verify=self._verify)
        return Loaded(fetched.blocks, fetched.reason, rows)

    def release(self, owner: str, used: int) -> None:
        """Give the lease back and say what was used: this is what counts as a hit."""
        outcome = ReleaseOutcome.USED if used else ReleaseOutcome.UNUSED
        self._space.release(self._matches.pop(owner), used=used, outcome=outcome)

    def put(self, parent: BlockHash, keys: bytes, rows: Kv, put_id: bytes) -> MissReason | None:
        """Bring this rank's share of new blocks; they are visible once all ranks have brought theirs."""
        wait, parts = self._patience_seconds, [PartBlocks(self._part.index, 0, len(rows))]
        put = self._space.put(parent, keys, rows, put_id=put_id, parts=parts, deadline_seconds=wait)
        return put.reason

    def close(self) -> None:
        """Disconnect; a fetch that runs ends."""
        self._client.close()


class ToyEngine:
    """One request at a time; `address` None is an engine without a store."""

    rank_kind: Callable[..., ToyRank] = ToyRank

    def __init__(
        self,
        address: str | None,
        *,
        patience_seconds: float = 2.0,
        weights: str = "v1",
        ranks: int = 1,
        block_tokens: int = 16,
    ) -> None:
        self.model = ToyModel(weights)
        self.namespace = self.named(weights, layout_of(ranks, block_tokens), block_tokens)
        self.root = chain_root(self.namespace.fingerprint)
        self.ranks = [
            self.start_rank(address, rank=rank, patience_seconds=patience_seconds)
            for rank in range(ranks if address else 0)
            if address
        ]
        # More than the ranks: a load that was given up may still run.
        self._threads = ThreadPoolExecutor(LOADS_MAX)
        self._given_up: Future[None] = Future()

    def start_rank(self, address: str, *, rank: int, patience_seconds: float) -> ToyRank:
        """Start a rank, here in this process."""
        return self.rank_kind(address, self.namespace, rank=rank, patience_seconds=patience_seconds)

    def named(self, weights: str, layout: Layout, block_tokens: int) -> Namespace:
        """Return the name of this model's bytes: the weights are part of it."""
        return Namespace(model="toy", weights=weights, layout=layout, block_tokens=block_tokens)

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        """Answer greedily: resume from the store, compute the rest, save what is new."""
        self._given_up = Future()
        kv, hit_tokens, reasons = self.resume(prompt)
        known = len(kv) // self.namespace.block_tokens
        kv = self.model.extend(kv, prompt[len(kv) :])
        ids = [self.model.next_token(kv)]
        while len(ids) < new_tokens:
            kv = self.model.extend(kv, ids[-1:])
            ids.append(self.model.next_token(kv))
        self.save([*prompt, *ids], kv, known)
        return Answer(ids=tuple(ids), hit_tokens=hit_tokens, reasons=reasons)

    def resume(self, prompt: Sequence[int]) -> tuple[Kv, dict[str, int], tuple[str, ...]]:
        """Return the KV of the longest stored prefix, the tokens by tier, and why it is not longer."""
        size = self.namespace.block_tokens
        # One token at least is left to compute: its row is the answer's first.
        usable = (len(prompt) - 1) // size
        if not self.ranks or not usable:
            return np.empty((0, STATE_BYTES), np.uint8), {}, ()
        keys = block_hashes(self.root, prompt[: usable * size], block_tokens=size)
        owner = f"{os.getpid()}-{next(_requests)}"
        found = [rank.match(keys, owner) for rank in self.ranks]
        blocks = min(match.blocks for match in found)
        good = 0
        try:
            loads = [self._threads.submit(rank.load, owner, blocks) for rank in self.ranks]
            loaded = self._loaded(loads)
            good = self.agreed(loaded)
        finally:
            for rank in self.ranks:
                rank.release(owner, good)
        why = [match.reason for match in found] + [load.reason for load in loaded]
        reasons = {str(reason) for reason in why if reason and good < usable}
        kv = joined([load.rows[:good] for load in loaded], size)
        return kv, tokens_by_tier(found[0].tiers, good, size), tuple(sorted(reasons))

    def _loaded(self, loads: Sequence[Future[Loaded]]) -> list[Loaded]:
        """Wait for all ranks, or until the request is given up.

        Errors: Cancelled; loads that run end by themselves.
        """
        for load in loads:
            either: tuple[Future[Any], ...] = (load, self._given_up)
            wait(either, return_when=FIRST_COMPLETED)
            if self._given_up.done():
                raise Cancelled
        return [load.result() for load in loads]

    def agreed(self, loaded: Sequence[Loaded]) -> int:
        """Return how many blocks all ranks have: a block that one of them lacks is no block."""
        return min(load.good for load in loaded)

    def save(self, tokens: Sequence[int], kv: Kv, known: int) -> None:
        """Put the full blocks behind the `known` ones."""
        size = self.namespace.block_tokens
        count = len(kv) // size - known
        if not self.ranks or count < 1:
            return
        keys = block_hashes(self.root, tokens[: (known + count) * size], block_tokens=size)
        parent = key_at(keys, known - 1) if known else self.root
        shards = split(kv[known * size : (known + count) * size], len(self.ranks), size)
        put_id = os.urandom(16)  # the same for all ranks: it joins their shares
        for rank, shard in zip(self.ranks, shards, strict=True):
            rank.put(parent, keys[known * HASH_BYTES :], shard, put_id)

    def cancel(self) -> None:
        """Give up the request that runs."""
        self._given_up.set_result(None)

    def forget(self) -> None:
        """Nothing: puts are waited for, and no prompt is kept."""

    def close(self) -> None:
        """Disconnect."""
        for rank in self.ranks:
            rank.close()
        self._threads.shutdown()


def tokens_by_tier(tiers: Sequence[TierRun], blocks: int, block_tokens: int) -> dict[str, int]:
    """Return where the first `blocks` blocks of a match came from."""
    found: dict[str, int] = {}
    for run in tiers:
        count = min(run.count, blocks)
        if count:
            found[str(run.tier)] = found.get(str(run.tier), 0) + count * block_tokens
        blocks -= count
    return found


def layout_of(ranks: int, block_tokens: int) -> Layout:
    """Return the layout: every rank has an equal share of the bytes of a block."""
    length = block_tokens * STATE_BYTES // ranks
    table: dict[str, Any] = {"bytes_max": length, "segments": (Segment(0, 1, 0, length),)}
    parts = tuple(Part(index=rank, group="kv", shard=f"head {rank}", **table) for rank in range(ranks))
    return Layout("u8", (CacheGroup("kv"),), parts).checked()


def split(kv: Kv, ranks: int, block_tokens: int) -> list[Kv]:
    """Return what each rank holds of whole blocks, [blocks, bytes of a share]."""
    by_rank = kv.reshape(-1, block_tokens, ranks, STATE_BYTES // ranks).transpose(2, 0, 1, 3)
    return [np.ascontiguousarray(share).reshape(len(share), -1) for share in by_rank]


def joined(shards: Sequence[Kv], block_tokens: int) -> Kv:
    """Return the KV that ranks hold the shares of; the reverse of `split`."""
    width = STATE_BYTES // len(shards)
    rows = [shard.reshape(-1, block_tokens, width) for shard in shards]
    return np.concatenate(rows, axis=2).reshape(-1, STATE_BYTES)
