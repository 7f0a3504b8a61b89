"""What the scheduler's side remembers of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine_adapters.vllm.messages import Loaded, LoadJob
from engine_adapters.vllm.options import Wishes
from kvstore.client.recompute import Choice
from kvstore.hashing import reroot
from kvstore.types import HASH_BYTES, BlockHash, key_at, key_count

if TYPE_CHECKING:
    from kvstore.client import Match, OpenNamespace

NOTHING = Choice(0)


class RequestLike(Protocol):
    """The part of vLLM's Request that is read here. `block_hashes` grows as tokens become known."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None
    lora_request: Any

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The names of its full blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Names:
    """An open namespace, and the form in which workers get to know it."""

    opened: OpenNamespace
    canonical: bytes


@dataclass(slots=True)
class Lease:
    """A request's lease while its load is under way, the seconds that it is expected to take, and the answers
    of the ranks that are done.
    """

    match: Match
    job: LoadJob
    seconds: float
    answers: list[Loaded] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Tracked:
    """One request. Its chain's blocks [0, stored) are in the store, [0, settled) are there or ordered to be.

    `found` is the last probe's answer for `asked` blocks, `probed_at` its time; `local` how many blocks vLLM
    had itself then, and `choice` how far the answer was worth loading. `may_load` ends with the first failed
    load: a request must not ask again and again.
    """

    request: RequestLike
    wishes: Wishes
    names: Names | None
    keys: bytes = b""
    block_ids: list[int] = field(default_factory=list)
    settled: int = 0
    stored: int = 0
    asked: int = -1
    found: Match | None = None
    probed_at: float = 0.0
    local: int = 0
    choice: Choice = NOTHING
    may_load: bool = True
    lease: Lease | None = None
    has_saves: bool = False

    def know_keys(self) -> int:
        """Name the blocks whose hashes vLLM has by now; return how many have names."""
        known = key_count(self.keys)
        if self.names is not None and known < len(self.request.block_hashes):
            foreign = [bytes(name) for name in self.request.block_hashes[known:]]
            self.keys += reroot(self.names.opened.root, foreign)
        return key_count(self.keys)

    def keys_of(self, start: int, end: int) -> bytes:
        """Return the packed keys of chain blocks [start, end)."""
        return self.keys[start * HASH_BYTES : end * HASH_BYTES]

    def parent_of(self, block: int) -> BlockHash:
        """Return the key of the block before a chain block, the root before the first."""
        assert self.names is not None
        return key_at(self.keys, block - 1) if block else self.names.opened.root

    def restart(self) -> None:
        """Its blocks were taken away: all that was not confirmed begins anew."""
        self.block_ids.clear()
        self.settled = self.stored
        self.asked, self.found = -1, None
        self.has_saves = False
