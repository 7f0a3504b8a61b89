"""Which rows the next step computes: one of every sequence that decodes, then prompts as time allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.engine.costs import StepCosts
from kvstore.engine.running import Running

FIXED_PARTS = 10


@dataclass(frozen=True, slots=True)
class Planned:
    """Tokens [first, first + count) of a sequence."""

    sequence: Running
    first: int
    count: int

    @property
    def holds(self) -> bool:
        """Say whether the sequence came as far as was expected when this was planned."""
        return self.sequence.computed == self.first and self.first + self.count <= len(self.sequence.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a step may take: `busy_seconds` while somebody decodes, else `idle_seconds`; or ten times what
    a step costs without its rows, where that is more: reading weights should not be what takes the time.
    """

    busy_seconds: float = 0.25
    idle_seconds: float = 4.0

    def seconds(self, costs: StepCosts, *, is_busy: bool) -> float:
        """Return the limit for a step."""
        return self.busy_seconds if is_busy else max(self.idle_seconds, FIXED_PARTS * costs.step)


def plan(
    sequences: Sequence[Running],
    costs: StepCosts,
    budget: Budget,
    *,
    block_tokens: int,
    flying: Sequence[Planned] = (),
) -> list[Planned]:
    """Return the spans of the next step, oldest sequence first.

    Chunks end on block boundaries or at the end of a prompt, so that only whole blocks need a name. At
    least one block of one prompt is in every step: nobody starves. Of `flying`, the step that is under way,
    it expects that all succeeds and that nobody says a stop word: see `Planned.holds`.
    """
    under_way = {span.sequence: span for span in flying}
    expected = [_expected(one, under_way.get(one)) for one in sequences]
    decoding = [Planned(one, first, 1) for one, first, left in expected if left == 1 and _answers(one, first)]
    time = budget.seconds(costs, is_busy=bool(decoding)) - costs.seconds((span.first, 1) for span in decoding)
    chunks: list[Planned] = []
    for one, first, wanted in expected:
        if wanted == 0 or (wanted == 1 and _answers(one, first)):
            continue
        if first < one.resumable:
            wanted = one.resumable - first
        count = min(wanted, costs.rows_within(time, first=first))
        if count < wanted:
            count -= (first + count) % block_tokens
        if count <= 0 and not chunks:
            count = min(wanted, block_tokens - first % block_tokens)
        if count <= 0:
            break
        chunks.append(Planned(one, first, count))
        time -= costs.span(first, count)
    return decoding + chunks


def _expected(one: Running, span: Planned | None) -> tuple[Running, int, int]:
    """Return where a sequence will stand behind a span, and how many tokens it will have to compute."""
    if span is None:
        return one, one.computed, len(one.ids) - one.computed
    stop = span.first + span.count
    if stop < len(one.ids):
        return one, stop, len(one.ids) - stop
    return one, stop, 1 if one.generated + 1 < one.request.max_new_tokens else 0


def _answers(one: Running, first: int) -> bool:
    """Say whether the token at `first` is one that was generated, or will be."""
    return first >= len(one.request.prompt)
