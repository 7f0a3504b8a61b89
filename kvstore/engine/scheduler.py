"""Which rows the next step computes: one of every sequence that decodes, then prompts as time allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.engine.costs import StepCosts
from kvstore.engine.running import Running


@dataclass(frozen=True, slots=True)
class Planned:
    """`count` tokens of a sequence, from its first uncomputed one."""

    sequence: Running
    count: int

    @property
    def reaches_end(self) -> bool:
        """Say whether the next token can be picked behind it."""
        return self.sequence.computed + self.count == len(self.sequence.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a step may take: `busy_seconds` while somebody decodes, else `idle_seconds`."""

    busy_seconds: float = 0.25
    idle_seconds: float = 2.0


def plan(
    sequences: Sequence[Running], costs: StepCosts, budget: Budget, *, block_tokens: int
) -> list[Planned]:
    """Return the spans of the next step, oldest sequence first.

    Chunks end on block boundaries or at the end of a prompt, so that only whole blocks need a name. At
    least one block of one prompt is in every step: nobody starves.
    """
    decoding = [Planned(one, 1) for one in sequences if one.is_decoding]
    prompts = [one for one in sequences if not one.is_decoding]
    limit = budget.busy_seconds if decoding else budget.idle_seconds
    left = limit - costs.seconds((one.sequence.computed, 1) for one in decoding)
    chunks: list[Planned] = []
    for one in prompts:
        wanted = len(one.ids) - one.computed
        count = min(wanted, costs.rows_within(left, first=one.computed))
        if count < wanted:
            count -= (one.computed + count) % block_tokens
        if count <= 0 and not chunks:
            count = min(wanted, block_tokens - one.computed % block_tokens)
        if count <= 0:
            break
        chunks.append(Planned(one, count))
        left -= costs.span(one.computed, count)
    return decoding + chunks
