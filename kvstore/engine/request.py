"""What a client asks for, and the account it gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvstore.api import TierRun
from kvstore.types import MissReason

LogitsMask = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""Takes all ids so far and the logits [vocabulary], returns logits: for grammars and banned words."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is picked. Temperature 0 takes the likeliest; else the draw depends on (seed,
    position) alone, so that a request gives the same answer in any batch, and after a retry.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    mask: LogitsMask | None = None

    def pick(self, ids: Sequence[int], logits: torch.Tensor) -> int:
        """Return the id that follows `ids`."""
        if self.mask is not None:
            logits = self.mask(ids, logits)
        if self.temperature <= 0:
            return int(logits.argmax())
        shares, order = torch.softmax(logits.cpu() / self.temperature, -1).sort(descending=True)
        shares[shares.cumsum(-1) - shares > self.top_p] = 0.0
        generator = torch.Generator().manual_seed((self.seed << 24) ^ len(ids))
        return int(order[torch.multinomial(shares, 1, generator=generator)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and what to do with it.

    `save_answer` lets what is generated become prefix, unless the engine has it off for the whole class.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    retention_class: str = "agent"
    save_prompt: bool = True
    save_answer: bool = True
    name: str = field(default_factory=lambda: f"request-{next(_numbers)}")


@dataclass(slots=True)
class Usage:
    """The account of a request. `reason` says why its prefix was not found any further.

    Units: tokens; seconds since it was submitted. Of `load_seconds` that blocks were on their way, nothing
    was computed for `load_wait_seconds`.
    """

    input: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    generated: int = 0
    reason: MissReason | None = None
    fallbacks: int = 0
    preemptions: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    load_seconds: float = 0.0
    load_wait_seconds: float = 0.0

    @property
    def hit(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.hits.values())

    def add_hits(self, tiers: Sequence[TierRun], *, block_tokens: int) -> None:
        """Count blocks by where they were found."""
        for run in tiers:
            self.hits[str(run.tier)] = self.hits.get(str(run.tier), 0) + run.count * block_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated, why it ended, and the account."""

    ids: tuple[int, ...]
    usage: Usage
    ended_by: str
